"""Memory-bounded calls: bytes for each unit of cost are learned, and no call is made that would not fit.

Wraps another strategy. After each call whose peak was measured, ``bytes = m0 + m1·cost`` is fitted (non-negative, relative least
squares), and what the inner strategy decides is cut where 1.1 times that would exceed ``limit_bytes``. Running out of memory
all the same halves the call and lowers ``effective_limits``; that is the core's business (:mod:`runtime.shared.ceilings`) and
needs no measuring.
"""

from __future__ import annotations

from runtime.batching.item import Call, Item
from runtime.batching.strategies.protocol import Decision, State, Strategy, fit
from runtime.records import LimitedBy
from runtime.shared.least_squares import RecursiveLeastSquares

_RESERVE = 1.1
_REACH = 2  # times the largest cost measured, beyond which the line is a guess


class MemoryBounded:
    """See the module."""

    def __init__(self, inner: Strategy, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes!r}; it must be at least 1")
        self.inner = inner
        self.limit_bytes = limit_bytes
        self._fit = RecursiveLeastSquares(2, forgetting=0.995)
        self._unit_cost = 0.0
        self._unit_bytes = 0.0
        self._most_cost = 0

    @property
    def name(self) -> str:
        return f"{self.inner.name}, memory-bounded"

    @property
    def most_cost(self) -> int | None:
        """The largest cost that fits, None before it is known."""
        if self._fit.samples < 2:
            return None
        fixed, slope = self._fit.coefficients
        left = self.limit_bytes / _RESERVE / self._unit_bytes - fixed
        known = _REACH * self._most_cost
        return max(1, min(known, int(left / slope * self._unit_cost)) if slope > 0 else known)

    def admit(self, item: Item, state: State) -> float | None:
        return self.inner.admit(item, state)

    def decide(self, state: State) -> Decision:
        decision = self.inner.decide(state)
        most = self.most_cost
        if most is None or not decision.items:
            return decision
        found = fit(decision.items, len(decision.items), most, state.queue.padded)
        if len(found.items) == len(decision.items):
            return decision
        return decision._replace(items=found.items, limited_by=LimitedBy.KV)

    def began(self, call: Call, state: State) -> None:
        self.inner.began(call, state)

    def observe(self, call: Call, state: State) -> None:
        self.inner.observe(call, state)
        if call.peak_bytes is None or not call.informative or call.peak_bytes <= 0:
            return
        if not self._unit_cost:
            self._unit_cost, self._unit_bytes = float(call.cost), float(call.peak_bytes)
        self._most_cost = max(self._most_cost, call.cost)
        self._fit.update([1.0, call.cost / self._unit_cost], call.peak_bytes / self._unit_bytes)
