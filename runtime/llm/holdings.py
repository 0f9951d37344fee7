"""Which KV blocks a sequence holds: given when it is admitted, found again by their content, taken back when it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.llm.kv_blocks import KVBlocks
from runtime.llm.prefix import ComingPrefixes
from runtime.request import Sequence, TokenHasher

WORTH_WAITING: Final = 256
"""Tokens of a prompt in progress that another shares, from which on that waits for them. About as many as a GPU computes in a
step at no cost beside reading the weights: fewer are computed twice sooner than a step is waited for."""


class Computing:
    """What prompts in progress compute in a step, and behind it."""

    __slots__ = ("_ahead", "_blocks", "_kv", "chunks")

    def __init__(self, kv: KVBlocks, worth_waiting: int) -> None:
        self._kv, self._ahead = kv, -(-worth_waiting // kv.block_size)
        self.chunks = 0
        """How many of the step's have been added."""
        self._blocks: dict[int, set[int]] = {}  # by place: hashes of those that it takes to be worth waiting for

    def add(self, sequence: Sequence, published: int) -> None:
        """``sequence`` goes on behind so many tokens whose blocks can be found."""
        at = published // self._kv.block_size + self._ahead - 1
        if at < len(sequence.hashes):
            self._blocks.setdefault(at, set()).add(sequence.hashes[at])

    def awaited_by(self, sequence: Sequence) -> bool:
        """Whether ``sequence``, whose turn it is, had better wait for some of it: it has much in common with what is still to
        come. Hashes are chained: who has a block in common has all before it."""
        hashes, last = sequence.hashes, (sequence.target - 1) // self._kv.block_size
        for at, digests in self._blocks.items():
            if at < min(last, len(hashes)) and hashes[at] in digests and not self._kv.knows(hashes[at]):
                return True
        return False


class Holdings:
    """The blocks of one scheduler's sequences. ``hasher`` lets outputs be found as prefixes too."""

    def __init__(self, kv: KVBlocks, hasher: TokenHasher | None) -> None:
        self._kv = kv
        self.hasher = hasher
        self.worth_waiting = WORTH_WAITING
        self._coming = ComingPrefixes(kv.total)
        self.settled = self._coming.drop
        """The prompt of a sequence is computed and published, or will not be, or not before those of others."""
        self._did_not_fit: tuple[Sequence, int, int] | None = None  # and the blocks and known content there were for it

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that are to be computed, the last known one at least."""
        if not sequence.hashes:
            return sequence.target
        known = len(self._kv.lookup(sequence.hashes, (sequence.target - 1) // self._kv.block_size))
        return sequence.target - known * self._kv.block_size

    def queued(self, sequence: Sequence) -> None:
        """``sequence`` waits: count what it has to compute, without what others are going to compute before, and have others
        count on it."""
        sequence.uncached = sequence.pending = target = sequence.target
        if sequence.hashes:
            size = self._kv.block_size
            last = (target - 1) // size
            known = len(self._kv.lookup(sequence.hashes, last))
            shared = self._coming.add(sequence, sequence.hashes[known : target // size])
            sequence.uncached -= size * known
            sequence.pending -= size * min(known + shared, last)  # the last token is computed by itself

    def computing(self) -> Computing:
        """An empty record of what one step computes."""
        return Computing(self._kv, self.worth_waiting)

    def fits(self, sequence: Sequence, spare: int, *, whole: bool = True) -> bool:
        """Give ``sequence`` the blocks of all its known tokens, if ``spare`` suffice; what was computed before is found. Without
        ``whole`` it is given that alone."""
        kv, before = self._kv, self._did_not_fit
        if before is not None and before[0] is sequence and spare <= before[1] and kv.published == before[2]:
            return False
        found = kv.lookup(sequence.hashes, (sequence.target - 1) // kv.block_size) if sequence.hashes else []
        fresh = kv.blocks_for(sequence.target) - len(found)
        if fresh + (kv.idle_among(found) if found else 0) > spare:
            self._did_not_fit = (sequence, spare, kv.published)
            return False
        self._did_not_fit = None
        if found:
            kv.hold(found)
        sequence.blocks = found + kv.take(fresh) if whole else found
        sequence.computed = len(found) * kv.block_size
        return True

    def publish(self, sequence: Sequence, start: int, end: int | None = None) -> None:
        """Make the full blocks that end after token ``start`` findable, up to token ``end`` (default: what is computed)."""
        size, hashes, blocks = self._kv.block_size, sequence.hashes, sequence.blocks
        last = sequence.computed if end is None else end
        for index in range(start // size, min(last // size, len(hashes))):
            self._kv.publish(blocks[index], hashes[index])

    def release(self, sequence: Sequence, *, trusted: bool) -> None:
        """Take the blocks back. Full ones with a known hash can still be found, unless a failed step wrote them."""
        if sequence.hashes:
            self.settled(sequence)
        if not sequence.blocks:
            return
        if not trusted:
            self._kv.forget(sequence.blocks)
        else:
            if self.hasher is not None and sequence.generated:
                self.hasher(sequence)
            if sequence.hashes:
                self.publish(sequence, 0)
        self._kv.give(sequence.blocks)
        sequence.blocks = []

    def check_integrity(self, held: Iterable[Sequence], computing: Iterable[Sequence]) -> None:
        """Raise AssertionError unless blocks are those of ``held``, and prefixes to come those of ``computing``. For tests."""
        self._kv.check_integrity([sequence.blocks for sequence in held])
        self._coming.check_integrity(list(computing))
