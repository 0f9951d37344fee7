"""Sequences that wait for their turn."""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from runtime.errors import StepFailedError
from runtime.knobs import Knobs
from runtime.ordering import Ordering
from runtime.request import Sequence

log = logging.getLogger(__name__)

_BUCKETS_PER_UNIT: Final = 16  # keys are seconds or tokens: how finely tokens_before tells them apart
_FAR: Final = 1e15  # a deadline may be infinite
_BEHIND: Final = 1e12  # added to the arrival it is a key behind those of orderings


class WaitingQueue:
    """Sequences that wait: preempted ones first, then by the ordering's key, relegated ones last. Leaving early is lazy: O(1)."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._heap: list[tuple[bool, float, int, Sequence]] = []
        self._arrived: deque[Sequence] = deque()  # never run, by arrival
        self._pushed = 0
        self.count = 0
        """Sequences that wait."""
        self._buckets: dict[int, int] | None = None  # tokens queued by key; only those with any; None until requested
        self.tokens = 0
        """Prompt tokens queued that were not in the prefix cache when they came."""
        self.relegated_tokens = 0
        """Those of them that belong to relegated sequences."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (entry[3] for entry in self._heap if _stands(entry))

    def push(self, sequence: Sequence) -> None:
        """Queue ``sequence``. Raises StepFailedError, and changes nothing, where the ordering raises or returns no number."""
        new = sequence.preemptions == 0
        if new:
            sequence.key = _key(self._ordering, sequence)
            self._arrived.append(sequence)
            if len(self._arrived) > 2 * self.count + 64:
                self._arrived = deque(s for s in self._arrived if s.state == "waiting" and not s.preemptions)
        self.count += 1
        self._enter(sequence)
        self._tally(sequence, sequence.pending)

    def relegate(self, sequence: Sequence) -> None:
        """Put ``sequence``, which waits and has never run, behind all that are not relegated; those go by their arrival."""
        self._tally(sequence, -sequence.pending)
        sequence.relegated, sequence.key = sequence.key, _BEHIND + sequence.request.arrival
        sequence.was_relegated = True
        self._tally(sequence, sequence.pending)
        self._enter(sequence)  # the entry of before stands no longer
        self._sweep()

    def _enter(self, sequence: Sequence) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (not sequence.preemptions, sequence.key, self._pushed, sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and not _stands(heap[0]):
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Remove and return what :meth:`peek` shows; the caller changes its state."""
        sequence = heapq.heappop(self._heap)[3]
        self.count -= 1
        self._tally(sequence, -sequence.pending)
        try:
            self._ordering.took(sequence.request, _given(sequence))
        except Exception:  # somebody's own; it only listens
            log.warning("the ordering raised when request %s began", sequence.request.id, exc_info=True)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Remove ``sequence``, whether or not it is the one that :meth:`peek` shows: another scheduler chose it."""
        if self.peek() is not sequence:
            self._heap = [entry for entry in self._heap if entry[3] is not sequence]
            heapq.heapify(self._heap)
            self.count -= 1
            self._tally(sequence, -sequence.pending)
        else:
            self.pop()

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
                    heapq.heappush(heap, (*entry[:1], sequence.key, *entry[2:]))

    def removed(self, sequence: Sequence) -> None:
        """``sequence`` has been given a state other than waiting and is to be forgotten."""
        self.count -= 1
        self._tally(sequence, -sequence.pending)
        self._sweep()

    def _sweep(self) -> None:
        gone = len(self._heap) - self.count
        if gone > 64 and gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if _stands(entry)]
            heapq.heapify(self._heap)

    def _tally(self, sequence: Sequence, tokens: int) -> None:
        self.tokens += tokens
        if sequence.relegated is not None and not sequence.preemptions:
            self.relegated_tokens += tokens
        if self._buckets is not None:
            _add(self._buckets, sequence, tokens)

    def tokens_before(self, sequence: Sequence) -> int:
        """Prompt tokens that go before those of ``sequence``, which waits, give or take a bucket of keys.

        Costs as many additions as keys are spread, in sixteenths, not as many as sequences wait.
        """
        if self._buckets is None:
            self._buckets = {}
            for one in self:
                _add(self._buckets, one, one.pending)
        own = _bucket(sequence.key)
        return sum(tokens for bucket, tokens in self._buckets.items() if bucket <= own) - sequence.pending

    @property
    def ordering(self) -> Ordering:
        return self._ordering

    def reorder(self, ordering: Ordering) -> list[tuple[Sequence, Exception]]:
        """Wait by ``ordering`` from now on, those too that were relegated. Returns those for which it raised: they keep their
        place until they are ended."""
        failed: list[tuple[Sequence, Exception]] = []
        waiting = [entry for entry in sorted(self._heap) if _stands(entry)]
        former, self._ordering, self._heap, self._buckets = self._ordering, ordering, [], None
        self.relegated_tokens = 0
        for new, _, pushed, sequence in waiting:
            sequence.key, sequence.relegated = _given(sequence), None
            try:
                if ordering is not former:
                    sequence.key = _key(ordering, sequence)
            except StepFailedError as error:
                failed.append((sequence, error))
            self._heap.append((new, sequence.key, pushed, sequence))
        heapq.heapify(self._heap)
        return failed

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
        while arrived and (arrived[0].state != "waiting" or arrived[0].preemptions or arrived[0].relegated is not None):
            arrived.popleft()
        return arrived[0] if arrived else None

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters disagree with the queue."""
        live = [entry[3] for entry in self._heap if _stands(entry)]
        assert len(live) == len(self) == len(set(live)), "a sequence waits twice, or the count is wrong"
        assert self.tokens == sum(s.pending for s in live)
        behind = [s for s in live if s.relegated is not None and not s.preemptions]
        assert self.relegated_tokens == sum(s.pending for s in behind)
        assert self._buckets is None or self.tokens == sum(self._buckets.values())
        assert not any(s.blocks for s in live), "a waiting sequence holds blocks"


def _stands(entry: tuple[bool, float, int, Sequence]) -> bool:
    return entry[3].state == "waiting" and entry[1] == entry[3].key


def _given(sequence: Sequence) -> float:
    """The key that its ordering gave it."""
    return sequence.key if sequence.relegated is None else sequence.relegated


def _key(ordering: Ordering, sequence: Sequence) -> float:
    try:
        key = float(ordering.key(sequence.request))
    except Exception as error:
        raise StepFailedError(f"its ordering raised {error!r}") from error
    if math.isnan(key):
        raise StepFailedError("its ordering gave it no place: the key is NaN")
    return key


def _add(buckets: dict[int, int], sequence: Sequence, tokens: int) -> None:
    bucket = _bucket(sequence.key)
    left = buckets.get(bucket, 0) + tokens
    if left:
        buckets[bucket] = left
    else:
        buckets.pop(bucket, None)


def _bucket(key: float) -> int:
    return math.floor(min(max(key, -_FAR), _FAR) * _BUCKETS_PER_UNIT)
