"""The controller of a batcher: learns how long a call takes, and limits the size of calls so that items meet the E2E target.

Formula. With t = a + b·n + d·c the learned time of a call of n items that cost c together (non-negative, fitted to relative
errors, from what varies only), m the 90% quantile of actual/predicted, c̄ the mean cost of an item and T the tightest E2E target:

- an item waits for the call before its own, so a size serves all comers only if two calls fit the target: m·t ≤ T/2;
- ``max_batch_size``, ``token_budget``: where one of them cuts calls short it is doubled, up to the largest size with m·t ≤ T/2,
  and no further than twice the largest call seen, for beyond that the model only guesses. Where calls that it cuts short take
  longer than T/2 it goes down to that size; so it does with a strategy that does not look at deadlines (``blind``) where any call
  takes that long. One that does not bind stays;
- ``max_wait_ms``: of a strategy that takes it for a ceiling it stays as it was, for that strategy weighs, call by call, whether
  waiting is worth more than it costs and what slack there is. A window that is waited out while the only worker is idle
  (``fixed_window``) goes to 0: without a price for a call, waiting gains nothing that the next call would not bring. Where calls
  run beside others it stays, for they may slow one another down;
- ``chunk_size`` says nothing to a batcher.

Units: seconds, items, cost units. Regimes: ``learning`` (too few calls), ``demand-limited`` (nothing binds), ``compute-limited``
(T/2 bounds the calls), ``throughput`` (no target bounds them), ``infeasible`` (one item alone takes longer than T:
no size is too large then), ``fallback`` (calls have not followed the model: the starting knobs hold).

E2E times contain queueing and are not looked at, so nothing is left over from a burst.

Failure mode: a time that depends on something else than n and c. The margin widens first; then the fallback takes over until the
model is right again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autotune.control.controllers.parts.galloping import largest
from autotune.control.controllers.parts.running_statistics import Recent, error_margin
from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register_for_batchers
from runtime.knobs import KnobLimits, Knobs
from runtime.records import LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import RecursiveLeastSquares
from runtime.tunable import SchedulerView

_WARM_UP = 1  # calls left out: the first is for caches and lazy initialisation
_READY = 8  # calls to judge by
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9  # a call that claims less or more counts as that: ratios of times stay finite
_MEMORY = 0.02  # weight of the newest call in the shares of what binds
_NEWEST = 0.05  # weight of the newest call in the error of predictions; of the first ones, their mean
_BINDS = 0.05  # share of calls cut short from which on a ceiling binds
_DISTRUST, _TRUST = 0.5, 0.25  # mean relative error that ends the trust in the model, and that restores it


@register_for_batchers
class BatchingController:
    """See the module. ``start``: the knobs to fall back on."""

    name = "batching"

    def __init__(self, slo: SLO, start: Knobs, *, blind: bool = False, fixed_window: bool = False) -> None:
        self.start = start
        self._blind = blind
        self._fixed_window = fixed_window
        self._targets = SLOTargets({"default": slo})
        self._fit = RecursiveLeastSquares(3)
        self._units = 0.0, 1.0, 1.0  # seconds, items, cost of the first call learned from
        self._margin = 1.1
        self._error = 0.0  # running mean of the relative error of predictions made before each call was learned
        self._trusted = True
        self._calls = 0
        self._items = Recent(128)  # of a call
        self._costs = Recent(128)
        self._bound = {LimitedBy.SLOTS: 0.0, LimitedBy.BUDGET: 0.0}
        self._ceilings = start.max_batch_size, start.token_budget  # as of the last decision

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        """The SLO of each class from now on."""
        self._targets.change(slos)

    def observe_step(self, record: StepRecord) -> None:
        seconds, n, c = record.duration, record.chunks, record.prefill_tokens
        if record.failed >= n or n < 1 or c < 1 or not (0 < seconds < math.inf):
            return
        seconds = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        self._calls += 1
        if self._calls <= _WARM_UP:
            return
        self._items.add(n)
        self._costs.add(c)
        knob = {LimitedBy.SLOTS: n >= self._ceilings[0], LimitedBy.BUDGET: c > self._ceilings[1] / 2}
        for bound, full in knob.items():  # not full: a deadline cut it short, or a size not felt out yet
            self._bound[bound] += _MEMORY * ((record.limited_by is bound and full) - self._bound[bound])
        if self._fit.wants_unit(self._units[0], seconds, max(n / self._units[1], c / self._units[2])):
            self._fit, self._units, self._margin = RecursiveLeastSquares(3), (seconds, n, c), 1.1
            self._error = 0.0
        if (predicted := self.predict(n, c)) > 0:
            self._margin = error_margin(self._margin, seconds / predicted)
        unit, of_items, of_cost = self._units
        self._fit.update([1.0, n / of_items, c / of_cost], seconds / unit)
        self._error += max(_NEWEST, 1 / self._fit.samples) * (min(abs(1 - predicted / seconds), 1.0) - self._error)
        self._trusted = self._error < (_DISTRUST if self._trusted else _TRUST)

    def observe_request(self, record: RequestRecord) -> None:
        self._targets.saw(record.request_class)

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget

    def predict(self, items: float, cost: float) -> float:
        """Seconds of a call; 0 before anything was learned."""
        unit, of_items, of_cost = self._units
        return unit * self._fit.predict([1.0, items / of_items, cost / of_cost])

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now  # nothing here depends on the time of day, only on what was seen
        self._ceilings = knobs.max_batch_size, knobs.token_budget
        if self._fit.samples < _READY - _WARM_UP:
            return self._propose(
                "learning", knobs, "learning call times: holding the knobs until they can be predicted"
            )
        if not self._trusted:
            return self._propose(
                "fallback",
                limits.clamp(self.start),
                f"call times are {self._error:.0%} off their predictions: holding the starting knobs",
            )
        if self._fixed_window:
            knobs = knobs.with_(max_wait_ms=0.0)
        target = min(self._targets.first, self._targets.whole)
        each = self._costs.mean / self._items.mean
        one = self.predict(1, each)
        hopeless = one > target
        allowed_s = math.inf if hopeless else target / 2 / self._margin
        size = self._turned(
            LimitedBy.SLOTS,
            knobs.max_batch_size,
            self._items.quantile(1),
            lambda n: self.predict(n, n * each) <= allowed_s,
        )
        budget = self._turned(
            LimitedBy.BUDGET,
            knobs.token_budget,
            self._costs.quantile(1),
            lambda c: self.predict(c / each, c) <= allowed_s,
        )
        wanted = knobs.with_(
            max_batch_size=min(size, limits.max_batch_size), token_budget=min(budget, limits.token_budget)
        )
        if hopeless:
            cause = (
                f"an item alone takes {one * 1e3:.3g} ms, so {target * 1e3:.3g} ms cannot be met: maximizing throughput"
            )
            return self._propose("infeasible", wanted, cause)
        return self._propose(self._regime(target), wanted, self._cause(wanted, each, target))

    def _turned(self, bound: LimitedBy, value: int, seen: float, fits: Callable[[int], bool]) -> int:
        """Where a ceiling at ``value`` should be; ``seen``: the largest call it has let through lately."""
        too_long = self._blind and seen >= 1 and not fits(int(min(seen, value)))  # adaptive ones see to that
        if self._bound[bound] < _BINDS and not too_long:
            return value
        if fits(value):
            most = max(value, int(2 * min(seen, value)))
            return max(value, largest(fits, most, most))
        return max(1, largest(fits, value, value // 2))

    def _regime(self, target: float) -> str:
        if max(self._bound.values()) < _BINDS:
            return "demand-limited"
        return "throughput" if target == math.inf else "compute-limited"

    def _cause(self, knobs: Knobs, each: float, target: float) -> str:
        n = max(1, min(knobs.max_batch_size, int(knobs.token_budget / each), int(2 * self._items.quantile(1))))
        text = f"a call of {n} takes {self.predict(n, n * each) * 1e3:.3g} ms"
        if target < math.inf:
            text += f", and two of them must fit the target of {target * 1e3:.3g} ms"
        names = {LimitedBy.SLOTS: "max_batch_size", LimitedBy.BUDGET: "token_budget"}
        binding = [names[bound] for bound, share in self._bound.items() if share >= _BINDS]
        return f"{text}; {' and '.join(binding) or 'nothing'} cuts calls short"

    def _propose(self, regime: str, knobs: Knobs, cause: str) -> Proposal:
        evidence: dict[str, Any] = {
            "calls": self._calls,
            "model_error": round(self._error, 4),
            "margin": round(self._margin, 4),
            "items": round(self._items.mean, 2),
            "cost": round(self._costs.mean, 2),
            "slots_bound": round(self._bound[LimitedBy.SLOTS], 3),
            "budget_bound": round(self._bound[LimitedBy.BUDGET], 3),
        }
        return Proposal(knobs, regime, cause, evidence)
