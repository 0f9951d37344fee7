"""Statistics kept up as values come: of the latest ones, and an online quantile of all."""

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
        order, ordered = self._order, self._sorted
        if len(order) == order.maxlen:
            self._sum -= order[0]
            del ordered[bisect_left(ordered, order[0])]
        order.append(value)
        insort(ordered, value)
        self._sum += value
        self.mean = self._sum / len(order)

    def quantile(self, q: float) -> float:
        ordered = self._sorted
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0

    def middles(self, shares: int) -> list[float]:
        """The middle value of each of so many equal shares, ascending; none of nothing."""
        return [self.quantile((k + 0.5) / shares) for k in range(shares)] if self._sorted else []


class OnlineQuantile:
    """Tracks the ``q``-quantile of a stream by stochastic approximation (Robbins and Monro 1951), on a ratio scale.

    Each value moves the estimate up by ``rate·q`` or down by ``rate·(1−q)`` of itself; it settles where a share ``q`` of the
    values lies below. ``low`` and ``high`` bound the estimate.
    """

    __slots__ = ("_down", "_high", "_low", "_up", "value")

    def __init__(
        self, q: float, start: float, *, rate: float = 0.02, low: float = 0.0, high: float = float("inf")
    ) -> None:
        if not 0 < q < 1:
            raise ValueError(f"q is {q}; a quantile lies between 0 and 1")
        self.value = start
        self._up = 1 + rate * q
        self._down = 1 - rate * (1 - q)
        self._low = low
        self._high = high

    def add(self, value: float) -> None:
        moved = self.value * (self._up if value > self.value else self._down)
        self.value = min(max(moved, self._low), self._high)
