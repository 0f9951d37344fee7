"""Mean and order statistics of the latest values, kept as they come."""

from __future__ import annotations

from collections import deque


class Recent:
    """The last ``n`` values, all finite, with their mean (0 of nothing) and order statistics.

    They are added far more often than their order is asked for, so they are sorted then.
    """

    __slots__ = ("_order", "_sorted", "_sum", "mean")

    def __init__(self, n: int) -> None:
        self._order: deque[float] = deque(maxlen=n)
        self._sorted: list[float] | None = []  # None: not since the last was added
        self._sum = 0.0
        self.mean = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        order = self._order
        if len(order) == order.maxlen:
            self._sum -= order[0]
        order.append(value)
        self._sum += value
        self.mean = self._sum / len(order)
        self._sorted = None

    def quantile(self, q: float) -> float:
        ordered = self._sorted
        if ordered is None:
            ordered = self._sorted = sorted(self._order)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
