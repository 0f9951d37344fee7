"""Sequences that wait for their turn."""

from __future__ import annotations

import heapq
import logging
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from runtime.errors import StepFailedError
from runtime.knobs import Knobs
from runtime.llm.prefill_rate import Work
from runtime.ordering import Deadline, Ordering, learning, leaving
from runtime.records import RequestRecord, StepRecord
from runtime.request import Sequence
from runtime.shared.panics import ends_program

log = logging.getLogger(__name__)

_BUCKETS_PER_UNIT: Final = 16  # keys are seconds or tokens: how finely work_before tells them apart
_FAR: Final = 1e15  # a deadline may be infinite
_BEHIND: Final = 1e12  # added to the arrival it is a key behind those of orderings


Entry = tuple[bool, float, int, Sequence]
"""Of the queue: rank, number and sequence."""


class WaitingQueue:
    """Sequences that wait: preempted ones first, then by the ordering's key, relegated ones last, preempted or not. Leaving early
    is lazy: O(1)."""

    def __init__(self, ordering: Ordering) -> None:
        self.own, self._ordering = ordering, ordering
        """The ordering to come back to."""
        self._learning = learning(ordering)
        self._heap: list[Entry] = []
        self._arrived: deque[Sequence] = deque()  # never run, by arrival
        self._pushed = 0
        self.count = 0
        """Sequences that wait."""
        self._buckets: dict[int, Work] | None = None  # what is queued by key; only where any is; None until requested
        self.tokens = 0
        """Prompt tokens queued, but for those in the prefix cache when they were looked for, as a rule when they came, and those
        that others were to compute before."""
        self.relegated_tokens = 0
        """Those of them that belong to relegated sequences."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (entry[3] for entry in self._heap if _stands(entry))

    def push(self, sequence: Sequence) -> None:
        """Queue ``sequence``. Raises StepFailedError, and changes nothing, where the ordering raises or returns no number."""
        if not sequence.preemptions:
            sequence.key = key_of(self._ordering, sequence)
            arrived = self._arrived
            if arrived and sequence.request.arrival < arrived[-1].request.arrival:  # it was on its way for longer
                insort(arrived, sequence, key=_arrival)
            else:
                arrived.append(sequence)
            if len(arrived) > 2 * self.count + 64:
                self._arrived = deque(s for s in self._arrived if s.state == "waiting" and not s.preemptions)
        self.count += 1
        self._enter(sequence)
        self._tally(sequence, 1)

    def relegate(self, sequence: Sequence) -> None:
        """Put ``sequence``, which waits and has never run, behind all that are not relegated; those go by their arrival."""
        self._tally(sequence, -1)
        put_behind(sequence)
        self._tally(sequence, 1)
        self._enter(sequence)  # the entry of before stands no longer
        self._sweep()

    def _enter(self, sequence: Sequence) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (*rank(sequence), self._pushed, sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            if _stands(entry):
                return entry[3]
            heapq.heappop(heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return what :meth:`peek` shows; the caller changes its state."""
        sequence = heapq.heappop(self._heap)[3]
        self._taken(sequence)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Remove ``sequence``, whether or not it is the one that :meth:`peek` shows: another scheduler chose it."""
        if self.peek() is not sequence:
            self._heap = [entry for entry in self._heap if entry[3] is not sequence]
            heapq.heapify(self._heap)
            self._taken(sequence)
        else:
            self.pop()

    def _taken(self, sequence: Sequence) -> None:
        self.count -= 1
        self._tally(sequence, -1)
        for ordering, key in self._keys_of(sequence):
            _tell_taken(ordering, sequence, key)

    def _keys_of(self, sequence: Sequence) -> list[tuple[Ordering, float]]:
        """The orderings that have given ``sequence`` a key and wait to hear that it has left the queue, each with its key."""
        if sequence.preemptions:  # they heard when it began
            return []
        keys = [(self._ordering, given(sequence))]
        if self._ordering is not self.own and sequence.own_key is not None:
            keys.append((self.own, sequence.own_key))
        return keys

    def set_aside(self) -> Entry:
        """Leave what :meth:`peek` shows out of turn, until :meth:`put_back`. It waits all the same."""
        return heapq.heappop(self._heap)

    def put_back(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def in_order(self) -> Iterator[Sequence]:
        """Those that wait, as of now, in the order of their turns. One that ends meanwhile is left out; one that is relegated
        at its turn has another."""
        heap = self._heap.copy()
        while heap:
            entry = heapq.heappop(heap)
            if _stands(entry):
                sequence = entry[3]
                yield sequence
                if sequence.key != entry[1]:
                    heapq.heappush(heap, (*rank(sequence), *entry[2:]))

    def up_to(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those that wait for a turn before that of ``sequence``, and itself, in no particular order. Looks at as many as those
        are, not at as many as wait."""
        heap, last = self._heap, rank(sequence)
        open_at = [0]  # no entry of the heap is before the one above it
        while open_at:
            index = open_at.pop()
            if index < len(heap) and (entry := heap[index])[:2] <= last:
                open_at += (2 * index + 1, 2 * index + 2)
                if _stands(entry):
                    yield entry[3]

    def removed(self, sequence: Sequence) -> None:
        """``sequence`` has been given a state other than waiting and is to be forgotten."""
        self.count -= 1
        self._tally(sequence, -1)
        self._sweep()
        for ordering, key in self._keys_of(sequence):
            listener = leaving(ordering)
            if listener is not None:
                try:
                    listener.left(sequence.request, key)
                except BaseException as error:
                    if ends_program(error):
                        raise
                    log.warning("the ordering raised when request %s left", sequence.request.id, exc_info=True)

    def _sweep(self) -> None:
        gone = len(self._heap) - self.count
        if gone > 64 and gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if _stands(entry)]
            heapq.heapify(self._heap)

    def _tally(self, sequence: Sequence, sign: int) -> None:
        tokens = sign * sequence.pending
        self.tokens += tokens
        if sequence.relegated is not None:
            self.relegated_tokens += tokens
        if self._buckets is not None:
            _add(self._buckets, sequence, sign)

    def recount(self, sequence: Sequence, uncached: int, *, alone: bool = False) -> bool:
        """``sequence``, which waits, has ``uncached`` tokens that are not in the prefix cache; ``alone``: and counts on nobody
        else for them any more. Whether that is fewer than was counted: what has been evicted since is not."""
        before = sequence.pending
        now = min(uncached, sequence.uncached if alone else before)
        if now != before:
            self._tally(sequence, -1)
            sequence.pending = now
            self._tally(sequence, 1)
        if alone or now < before:
            sequence.uncached = now
        return now < before

    def work_before(self, sequence: Sequence) -> Work:
        """Of the prompts that go before that of ``sequence``, which waits, give or take a bucket of keys.

        Costs as many additions as keys are spread, in sixteenths, not as many as sequences wait.
        """
        if self._buckets is None:
            self._buckets = {}
            for one in self:
                _add(self._buckets, one, 1)
        own, before = _bucket(sequence.key), work_of(sequence)
        tokens, pairs = -before.tokens, -before.pairs
        for bucket, work in self._buckets.items():
            if bucket <= own:
                tokens += work.tokens
                pairs += work.pairs
        return Work(tokens, pairs)

    @property
    def ordering(self) -> Ordering:
        return self._ordering

    def reorder(self, ordering: Ordering, *, slos_changed: bool = False) -> list[tuple[Sequence, Exception]]:
        """Wait by ``ordering`` from now on, those too that were relegated. Returns those for which it raised: they keep their
        place until they are ended. ``slos_changed``: keys by the ordering in force may differ now."""
        waiting = [entry for entry in sorted(self._heap) if _stands(entry)]
        before = None if slos_changed else self._ordering
        self._ordering, self._buckets = ordering, None
        self._learning = learning(ordering)
        self.relegated_tokens = 0
        failed = self.key_anew((sequence for *_, sequence in waiting), before)
        self._heap = [(*rank(sequence), pushed, sequence) for *_, pushed, sequence in waiting]
        heapq.heapify(self._heap)
        arrived = [sequence for *_, sequence in waiting if _never_ran(sequence)]
        self._arrived = deque(sorted(arrived, key=_arrival))
        return failed

    def key_anew(self, sequences: Iterable[Sequence], before: Ordering | None) -> list[tuple[Sequence, Exception]]:
        """Give each its key by the ordering in force in place of that by ``before`` (None: by the same and former SLOs, if it
        goes by any); none is relegated any more. The key that the own ordering gave is its key again: one that shares out what is
        asked for must not be asked twice. Returns those for which it raised, which keep what they had."""
        ordering, own = self._ordering, self.own
        failed: list[tuple[Sequence, Exception]] = []
        for sequence in sequences:
            unrelegate(sequence)
            if before is None and isinstance(own, Deadline):
                sequence.own_key = None
            if ordering is before or (before is None and not isinstance(ordering, Deadline)):
                continue
            if before is own:
                sequence.own_key = sequence.key
            try:
                known = sequence.own_key if ordering is own else None
                sequence.key = key_of(ordering, sequence) if known is None else known
            except StepFailedError as error:
                failed.append((sequence, error))
                continue
            begun = sequence.state != "waiting" or sequence.preemptions
            if before is not None and known is None and begun:
                _tell_taken(ordering, sequence, sequence.key)
        return failed

    def stepped(self, record: StepRecord) -> None:
        """A step is over: tell the ordering, if it learns."""
        if self._learning is not None:
            self._tell(self._learning.on_step, record)

    def ended(self, record: RequestRecord) -> None:
        """The same of a request."""
        if self._learning is not None:
            self._tell(self._learning.on_request, record)

    def _tell(self, hear: Callable[[Any], object], record: StepRecord | RequestRecord) -> None:
        try:
            hear(record)
        except BaseException as error:
            if ends_program(error):
                raise
            log.warning("the ordering raised at a record and will hear no more", exc_info=True)
            self._learning = None

    def held_until(self, knobs: Knobs, left: int, slots: int) -> float:
        """Until when the wait window holds new prompts back; -inf when it does not, as while relegated ones have waited longer.

        ``left`` tokens and ``slots`` sequences may still come into the step.
        """
        if not knobs.max_wait_ms:
            return -math.inf
        oldest = self.oldest()
        if oldest is None or self.relegated_tokens or len(self) >= slots or self.tokens >= left:
            return -math.inf
        return oldest.request.arrival + knobs.max_wait_ms / 1e3

    def oldest(self) -> Sequence | None:
        """The earliest arrival among those that never ran and are not relegated: the one the wait window counts from."""
        arrived = self._arrived
        while arrived and not _never_ran(arrived[0]):
            arrived.popleft()
        return arrived[0] if arrived else None

    def look_for_oldest(self) -> Sequence | None:
        """The same for another thread than the scheduler's: nothing is taken out. Raises RuntimeError where the queue changes."""
        return next(filter(_never_ran, self._arrived), None)

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters disagree with the queue."""
        live = [entry[3] for entry in self._heap if _stands(entry)]
        assert len(live) == len(self) == len(set(live)), "a sequence waits twice, or the count is wrong"
        assert self.tokens == sum(s.pending for s in live)
        behind = [s for s in live if s.relegated is not None]
        assert self.relegated_tokens == sum(s.pending for s in behind)
        if self._buckets is not None:
            assert self.tokens == sum(work.tokens for work in self._buckets.values())
            assert sum(work_of(s).pairs for s in live) == sum(work.pairs for work in self._buckets.values())
        assert not any(s.blocks for s in live), "a waiting sequence holds blocks"


def _arrival(sequence: Sequence) -> float:
    return sequence.request.arrival


def _never_ran(sequence: Sequence) -> bool:
    return sequence.state == "waiting" and not sequence.preemptions and sequence.relegated is None


def _stands(entry: Entry) -> bool:
    sequence = entry[3]
    return sequence.state == "waiting" and entry[1] == sequence.key


def put_behind(sequence: Sequence) -> None:
    """Give ``sequence`` a key behind those of orderings, by its arrival."""
    sequence.relegated, sequence.key = sequence.key, _BEHIND + sequence.request.arrival
    sequence.was_relegated = True


def unrelegate(sequence: Sequence) -> None:
    """Give ``sequence`` the key of its ordering again, if it was put behind others."""
    sequence.key, sequence.relegated = given(sequence), None


def given(sequence: Sequence) -> float:
    """The key that its ordering gave it."""
    return sequence.key if sequence.relegated is None else sequence.relegated


def key_of(ordering: Ordering, sequence: Sequence) -> float:
    """What ``ordering`` says of ``sequence``. Raises StepFailedError where it raises, or returns no number."""
    try:
        key = float(ordering.key(sequence.request))
    except BaseException as error:
        if ends_program(error):
            raise
        raise StepFailedError(f"its ordering raised {error!r}") from error
    if math.isnan(key):
        raise StepFailedError("its ordering gave it no place: the key is NaN")
    return key


def _tell_taken(ordering: Ordering, sequence: Sequence, key: float) -> None:
    try:
        ordering.took(sequence.request, key)
    except BaseException as error:  # somebody's own; it only listens
        if ends_program(error):
            raise
        log.warning("the ordering raised when request %s began", sequence.request.id, exc_info=True)


def work_of(sequence: Sequence) -> Work:
    """What is left of the prompt of ``sequence``, which waits: all but what the prefix cache held when it was looked for, and but
    what others are to compute before."""
    return Work.of(sequence.pending, sequence.target - sequence.pending)


def _add(buckets: dict[int, Work], sequence: Sequence, sign: int) -> None:
    bucket, work = _bucket(sequence.key), work_of(sequence)
    before = buckets.get(bucket, _NOTHING)
    left = Work(before.tokens + sign * work.tokens, before.pairs + sign * work.pairs)
    if left != _NOTHING:
        buckets[bucket] = left
    else:
        buckets.pop(bucket, None)


_NOTHING: Final = Work()


def _bucket(key: float) -> int:
    return math.floor(min(max(key, -_FAR), _FAR) * _BUCKETS_PER_UNIT)


def rank(sequence: Sequence) -> tuple[bool, float]:
    """What prompts are computed by, the smallest first: those that were preempted, then by the ordering, then the relegated."""
    return not sequence.preemptions or sequence.relegated is not None, sequence.key


def precedes(begun: Sequence, waiting: Sequence) -> bool:
    """Whether the prompt of ``begun`` is computed before that of ``waiting``."""
    return rank(begun) <= rank(waiting)
