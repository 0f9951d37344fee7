"""An online quantile in constant memory."""

from __future__ import annotations


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
