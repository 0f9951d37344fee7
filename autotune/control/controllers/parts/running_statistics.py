"""Statistics kept up as values come: of the latest ones, and a quantile of all."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_UP, _DOWN = 1 + 0.02 * 0.9, 1 - 0.02 * (1 - 0.9)


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
        ordered = self._sorted
        return [ordered[int((k + 0.5) / shares * len(ordered))] for k in range(shares)] if ordered else []


def error_margin(margin: float, ratio: float) -> float:
    """The 90% quantile of actual/predicted, from 1 to 2, after a further ``ratio``, by stochastic approximation (Robbins and
    Monro 1951). Each above it raises it by 1.8% of itself, each below lowers it by 0.2%: it settles where nine in ten lie below.
    """
    return min(max(margin * (_UP if ratio > margin else _DOWN), 1.0), 2.0)
