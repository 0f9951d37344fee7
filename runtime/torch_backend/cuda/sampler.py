"""The sampler of the engine, by the sampling kernels: no sort, no host sync, and one launch where no row is penalised."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from runtime.request import SamplingParams, Sequence
from runtime.torch_backend.cuda.sampling import greedy, sample
from runtime.torch_backend.sampling import Columns, Sampler, penalise, row_indices
from runtime.torch_backend.transfer import to_device


class KernelSampler(Sampler):
    """As :class:`~runtime.torch_backend.sampling.Sampler`, but that a draw is Philox at (seed, how many tokens the request has
    put out), so that a seed gives other tokens than on a CPU.

    Without a seed of its own a request has a hash of (the sampler's seed, the request's id).
    """

    def _choose(
        self, logits: Tensor, sequences: Seq[Sequence], params: Seq[SamplingParams], positions: list[int]
    ) -> Tensor:
        penalised = [row for row, p in enumerate(params) if p.repetition_penalty != 1]
        if not penalised and not any(p.temperature for p in params):
            return greedy(logits)
        columns = self._columns(sequences, params, positions)
        ids = sample(logits, *columns)
        if penalised:  # which reads tokens that only the host lists; in float32, as a penalty would be rounded in less
            at = row_indices(penalised, logits.device)
            rows = logits.index_select(0, at).float()
            penalise(rows, [sequences[row] for row in penalised])
            drawn = sample(rows, *(column.index_select(0, at) for column in columns))
            ids.index_copy_(0, at, torch.where(ids.index_select(0, at) < 0, -1, drawn))
        return ids

    def choose_from(self, logits: Tensor, columns: Columns, out: Tensor) -> Tensor:
        """As :class:`~runtime.torch_backend.sampling.FixedSampler` says: one launch."""
        return sample(logits, *columns, out=out)

    def _columns(self, sequences: Seq[Sequence], params: Seq[SamplingParams], positions: list[int]) -> Columns:
        count = len(params)
        wide = -(-count // 4) * 4  # columns begin at 16 bytes: Triton compiles others apart
        whole = np.zeros((2, wide), np.int64)
        whole[0, :count] = [self.seed_of(sequence) for sequence in sequences]
        whole[1, :count] = positions
        real = np.zeros((4, wide), np.float32)
        real[0, :count] = [p.temperature for p in params]
        real[1, :count] = [p.top_p for p in params]
        real[2, :count] = [p.min_p for p in params]
        real[3].view(np.int32)[:count] = [self.top_k_of(p) for p in params]
        [seed_position] = to_device([whole], self.device)
        [rest] = to_device([real], self.device)
        seed, position = (column[:count] for column in seed_position)
        temperature, top_p, min_p, top_k = (column[:count] for column in rest)
        return Columns(temperature, top_k.view(torch.int32), top_p, min_p, seed, position)

    def top_k_of(self, params: SamplingParams) -> int:
        """0 where it keeps all."""
        return params.top_k if params.top_k < self.vocab_size else 0

    def seed_of(self, sequence: Sequence) -> int:
        """The key of all draws of ``sequence``: 64 bits, signed."""
        seed = sequence.request.params.seed
        if seed is not None:
            return seed
        digest = blake2b(f"id {self.seed} {sequence.request.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
