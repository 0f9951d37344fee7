"""Forwards of steps with prompts, recorded once for each of a few numbers of tokens.

Launching some four hundred kernels takes the host longer than a small step takes the device. What differs between two steps of
as many tokens is where they belong: token ids, positions, slots, block tables, the attention's work list and the rows whose
logits are wanted. All of these lie in tensors that stay where they are, so one call queues the whole forward. Tokens that a size
has left over are dummies, which write to a slot that is nobody's and which no sequence attends to. Sampling, and what a step
leaves behind, are those of steps that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.torch_backend.attention import FixedSteps
from runtime.torch_backend.inputs import Listed, PackedBatch
from runtime.torch_backend.resident import Graphs
from runtime.torch_backend.transfer import to_device


class RecordedSteps:
    """Recordings of ``forward(ids, positions, slots, wanted, state)``: logits ``[wanted, vocab]`` of ids, positions and pool
    slots ``[tokens]``, where ``state`` is what ``attention`` made.

    ``sizes``: numbers of tokens; a step may hold up to ``sequences`` sequences of up to ``width`` blocks of ``block_size``
    tokens. Dummies write to ``scratch_slot``; tables are padded with ``pad_block``. ``record(step)`` records ``step(size)`` for
    the sizes. Raises what a model raises that cannot be recorded.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        sequences: int,
        width: int,
        *,
        block_size: int,
        pad_block: int,
        scratch_slot: int,
        forward: Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor],
        attention: FixedSteps,
        record: Callable[[Callable[[int], None]], Graphs],
        device: torch.device,
    ) -> None:
        self.sizes, self.sequences, self._longest = tuple(sorted(sizes)), sequences, width * block_size
        self._forward, self._attention, self._scratch, self._device = forward, attention, scratch_slot, device
        most = self.sizes[-1]
        self._tokens = torch.zeros(2, most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), scratch_slot, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(min(most, sequences), dtype=torch.int64, device=device)
        self._rows = torch.arange(most, device=device)
        self._table = torch.full((sequences, width), pad_block, dtype=torch.int64, device=device)
        self._states = {size: attention.fixed_step(self._table[: min(size, sequences)], size) for size in self.sizes}
        self._logits: Tensor | None = None  # those of all sizes, one after the other
        with torch.inference_mode():
            self._graphs = record(self._step)

    def fits(self, batch: PackedBatch) -> bool:
        """Whether :meth:`run` can run ``batch``: prompts, with nothing drafted, of no more tokens, sequences and context than are
        recorded for."""
        rows, chunks = len(batch.rows.sequences), batch.chunks
        if not chunks or rows + len(chunks) > self.sequences or any(chunk.drafted for chunk in chunks):
            return False
        if rows + sum(chunk.count for chunk in chunks) > self.sizes[-1]:
            return False
        longest = max(chunk.start + chunk.count for chunk in chunks)
        return max(longest, int(batch.rows.positions.max(initial=0)) + 1) <= self._longest

    def run(self, listed: Listed, tokens: Tensor, slots: Tensor, wanted: Tensor | None) -> Tensor:
        """Queue the forward of a batch that fits, which is ``listed``: ``tokens [2, n]`` are ids and positions, ``slots [n]``,
        ``wanted`` the rows whose logits are (None: all). Returns these ``[rows, vocab]``."""
        count = tokens.shape[1]
        size = next(size for size in self.sizes if size >= count)
        wanted = self._rows[:count] if wanted is None else wanted
        [table] = to_device([listed.table], self._device)
        self._table[: table.shape[0], : table.shape[1]].copy_(table)
        self._tokens[:, :count].copy_(tokens)
        self._tokens[:, count:size].zero_()
        self._slots[:count].copy_(slots)
        self._slots[count:size].fill_(self._scratch)
        self._wanted[: len(wanted)].copy_(wanted)
        self._wanted[len(wanted) :].zero_()
        self._attention.refresh_step(self._states[size], listed.new, listed.context)
        self._graphs.replay(size)
        assert self._logits is not None
        return self._logits[: len(wanted)].clone()  # the next step overwrites them

    def _step(self, size: int) -> None:
        """What is recorded."""
        wanted = self._wanted[: min(size, len(self._wanted))]
        found = self._forward(
            self._tokens[0, :size], self._tokens[1, :size], self._slots[:size], wanted, self._states[size]
        )
        if self._logits is None:  # of the largest size, which is recorded first, before it is recorded
            self._logits = found.new_empty(len(self._wanted), found.shape[1])
        self._logits[: len(found)].copy_(found)
