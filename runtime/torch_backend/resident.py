"""Decode rows that live on the device: one call runs a whole step of them, from token ids to token ids.

Token ids, positions, block tables, counts of tokens and sampling parameters stay in buffers that never move. A step advances
them where they are, and what it samples is what the next one is fed, so the host sends only what changed: a row that came,
moved or computed a token elsewhere (in a step with prompts), and the blocks that rows enter. What a step does is therefore
the same call each time, and a device can record it once for each of a few numbers of rows (:class:`Graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.llm.plan import StepPlan
from runtime.request import Sequence
from runtime.torch_backend.attention import FixedAttention
from runtime.torch_backend.inputs import Ints
from runtime.torch_backend.sampling import Columns, FixedSampler
from runtime.torch_backend.transfer import to_device

_LADDER: Final = ((8, 64, 8), (64, 256, 16), (256, 512, 32), (512, 1 << 16, 64))
"""(first size, first one beyond, stride)."""

_ABSENT: Final = -1  # the position of a row that is not on the device, or not as it should be


def batch_ladder(most: int) -> tuple[int, ...]:
    """The numbers of rows that decode steps are recorded for: 1, 2, 4, 8, then in steps of 8 up to 64, of 16 up to 256, of 32 up
    to 512 and of 64 beyond; the last one is ``most``.

    A step of n rows runs as the next size, and what is left over are dummies: up to 44% of at most 16 rows, which cost little
    where steps wait for memory, 19% from 65 rows on, 11% from 129 on. docs/log.md says what that costs. Raises ``ValueError``
    below 1.
    """
    if most < 1:
        raise ValueError(f"max_batch_size is {most}; it must be at least 1")
    sizes = [1, 2, 4]
    for begin, end, stride in _LADDER:
        sizes += range(begin, min(end, most), stride)
    return (*(size for size in sizes if size < most), most)


class InFlight:
    """What the step before has sampled and the host has not read: ``tokens [n]`` on the device, −1 where a row failed, for
    ``sequences``."""

    def __init__(self, sequences: Seq[Sequence], tokens: Tensor) -> None:
        self.sequences = sequences
        self.tokens = tokens

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """Where each sequence's token is."""
        return {sequence: row for row, sequence in enumerate(self.sequences)}

    def take(self, at: Tensor) -> Tensor:
        """The tokens at ``at [k]``; where there is none, 0, whose row is nobody's any more."""
        return self.tokens.index_select(0, at).clamp_(min=0)


class Graphs(Protocol):
    """A step recorded for some numbers of rows."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """For how many rows, ascending. A fact of the start: nothing is recorded later."""
        ...

    def replay(self, size: int) -> None:
        """Queue the step of ``size`` rows, one of :attr:`sizes`."""
        ...


class ResidentRows:
    """Up to ``most`` decode rows on ``device``, with block tables of ``width`` blocks of ``block_size`` tokens.

    Rows are dense: 0 … n − 1 are sequences, and where one leaves, one that comes or the last takes its place. The rows behind
    are dummies: greedy, at position 0 of ``scratch_block``, which is nobody's, and there they stay. What a table does not list is
    ``pad_block``, always zero.
    """

    def __init__(
        self,
        most: int,
        width: int,
        *,
        block_size: int,
        pad_block: int,
        scratch_block: int,
        sampler: FixedSampler,
        device: torch.device,
    ) -> None:
        rows = -(-most // 4) * 4  # columns begin at 16 bytes: Triton compiles others apart
        self.most, self.width, self.block_size = most, width, block_size
        self._sampler, self._device = sampler, device
        self._pad, self._scratch = pad_block, scratch_block
        self._whole = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.live, seeds, drawn = self._whole
        """``[rows]``: of the coming step its token ids and where they stand, and 1 where a row is a sequence's."""
        self._real = torch.zeros(4, rows, dtype=torch.float32, device=device)
        temperature, top_p, min_p, top_k = self._real
        self.columns = Columns(temperature, top_k.view(torch.int32), top_p, min_p, seeds, drawn)
        self.table = torch.full((rows, width), pad_block, dtype=torch.int64, device=device)
        self.table[:, 0] = scratch_block
        self.sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        """``[rows]``: what the last step sampled, −1 where a row is unsound."""
        self.sequences: tuple[Sequence, ...] = ()
        self.plain = True
        """Whether every row can be sampled by its columns alone."""
        self._seen: tuple[object, int] = (None, -1)
        # the host's side: a row's position at decode index 0, what is on the device, parameters
        self._base, self._joined, self._there, self._known = (np.zeros(rows, np.int64) for _ in range(4))
        self._there[:] = _ABSENT
        self._listed = np.ones(rows, np.int64)  # blocks in a row of the device's table, a former owner's too
        self._seed = np.zeros(rows, np.int64)
        self._params: NDArray[np.float32] = np.zeros((4, rows), np.float32)
        self._filled = 0  # rows of the device that are no dummies

    def arrange(self, plan: StepPlan) -> None:
        """Give the decode rows of ``plan``, at most ``most``, their places."""
        seen = (plan.decodes, plan.version)
        if seen == self._seen:
            return
        rows = plan.decode_rows()
        coming = dict.fromkeys(rows)
        places: list[Sequence | None] = [
            s if s in coming and s.joined == self._joined[row] else None for row, s in enumerate(self.sequences)
        ]
        for kept in places:
            if kept is not None:
                del coming[kept]
        places += [None] * (len(rows) - len(places))
        new, tail = iter(coming), len(places)
        for row in range(len(rows)):
            if places[row] is None:
                sequence = next(new, None)
                while sequence is None:  # nobody comes: the last moves up
                    tail -= 1
                    sequence = places[tail]
                places[row] = sequence
                self._enter(row, sequence)
        self.sequences = tuple(s for s in places[: len(rows)] if s is not None)
        self.plain = all(
            s.request.params.repetition_penalty == 1 and s.request.params.logprobs is None for s in self.sequences
        )
        self._seen = seen

    def _enter(self, row: int, sequence: Sequence) -> None:
        params = sequence.request.params
        seed, top_k = self._sampler.seed_of(sequence), self._sampler.top_k_of(params)  # first: they may raise
        self._base[row], self._joined[row] = sequence.computed - sequence.joined, sequence.joined
        self._there[row], self._known[row] = _ABSENT, 0
        self._seed[row] = seed
        self._params[:3, row] = params.temperature, params.top_p, params.min_p
        self._params[3].view(np.int32)[row] = top_k

    def positions_at(self, step: int) -> Ints:
        """Of the rows' new tokens at decode index ``step``."""
        found: Ints = self._base[: len(self.sequences)] + step
        return found

    def update(self, step: int, flight: InFlight | None) -> None:
        """Bring the device to decode index ``step``: rows that are not as they should be, dummies where rows have gone, and the
        blocks that rows enter. Tokens that the host does not know come from ``flight``. The host waits for nothing."""
        count, positions = len(self.sequences), self.positions_at(step)
        stale = np.flatnonzero(self._there[:count] != positions)
        gone = np.arange(count, self._filled)
        at = np.concatenate([stale, gone])
        whole = np.zeros((5, len(at)), np.int64)
        real = np.zeros((4, len(at)), np.float32)
        placed: list[int] = []  # which of the stale rows get a token in flight, and where that is
        taken: list[int] = []
        flying: dict[Sequence, int] = flight.rows if flight is not None and len(stale) else {}
        for nth, row in enumerate(stale.tolist()):
            sequence = self.sequences[row]
            known = flying.get(sequence)
            if known is None:
                whole[0, nth] = sequence.output[-1]
            else:
                placed.append(nth)
                taken.append(known)
            whole[4, nth] = len(sequence.output) + (known is not None)
        whole[1, : len(stale)], whole[2, : len(stale)] = positions[stale], 1
        whole[3, : len(stale)], real[:, : len(stale)] = self._seed[stale], self._params[:, stale]
        cells, blocks = self._cells(positions)
        for row in gone.tolist():
            cells += range(row * self.width, row * self.width + int(self._listed[row]))
            blocks += [self._scratch, *[self._pad] * (int(self._listed[row]) - 1)]
            self._listed[row] = 1
        if len(at) or cells:
            arrays = [at, whole, *(np.array(x, np.int64) for x in (placed, taken, cells, blocks))]
            rows, values, to, source, where, what = to_device(arrays, self._device)
            if len(at):
                if taken and flight is not None:
                    values[0].index_copy_(0, to, flight.take(source))
                self._whole.index_copy_(1, rows, values)
                [values] = to_device([real], self._device)
                self._real.index_copy_(1, rows, values)
            if cells:
                self.table.view(-1).index_copy_(0, where, what)
        self._there[:count] = positions
        self._there[count:] = _ABSENT
        self._filled = count

    def _cells(self, positions: Ints) -> tuple[list[int], list[int]]:
        """Flat places in the table, and the blocks that belong there, for the rows that enter some."""
        cells: list[int] = []
        blocks: list[int] = []
        size = self.block_size
        for row in np.flatnonzero(self._known[: len(positions)] * size <= positions).tolist():
            known, need = int(self._known[row]), int(positions[row]) // size + 1
            end = max(need, int(self._listed[row]))
            cells += range(row * self.width + known, row * self.width + end)
            blocks += [*self.sequences[row].blocks[known:need], *[self._pad] * (end - need)]
            self._known[row] = self._listed[row] = need
        return cells, blocks

    def stepped(self) -> None:
        """A step of the rows has been queued, which moves each on by one."""
        self._there[: len(self.sequences)] += 1

    def forget(self) -> None:
        """What is on the device may be wrong: the next update enters every row anew."""
        self._there[:] = _ABSENT
        self._known[:] = 0
        self._seen = (None, -1)


class ResidentDecode:
    """Steps of decode rows alone, by :class:`Graphs`.

    ``forward(ids, positions, slots, state)``: logits ``[rows, vocab]`` of ids, positions and pool slots ``[rows]``, where
    ``state`` is what ``attention`` made. ``record(step)`` records ``step(size)`` for its sizes, none above ``rows.most``.
    Raises what a model raises that cannot be recorded.
    """

    def __init__(
        self,
        rows: ResidentRows,
        forward: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        *,
        attention: FixedAttention,
        sampler: FixedSampler,
        record: Callable[[Callable[[int], None]], Graphs],
    ) -> None:
        self.rows = rows
        self._forward, self._attention, self._sampler = forward, attention, sampler
        self._states: dict[int, Any] = {}
        with torch.inference_mode():
            self._graphs = record(self._step)
        self.sizes = self._graphs.sizes

    def fits(self, plan: StepPlan) -> bool:
        """Whether :meth:`launch` can run ``plan``: decode rows alone, no more than are recorded for, with nothing to be told of a
        row but its token."""
        if plan.chunks or plan.drafts or not 0 < plan.n_decode <= self.sizes[-1]:
            return False
        self.rows.arrange(plan)
        longest = int(self.rows.positions_at(plan.step).max())
        return self.rows.plain and longest < self.rows.width * self.rows.block_size

    def launch(self, plan: StepPlan, flight: InFlight | None) -> tuple[tuple[Sequence, ...], Tensor]:
        """Queue ``plan``, which fits. Returns the sequences and, on the device, the id of each one's token."""
        rows, count = self.rows, plan.n_decode
        try:
            rows.update(plan.step, flight)
            size = next(size for size in self.sizes if size >= count)
            self._attention.refresh(self._state(size), rows.positions_at(plan.step) + 1)
            self._graphs.replay(size)
        except Exception:
            rows.forget()
            raise
        rows.stepped()
        return rows.sequences, rows.sampled[:count].clone()  # the next step overwrites it

    def _state(self, size: int) -> Any:
        found = self._states.get(size)
        if found is None:
            found = self._states[size] = self._attention.fixed(self.rows.table[:size], self.rows.positions[:size])
        return found

    def _step(self, size: int) -> None:
        """What is recorded: it reads and writes tensors that stay where they are, and looks at none of them."""
        rows = self.rows
        positions, live = rows.positions[:size], rows.live[:size]
        block = rows.table[:size].gather(1, (positions // rows.block_size).unsqueeze(1)).squeeze(1)
        slots = block * rows.block_size + positions % rows.block_size
        logits = self._forward(rows.tokens[:size], positions, slots, self._state(size))
        sampled = rows.sampled[:size]
        columns = Columns(*(column[:size] for column in rows.columns))
        self._sampler.choose_from(logits, columns, sampled)
        rows.tokens[:size].copy_(sampled.clamp(min=0).mul_(live))
        positions.add_(live)
        columns.position.add_(live)
