"""Mean and order statistics of the latest values, kept as they come."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Recent:
    """The last ``n`` values, all finite, with their mean (0 of nothing) and order statistics."""

    __slots__ = ("_order", "_sorted", "_sum", "mean")

    def __init__(self, n: int) -> None:
        self._order: deque[float] = deque(maxlen=n)
        self._sorted: list[float] = []
        self._sum = 0.0
        self.mean = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        if len(self._order) == self._order.maxlen:
            old = self._order[0]
            self._sum -= old
            del self._sorted[bisect_left(self._sorted, old)]
        self._order.append(value)
        self._sum += value
        self.mean = self._sum / len(self._order)
        insort(self._sorted, value)

    def quantile(self, q: float) -> float:
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))] if self._sorted else 0.0
