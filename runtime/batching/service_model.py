"""How long a call takes, learned from the calls: it needs no size, no window and no hardware.

Formula. A call of n items of cost c, beside which o others run on average, takes

    t = a + b·n + d·c + o·(e + f·n + g·c)

with every coefficient at least 0: a fixed price of a call, a price for each item and each unit of cost, and what other calls
on the same device add. With one worker at a time the last three are left out. Fitted by the recursive least squares of
:mod:`runtime.shared.least_squares` (relative errors, Huber-clipped, directional forgetting: what does not vary is not forgotten).

Failure mode: a time that depends on what is not in the formula. ``margin`` widens with it: a quantile of actual/predicted
over the latest calls. While there are few, one that takes four times as long as the first explains makes it forget them: that
one answered from a cache, or did nothing.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from runtime.batching.item import Call
from runtime.shared.least_squares import RecursiveLeastSquares

_WARM_UP = 1  # calls left out: the first is for caches and lazy initialisation
_READY = 4  # calls that must have been seen to predict
_KEPT = 128  # ratios of actual to predicted
_QUANTILE = 0.98
_FIRST_MARGIN, _MARGINS = 1.1, (1.0, 2.0)


class Price(NamedTuple):
    """Seconds of a call with a given number of others: ``fixed + per_item·n + per_cost·c``."""

    fixed: float
    per_item: float
    per_cost: float

    def of(self, items: int, cost: float) -> float:
        return self.fixed + self.per_item * items + self.per_cost * cost


class ServiceModel:
    """See the module. ``shared``: whether more than one call can run at a time. ``observe`` costs some 10 µs."""

    def __init__(self, *, shared: bool = False, forgetting: float = 0.98) -> None:
        self._shared = shared
        self._forgetting = forgetting
        self._items = 1 / 32  # of an item and of a unit of cost, so that all inputs are of order one
        self._seen = 0
        self._begin(0.0, 1, 1)

    def _begin(self, unit: float, items: int, cost: int) -> None:
        """Nothing is known but that a call of ``items`` that cost ``cost`` took ``unit`` seconds."""
        self._fit = RecursiveLeastSquares(6 if self._shared else 3, forgetting=self._forgetting)
        self._unit = unit
        self._cost = items / (32 * cost)
        self._first = items, cost
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        self._price: tuple[int, float, Price] | None = None
        self.margin = _FIRST_MARGIN
        """A call takes no longer than this many times what was predicted, nearly always."""
        self.beside = 0
        """Calls learned from that ran beside others."""
        self.alone = 0
        """Calls learned from that ran alone."""

    @property
    def ready(self) -> bool:
        return self._fit.samples >= _READY

    @property
    def samples(self) -> int:
        return self._fit.samples

    def price(self, others: float = 0.0) -> Price:
        """What a call costs beside ``others``; zeros before anything was learned."""
        known = self._price
        if known is not None and known[0] == self._fit.samples and known[1] == others:
            return known[2]
        a, b, d, *rest = self._fit.coefficients
        if rest:
            a, b, d = a + others * rest[0], b + others * rest[1], d + others * rest[2]
        price = Price(self._unit * a, self._unit * b * self._items, self._unit * d * self._cost)
        self._price = (self._fit.samples, others, price)
        return price

    def predict(self, items: int, cost: float, others: float = 0.0) -> float:
        """Seconds."""
        return self.price(others).of(items, cost)

    def observe(self, call: Call) -> None:
        """Learn from a call that has ended. One of no time, that failed as a whole or that was stretched teaches nothing."""
        seconds, n, c = call.seconds, len(call.items), call.cost
        if not (call.informative and 0 < seconds < math.inf):
            return
        self._seen += 1
        if self._seen <= _WARM_UP:
            return
        scale = max(n / self._first[0], c / self._first[1]) * (1 + call.others)
        if self._fit.wants_unit(self._unit, seconds, scale):
            self._begin(seconds, n, c)
        if self.ready:
            expected = self.predict(n, c, call.others) if call.predicted is None else call.predicted
            if expected > 0:
                self._ratios.append(seconds / expected)
                if len(self._ratios) < 32 or self._seen % 8 == 0:
                    self._widen()
        x = [1.0, n * self._items, c * self._cost]
        if self._shared:
            x += [call.others * v for v in x]
        self._fit.update(x, seconds / self._unit)
        if call.others > 0.1:
            self.beside += 1
        else:
            self.alone += 1

    def _widen(self) -> None:
        ratios = sorted(self._ratios)
        if len(ratios) < 16:
            self.margin = max(_FIRST_MARGIN, min(ratios[-1], _MARGINS[1]))
            return
        at = ratios[min(len(ratios) - 1, math.ceil(_QUANTILE * len(ratios)) - 1)]
        self.margin = min(max(at * 1.002, _MARGINS[0]), _MARGINS[1])
