"""Forwards of steps with prompts, recorded once for each of a few numbers of tokens.

Launching some four hundred kernels takes the host longer than a small step takes the device. What differs between two steps of
as many tokens is where they belong: token ids, positions, slots, block tables, the attention's work list and the rows whose
logits are wanted. All of these lie in tensors that stay where they are, so one call queues the whole forward, up to what the
model's head reads. Tokens that a size has left over are dummies, which write to a slot that is nobody's and which no sequence
attends to. The head, of the rows that are wanted alone, sampling, and what a step leaves behind, are those of steps that are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from runtime.torch_backend.attention import FixedSteps
from runtime.torch_backend.inputs import Listed, PackedBatch
from runtime.torch_backend.resident import Graphs
from runtime.torch_backend.transfer import to_device

_LADDER: Final = ((16, 128, 16), (128, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, 2049, 256))
"""(first size, first one beyond, stride): of a step of 128 tokens or more a fifth is dummies at most, 8% on average."""

_FLOPS: Final = 8e12
"""Products and sums of the largest step that is recorded. It takes a GPU of 800 TFLOP/s 10 ms, and its launches take a host
as long (docs/benchmarks/gpu.md): the device is busy with a larger one until the host has launched the next, and dummies only
cost."""


def prompt_ladder(most: int, parameters: int) -> tuple[int, ...]:
    """The numbers of tokens that steps with prompts of a model of so many ``parameters`` are recorded for, up to ``most``."""
    longest = min(most, _FLOPS / (2 * parameters))
    sizes = [size for ladder in _LADDER for size in range(*ladder) if size <= longest]
    if most <= longest and most < _LADDER[-1][1] and most not in sizes:
        sizes.append(most)
    return tuple(sizes)


class RecordedSteps:
    """Recordings of ``forward(ids, positions, slots, wanted, state)``: what the head reads ``[wanted, width]`` of ids, positions
    and pool slots ``[tokens]``, where ``state`` is what ``attention`` made.

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
        self._hidden: Tensor | None = None  # that of all sizes, one after the other
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
        ``wanted`` the rows whose logits are (None: all). Returns what the head reads of these ``[rows, width]``, until the next
        run."""
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
        assert self._hidden is not None
        return self._hidden[: len(wanted)]

    def _step(self, size: int) -> None:
        """What is recorded."""
        wanted = self._wanted[: min(size, len(self._wanted))]
        found = self._forward(
            self._tokens[0, :size], self._tokens[1, :size], self._slots[:size], wanted, self._states[size]
        )
        if self._hidden is None:  # of the largest size, which is recorded first, before it is recorded
            self._hidden = found.new_empty(len(self._wanted), found.shape[1])
        self._hidden[: len(found)].copy_(found)
