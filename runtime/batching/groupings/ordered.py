"""Orders by a key: earliest deadline, priority.

A key is given when an item is queued and does not change, so the queue is a heap. Every order bounds how long it passes an
item over: the key grows with the time of arrival, so whoever waits is overtaken only so long. With the LLM engine's orderings
(:mod:`runtime.llm.ordering`) these share their formulas and constants.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import WAITING, Item

PRIORITY_STEP_S = 10.0
"""Seconds of waiting that outweigh one level of priority: nobody is passed over by items that come so much later."""
NO_DEADLINE_S = 60.0
"""An item without a deadline is ordered as if it were due this long after its arrival."""


class _ByKey:
    """A heap by :meth:`key`; ties go to the earlier."""

    padded = False
    in_order = False

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._added = 0
        self._gone = 0
        self._line = Line()  # by arrival, for the wait window
        self.oldest = self._line.head

    def key(self, item: Item) -> float:
        raise NotImplementedError

    def add(self, item: Item) -> None:
        item.key = self.key(item)
        self._added += 1
        heapq.heappush(self._heap, (item.key, self._added, item))
        self._line.add(item)

    def first(self, most: int) -> list[Item]:
        heap = self._heap
        while heap and heap[0][2].state is not WAITING:
            heapq.heappop(heap)
            self._gone -= 1
        found: list[Item] = []
        popped = []
        while heap and len(found) < most:
            entry = heapq.heappop(heap)
            if entry[2].state is WAITING:
                found.append(entry[2])
                popped.append(entry)
            else:
                self._gone -= 1
        for entry in popped:
            heapq.heappush(heap, entry)
        return found

    def took(self, items: Sequence[Item]) -> None:
        self._left(len(items))

    def removed(self, item: Item) -> None:
        del item
        self._left(1)

    def _left(self, count: int) -> None:
        self._gone += count
        self._line.left(count)
        if self._gone > 64 and 2 * self._gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state is WAITING]
            heapq.heapify(self._heap)
            self._gone = 0


class DeadlineOrder(_ByKey):
    """Earliest deadline first: for items with different promises."""

    def key(self, item: Item) -> float:
        return item.deadline if item.deadline < inf else item.arrival + NO_DEADLINE_S


class PriorityOrder(_ByKey):
    """Higher ``priority`` first, each level worth ``step_s`` seconds of waiting, so that nobody starves."""

    def __init__(self, step_s: float = PRIORITY_STEP_S) -> None:
        super().__init__()
        if not 0 < step_s < inf:
            raise ValueError(f"step_s is {step_s!r}; it must be a number of seconds above 0")
        self._step = step_s

    def key(self, item: Item) -> float:
        return item.arrival - self._step * item.priority
