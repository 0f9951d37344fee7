"""The sequences that decode, counted without touching them.

Every decode advances in every step, so one index ``step`` stands for all their counters: a sequence notes at which step
it joined, and its own counters and token times are brought up to date when it leaves. Token times belong to the step.
A wheel of ``block_size`` buckets, keyed by when a sequence's next block begins, says who needs one; a heap keyed by the
step at which ``max_tokens`` is reached says who ends. A step therefore costs what changes in it.

A sequence whose drafted tokens are verified advances by more than one. It is set aside for that step, with its counters
brought up to date, and put back behind it: it keeps its place among the members, and only those that draft are touched.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from runtime.llm.kv_blocks import KVBlocks
from runtime.llm.plan import DecodeSet
from runtime.request import Sequence

_KEEP_ENDS = 1 << 13
_MOST_ENDS = 2 * _KEEP_ENDS


class Decodes(DecodeSet):
    """A :class:`~runtime.llm.plan.DecodeSet` that keeps time, context and KV growth."""

    __slots__ = (
        "_aside", "_due", "_ends", "_ends_base", "_joins", "_kv", "_reordered", "_wheel", "context", "grown", "step",
    )  # fmt: skip

    def __init__(self, kv: KVBlocks) -> None:
        super().__init__()
        self.step = 0
        """Decode steps done so far."""
        self.context = 0
        """KV tokens of all members but those set aside, before the coming step."""
        self.grown = False
        """Whether the members have the blocks of the coming step."""
        self._kv = kv
        self._ends: list[float] = []  # end times of steps, from number _ends_base on
        self._ends_base = 0
        self._due: list[tuple[int, int, int, Sequence]] = []  # (step at max_tokens, place, joined, sequence)
        self._joins = 0
        self._aside: dict[Sequence, None] = {}
        self._reordered = False  # whether a member may be counted from a later step than those behind it
        self._wheel: list[dict[Sequence, None]] = [{} for _ in range(kv.block_size)]

    def newest(self) -> Sequence:
        return next(reversed(self.members))

    def join(self, sequence: Sequence) -> None:
        """``sequence`` has all its tokens but the last sampled one computed and decodes from the coming step on."""
        sequence.state = "decode"
        self.members[sequence] = None
        self._joins += 1
        sequence.place = self._joins
        self._count(sequence)

    def _count(self, sequence: Sequence) -> None:
        """``sequence``, whose counters are up to date, advances with the others from the coming step on."""
        step, computed = self.step, sequence.computed
        sequence.joined = step
        self.version += 1
        self.context += computed
        self._wheel[(step - computed) % self._kv.block_size][sequence] = None
        due = step + sequence.request.max_tokens - sequence.generated
        heapq.heappush(self._due, (due, sequence.place, step, sequence))
        if len(self._due) > 2 * len(self.members) + 64:  # those that stopped early are not to be kept until then
            self._due = [entry for entry in self._due if entry[3].joined == entry[2]]
            heapq.heapify(self._due)

    def leave(self, sequence: Sequence, failed: bool = False) -> None:
        """Bring the counters of ``sequence`` up to date; with ``failed``, its last step yielded no token."""
        if sequence in self._aside:  # they are, and that step yielded none yet
            del self._aside[sequence]
            self.version += 1
        else:
            self._bring_up_to_date(sequence, failed)
        del self.members[sequence]

    def set_aside(self, sequence: Sequence) -> None:
        """``sequence`` does not advance with the others in the coming step; :meth:`put_back` or :meth:`leave` follows it."""
        self._bring_up_to_date(sequence)
        self._aside[sequence] = None

    def put_back(self, sequence: Sequence, tokens: int, end: float) -> None:
        """The step for which ``sequence`` was set aside is done, ended at ``end`` and yielded it so many ``tokens``."""
        del self._aside[sequence]
        self._reordered = True
        sequence.computed += tokens
        sequence.generated += tokens
        sequence.token_times += [end] * tokens
        self._count(sequence)

    def rows(self, version: int) -> tuple[Sequence, ...]:
        """As :meth:`~runtime.llm.plan.DecodeSet.rows`, without those set aside."""
        if self._aside and self._at != version == self.version:
            self._rows, self._at = tuple([s for s in self.members if s not in self._aside]), version
        return super().rows(version)

    def _bring_up_to_date(self, sequence: Sequence, failed: bool = False) -> None:
        """The counters of ``sequence``, which then no longer advance with the others'."""
        joined, computed = sequence.joined, sequence.computed
        steps = self.step - joined
        del self._wheel[(joined - computed) % self._kv.block_size][sequence]
        self.version += 1
        self.context -= computed + steps
        steps -= failed
        sequence.computed = computed + steps
        sequence.generated += steps
        first = joined - self._ends_base
        sequence.token_times += self._ends[first : first + steps]
        sequence.joined = -1

    def grow(self) -> bool:
        """Hand out the blocks that the coming step begins to fill. False, and none, if there are not enough."""
        kv = self._kv
        bucket = self._wheel[self.step % kv.block_size]
        self.grown = bool(self.members)
        if bucket:
            count = len(bucket)
            if count > kv.free:
                return False
            for sequence, block in zip(bucket, kv.take(count), strict=True):
                sequence.blocks.append(block)
        return True

    @property
    def growing(self) -> int:
        """How many blocks :meth:`grow` takes."""
        return len(self._wheel[self.step % self._kv.block_size])

    @property
    def can_grow(self) -> bool:
        """Whether there are blocks enough for :meth:`grow`."""
        return self.growing <= self._kv.free

    def steps_alike(self) -> int:
        """How many coming steps are certain to be alike: nobody ends before the last, and the blocks suffice.

        :meth:`grow` has run for the first of them.
        """
        most = self._due[0][0] - self.step
        free, size = self._kv.free, self._kv.block_size
        if -(-most // size) * len(self.members) > free:  # perhaps not for all: count
            for ahead in range(1, most):
                free -= len(self._wheel[(self.step + ahead) % size])
                if free < 0:
                    return ahead
        return most

    def advance(self, ends: Seq[float]) -> None:
        """``len(ends)`` steps are done. :meth:`grow` has run for the first of them."""
        count = len(ends)
        if count > 1:
            wheel, size = self._wheel, self._kv.block_size
            growing: list[Sequence] = []
            for step in range(self.step + 1, self.step + count):
                growing += wheel[step % size]
            for sequence, block in zip(growing, self._kv.take(len(growing)), strict=True):
                sequence.blocks.append(block)
        self.step += count
        self.grown = False
        self.context += (len(self.members) - len(self._aside)) * count
        self._ends += ends
        if len(self._ends) > _MOST_ENDS:
            oldest = next(iter(self.members)).joined
            if self._reordered:
                oldest = min([s.joined for s in self.members if s not in self._aside], default=self.step)
            if oldest - self._ends_base > _KEEP_ENDS:
                del self._ends[: oldest - self._ends_base]
                self._ends_base = oldest

    def ended_at(self, step: int, end: float) -> None:
        """The decode step number ``step``, advanced over before its end was known, ended at ``end``."""
        self._ends[step - self._ends_base] = end

    def take_ended(self) -> Seq[Sequence]:
        """Those that have reached ``max_tokens``; each is reported once, and is to leave."""
        due, step = self._due, self.step
        if not due or due[0][0] > step:
            return ()
        ended = []
        while due and due[0][0] <= step:
            _, _, joined, sequence = heapq.heappop(due)
            if sequence.joined == joined:
                ended.append(sequence)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError if a counter disagrees with the members."""
        assert not self._aside, "set aside, and not put back behind the step"
        assert self.context == sum(s.computed + self.step - s.joined for s in self.members)
        for s in self.members:
            tokens = s.computed + self.step - s.joined
            assert s.state == "decode" and 0 <= s.joined <= self.step, s
            assert len(s.blocks) == self._kv.blocks_for(tokens + self.grown), s
            assert s in self._wheel[(s.joined - s.computed) % self._kv.block_size], s
            assert s.generated + self.step - s.joined < s.request.max_tokens, s
        assert sum(map(len, self._wheel)) == len(self.members)
        assert len(self._ends) == self.step - self._ends_base
