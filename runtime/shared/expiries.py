"""What ends at a given time, whatever its state: time-outs of requests and of items."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class Expiries(Generic[T]):
    """A heap by the time of expiry. What is ``over`` by then expires no more: it is forgotten lazily."""

    __slots__ = ("_added", "_over", "_swept", "heap")

    def __init__(self, over: Callable[[T], bool]) -> None:
        self.heap: list[tuple[float, int, T]] = []
        """(when, how many were added before, what): empty if nothing expires."""
        self._over = over
        self._added = 0
        self._swept = 512  # how many there were after the last sweep

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, what: T, when: float) -> None:
        self._added += 1
        heapq.heappush(self.heap, (when, self._added, what))
        if len(self.heap) > 2 * self._swept:
            self.heap = [entry for entry in self.heap if not self._over(entry[2])]
            heapq.heapify(self.heap)
            self._swept = max(512, len(self.heap))

    @property
    def next(self) -> float:
        """When the next one expires; inf if none does."""
        heap = self.heap
        while heap and self._over(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def pop(self) -> tuple[float, T]:
        """Remove and return the one of :attr:`next`, and when that is."""
        when, _, what = heapq.heappop(self.heap)
        return when, what

    def due(self, now: float) -> list[T]:
        """Remove and return those that have expired."""
        found = []
        while self.next <= now:
            found.append(self.pop()[1])
        return found
