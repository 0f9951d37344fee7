"""Which waiting request goes next.

An ordering gives each request a key when it is queued; the smallest goes first. Keys do not change while a request
waits, so the queue is a heap. Every ordering bounds how long it can pass a request over: each key grows with the
arrival time (or, for fair share, with the work queued before it), so that whoever waits is overtaken only so long.
Preempted requests go before new ones: they hold a place in the order already.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from runtime.request import Sequence

PRIORITY_STEP_S = 10.0
"""Seconds of waiting that outweigh one level of priority."""
SHORTEST_STEP_S = 0.01
"""Seconds of waiting that outweigh one prompt token, in shortest-job-first."""
NO_DEADLINE_S = 60.0
"""A request without a deadline is ordered as if it were due this long after its arrival."""


class Ordering(Protocol):
    def key(self, sequence: Sequence) -> float:
        """Asked once, when ``sequence`` is queued. The smallest goes first; ties go to the earlier."""
        ...

    def took(self, sequence: Sequence) -> None:
        """``sequence`` has left the queue to run."""
        ...


class Fcfs:
    """First come, first served; priority is not looked at."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival

    def took(self, sequence: Sequence) -> None:
        pass


class Priority(Fcfs):
    """Higher ``priority`` first, each level worth :data:`PRIORITY_STEP_S` of waiting. First come among equals."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival - PRIORITY_STEP_S * sequence.request.priority


class ShortestFirst(Fcfs):
    """Short prompts first, each token worth :data:`SHORTEST_STEP_S` of waiting."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival + SHORTEST_STEP_S * sequence.request.prompt_len


class Deadline(Fcfs):
    """Earliest deadline first."""

    def key(self, sequence: Sequence) -> float:
        request = sequence.request
        return request.arrival + NO_DEADLINE_S if request.deadline is None else request.deadline


class FairShare:
    """Tenants share the engine equally by tokens: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    A request starts, in virtual time, when its tenant's previous one ends; it lasts prompt + ``max_tokens`` tokens.
    """

    def __init__(self) -> None:
        self._virtual = 0.0
        self._ends: dict[str, float] = {}

    def key(self, sequence: Sequence) -> float:
        request = sequence.request
        start = max(self._virtual, self._ends.get(request.tenant, 0.0))
        self._ends[request.tenant] = start + request.prompt_len + request.max_tokens
        return start

    def took(self, sequence: Sequence) -> None:
        self._virtual = max(self._virtual, sequence.key)
        if len(self._ends) > 1024:  # tenants that owe nothing need not be remembered
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}


ORDERINGS: dict[str, type[Ordering]] = {
    "priority": Priority,
    "fcfs": Fcfs,
    "shortest": ShortestFirst,
    "deadline": Deadline,
    "fair": FairShare,
}


def ordering_named(name: str) -> Ordering:
    """A fresh ordering; ``ValueError`` lists the valid names."""
    if name not in ORDERINGS:
        raise ValueError(f"ordering is {name!r}; it must be one of {', '.join(ORDERINGS)}")
    return ORDERINGS[name]()


def ordering_of(value: str | Ordering) -> Ordering:
    """A fresh ordering by name, or the given one. Raises ``ValueError`` for anything else."""
    if isinstance(value, str):
        return ordering_named(value)
    if not (callable(getattr(value, "key", None)) and callable(getattr(value, "took", None))):
        raise ValueError(f"ordering is {value!r}; it must be one of {', '.join(ORDERINGS)}")
    return value


class WaitingQueue:
    """Sequences that wait, preempted ones first, then by the ordering's key. Leaving early is lazy: O(1)."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._heap: list[tuple[bool, float, int, Sequence]] = []
        self._arrived: deque[Sequence] = deque()  # never run, by arrival
        self._pushed = 0
        self._gone = 0
        self.tokens = 0
        """Prompt tokens queued that were not in the prefix cache when they came."""

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return (entry[3] for entry in self._heap if entry[3].state == "waiting")

    def push(self, sequence: Sequence) -> None:
        new = sequence.preemptions == 0
        if new:
            sequence.key = self._ordering.key(sequence)
            self._arrived.append(sequence)
            if len(self._arrived) > 2 * len(self) + 64:
                self._arrived = deque(s for s in self._arrived if s.state == "waiting" and not s.preemptions)
        self._pushed += 1
        heapq.heappush(self._heap, (new, sequence.key, self._pushed, sequence))
        self.tokens += sequence.pending

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][3].state != "waiting":
            heapq.heappop(heap)
            self._gone -= 1
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Remove and return what :meth:`peek` shows; the caller changes its state."""
        sequence = heapq.heappop(self._heap)[3]
        self.tokens -= sequence.pending
        self._ordering.took(sequence)
        return sequence

    def removed(self, sequence: Sequence) -> None:
        """``sequence`` has been given a state other than waiting and is to be forgotten."""
        self._gone += 1
        self.tokens -= sequence.pending
        if self._gone > 64 and self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].state == "waiting"]
            heapq.heapify(self._heap)
            self._gone = 0

    def oldest(self) -> Sequence | None:
        """The earliest arrival among those that never ran: the one the wait window counts from."""
        arrived = self._arrived
        while arrived and (arrived[0].state != "waiting" or arrived[0].preemptions):
            arrived.popleft()
        return arrived[0] if arrived else None

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters disagree with the queue."""
        live = [entry[3] for entry in self._heap if entry[3].state == "waiting"]
        assert len(live) == len(self) == len(set(live)), "a sequence waits twice, or the count is wrong"
        assert self.tokens == sum(s.pending for s in live)
        assert not any(s.blocks for s in live), "a waiting sequence holds blocks"
