"""From a plan to the tensors of one forward.

What decode rows need is kept from step to step and brought forward in place: positions advance by one, and a row's
block table grows when it enters a new block. Only rows that joined or left since the last step are touched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.llm.plan import Chunk, StepPlan
from runtime.request import Sequence

Ints = NDArray[np.int64]


class DecodeRows:
    """The decode rows of the last step, each in a home (an index into the arrays) that it keeps while it decodes.

    ``order`` lists the homes in the order of the rows of the packed batch; ``sequences`` the sequences likewise.
    """

    def __init__(self, block_size: int, pad_block: int) -> None:
        self.block_size = block_size
        self.pad_block = pad_block
        self.homes: dict[Sequence, int] = {}
        self.order: Ints = np.zeros(0, np.int64)
        self.sequences: tuple[Sequence, ...] = ()
        self._joined: Ints = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._position: Ints = np.zeros(0, np.int64)
        self._known: Ints = np.zeros(0, np.int64)  # blocks entered in the table
        self._table: Ints = np.zeros((0, 8), np.int64)
        self._by_home: list[Sequence | None] = []
        self._seen: tuple[object, int] = (None, -1)
        self._step = 0

    @classmethod
    def alone(cls, block_size: int, pad_block: int, sequences: Seq[Sequence], step: int) -> DecodeRows:
        """The rows of ``sequences`` at decode index ``step``, from scratch and for one forward."""
        rows = cls(block_size, pad_block)
        rows._step = step
        rows._sync(tuple(sequences), step)
        rows._grow_tables()
        return rows

    def advance(self, plan: StepPlan) -> None:
        """Move to ``plan``."""
        if plan.decodes is not self._seen[0]:  # another scheduler, whose step index has nothing to do with the last
            self.forget()
        self._position += plan.step - self._step  # homes that are free move along and don't matter
        self._step = plan.step
        if self._seen != (plan.decodes, plan.version):
            rows = plan.decode_rows()
            self._sync(rows, plan.step)
            self._seen = (plan.decodes, plan.version)
        self._grow_tables()

    def _sync(self, rows: tuple[Sequence, ...], step: int) -> None:
        homes = self.homes
        now = dict.fromkeys(rows)
        gone = [s for s, home in homes.items() if s not in now or s.joined != self._joined[home]]
        left = [homes.pop(s) for s in gone]
        for home in left:
            self._by_home[home] = None
        self._free += left
        for sequence in rows:
            if sequence not in homes:
                home = self._free.pop() if self._free else self._more()
                homes[sequence] = home
                self._by_home[home] = sequence
                self._joined[home] = sequence.joined
                self._position[home] = position_of(sequence, step)
                self._known[home] = 0
                self._table[home] = self.pad_block
        self.sequences = rows
        self.order = np.fromiter((homes[s] for s in rows), np.int64, len(rows))

    def _more(self) -> int:
        first = len(self._by_home)
        more = max(16, first)
        self._by_home += [None] * more
        self._joined, self._position, self._known = (
            np.concatenate([a, np.zeros(more, np.int64)]) for a in (self._joined, self._position, self._known)
        )
        self._table = np.concatenate([self._table, np.full((more, self._table.shape[1]), self.pad_block, np.int64)])
        self._free = list(range(first + more - 1, first, -1))
        return first

    def _grow_tables(self) -> None:
        order = self.order
        behind = order[self._known[order] * self.block_size <= self._position[order]]
        for home in behind.tolist():
            sequence = self._by_home[home]
            assert sequence is not None
            known, need = int(self._known[home]), int(self._position[home]) // self.block_size + 1
            if need > self._table.shape[1]:
                wider = max(need, 2 * self._table.shape[1])
                pad = np.full((len(self._table), wider - self._table.shape[1]), self.pad_block, np.int64)
                self._table = np.concatenate([self._table, pad], axis=1)
            self._table[home, known:need] = sequence.blocks[known:need]
            self._known[home] = need

    @property
    def positions(self) -> Ints:
        """Of the rows' new tokens, in row order."""
        return self._position[self.order]

    def slots(self, positions: Ints) -> Ints:
        """The pool slot of each row's new token."""
        block, offset = np.divmod(positions, self.block_size)
        found: Ints = self._table[self.order, block] * self.block_size + offset
        return found

    def table(self, longest: int) -> Ints:
        """Block tables ``[rows, blocks]`` that cover ``longest`` positions, padded with the zero block."""
        found: Ints = self._table[self.order, : -(-longest // self.block_size)]
        return found

    def forget(self) -> None:
        """Drop every row; the next plan enters them anew."""
        self._seen = (None, -1)
        self._free += self.homes.values()
        self.homes.clear()
        self._by_home = [None] * len(self._by_home)
        self.order = np.zeros(0, np.int64)
        self.sequences = ()


def position_of(sequence: Sequence, step: int) -> int:
    """Where the new token of ``sequence`` at decode index ``step`` stands. One that has left the decode set since, with this
    token as its last, counts it already."""
    if sequence.state == "left":
        return sequence.computed - 1
    return sequence.computed + step - sequence.joined


def chunk_tokens(chunk: Chunk) -> Seq[int]:
    """The token ids that ``chunk`` feeds: of the prompt, after a preemption of the output as well, and drafted ones behind it."""
    sequence = chunk.sequence
    prompt = sequence.request.prompt
    end = chunk.start + chunk.count
    tokens: Seq[int] = prompt[chunk.start : end]
    if end > len(prompt):
        tokens = [*tokens, *sequence.output[max(0, chunk.start - len(prompt)) : end - len(prompt)], *chunk.drafted]
    if len(tokens) != chunk.count:
        raise ValueError(
            f"a chunk of request {sequence.request.id} covers positions {chunk.start} to {end - 1}, "
            f"but it has {len(prompt)} prompt and {len(sequence.output)} output tokens"
        )
    return tokens


def chunk_slots(chunk: Chunk, block_size: int) -> Ints:
    """The pool slots of the chunk's tokens."""
    first = chunk.start // block_size
    last = (chunk.start + chunk.count - 1) // block_size
    blocks = np.array(chunk.sequence.blocks[first : last + 1], np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    skip = chunk.start - first * block_size
    found: Ints = slots[skip : skip + chunk.count]
    return found


class PackedBatch(NamedTuple):
    """What one forward holds, on the host: decode rows, one token each, then prompt chunks end to end."""

    rows: DecodeRows
    chunks: Seq[Chunk] = ()

    def spans(self) -> list[tuple[int, int]]:
        """(begin, end) of each chunk among the tokens of the forward."""
        ends = list(accumulate((chunk.count for chunk in self.chunks), initial=len(self.rows.sequences)))
        return list(pairwise(ends))


class Listed(NamedTuple):
    """The sequences of a forward: new tokens and context (new tokens included) ``[sequences]``, and block tables ``[sequences,
    blocks]``, padded with the zero block."""

    new: Ints
    context: Ints
    table: Ints


def listed(batch: PackedBatch, block_size: int, pad_block: int) -> Listed:
    """Those of ``batch``, in its order."""
    rows, chunks = batch.rows, batch.chunks
    decoding = len(rows.sequences)
    new: Ints = np.array([*[1] * decoding, *(chunk.count for chunk in chunks)], np.int64)
    ends = np.array([chunk.start + chunk.count for chunk in chunks], np.int64)
    context: Ints = np.concatenate([rows.positions + 1, ends])
    table = np.full((len(new), -(-int(context.max()) // block_size)), pad_block, np.int64)
    if decoding:
        known = rows.table(int(context[:decoding].max()))
        table[:decoding, : known.shape[1]] = known
    for row, (chunk, end) in enumerate(zip(chunks, ends.tolist(), strict=True), decoding):
        blocks = chunk.sequence.blocks[: -(-end // block_size)]
        table[row, : len(blocks)] = blocks
    return Listed(new, context, table)
