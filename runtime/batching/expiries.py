"""When items are due, and when they time out, whatever their state."""

from __future__ import annotations

import heapq
from math import inf

from runtime.batching.item import ENDED, Item
from runtime.slo import SLO


class Expiries:
    """A heap of items by the time at which they expire; those that have ended are forgotten lazily."""

    __slots__ = ("_added", "_heap", "_swept")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._added = 0
        self._swept = 512  # items there were after the last sweep

    def add(self, item: Item) -> None:
        self._added += 1
        heapq.heappush(self._heap, (item.expires, self._added, item))
        if len(self._heap) > 2 * self._swept:
            self._heap = [entry for entry in self._heap if entry[2].state is not ENDED]
            heapq.heapify(self._heap)
            self._swept = max(512, len(self._heap))

    @property
    def next(self) -> float:
        """When the next item expires; inf if none does."""
        heap = self._heap
        while heap and heap[0][2].state is ENDED:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def due(self, now: float) -> list[Item]:
        """Remove and return those that have expired."""
        found = []
        while self.next <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found


def due_s(slo: SLO) -> float:
    """Seconds that an item may take, by the tightest of its targets that speak of one: the first output or the end."""
    return min((ms / 1e3 for ms in (slo.e2e_ms, slo.ttft_ms) if ms is not None), default=inf)
