"""By any of the orderings that requests have too (:mod:`runtime.ordering`): earliest deadline, priority, shortest job."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import WAITING, Item
from runtime.ordering import PRIORITY_STEP_S, Deadline, Ordering, Priority, ShortestFirst, leaving


class Ordered:
    """See the module. Ties go to the earlier."""

    padded = False
    in_order = False

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._leaving = leaving(ordering)
        self._heap: list[tuple[float, int, Item]] = []
        self._added = 0
        self._gone = 0
        self._line = Line()  # by arrival, for the wait window
        self.oldest = self._line.head

    def add(self, item: Item) -> None:
        item.key = self._ordering.key(item)
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
        for item in items:
            self._ordering.took(item, item.key)
        self._left(len(items))

    def removed(self, item: Item) -> None:
        if self._leaving is not None:
            self._leaving.left(item, item.key)
        self._left(1)

    def _left(self, count: int) -> None:
        self._gone += count
        self._line.left(count)
        if self._gone > 64 and 2 * self._gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state is WAITING]
            heapq.heapify(self._heap)
            self._gone = 0


class DeadlineOrder(Ordered):
    """Earliest deadline first: for items with different SLOs."""

    def __init__(self) -> None:
        super().__init__(Deadline())


class PriorityOrder(Ordered):
    """Higher ``priority`` first, each level worth ``step_s`` seconds of waiting, so that nobody starves."""

    def __init__(self, step_s: float = PRIORITY_STEP_S) -> None:
        super().__init__(Priority(step_s))


class ShortestOrder(Ordered):
    """Cheapest first, each unit of cost worth a hundredth of a second of waiting, so that nobody starves."""

    def __init__(self) -> None:
        super().__init__(ShortestFirst())
