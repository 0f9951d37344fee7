"""Which targets no setting can meet, on this machine and for these requests.

Formula. With t(D, C, P) the learned time of a step, c̄ the mean context and b the mean of actual/predicted:

- TPOT, ITL, and the step time for an E2E (:meth:`SLOTargets.step_time_for_e2e`) are infeasible if t(1, c̄, 0), a decode alone,
  takes longer, and none of the latest steps of decodes was as short: a model of few steps may be wrong about smaller ones;
- TTFT and E2E are if b·t(0, 0, p) takes longer, p the median prompt of the class, and no more than half of its first tokens
  have been in time lately. At least four requests must have ended.

What was infeasible has to be within 95% of the target to count again, so that noise does not turn a target off and on.

Units: seconds and tokens. Failure mode: a class of which less than half can be in time is given up although some could be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autotune.control.controllers.predictive.traffic import Traffic
from autotune.control.controllers.running_statistics import Recent
from autotune.control.controllers.targets import SLOTargets
from runtime.records import RequestRecord

_FEW = 4
_AGAIN = 0.95


class InfeasibleTargets:
    """Tells :class:`SLOTargets` which to give up. Classes are few."""

    def __init__(self, targets: SLOTargets, traffic: Traffic) -> None:
        self._targets, self._traffic = targets, traffic
        self._prompts: dict[str, Recent] = {}  # tokens to compute, of each class
        self._firsts: dict[str, Recent] = {}  # seconds until first tokens, of each class
        self._slow: dict[str, dict[str, float]] = {}  # class -> metric -> seconds that a decode alone takes
        self._late: dict[str, dict[str, float]] = {}  # class -> metric -> seconds that the median prompt alone takes

    def saw(self, record: RequestRecord) -> None:
        """A request has ended, whatever became of it: where all are rejected, those say what the demand is."""
        name = self._targets.name_of(record.request_class)
        self._prompts.setdefault(name, Recent(128)).add(record.prompt_tokens - record.cached_tokens)
        if record.ttft is not None and math.isfinite(record.ttft):
            self._firsts.setdefault(name, Recent(128)).add(record.ttft)

    def judge(self, decode: Callable[[], float], prompt: Callable[[int], float]) -> bool:
        """``decode``: seconds of a step with one decode; ``prompt``: of a prompt of so many tokens alone.
        False if the same targets are infeasible as before."""
        slow: dict[str, dict[str, float]] = {}
        late: dict[str, dict[str, float]] = {}
        for name, metric, wanted in self._targets.step_times(self._traffic.outputs):
            if wanted < self._traffic.shortest:
                again = _AGAIN if metric in self._slow.get(name, ()) else 1.0
                if (alone := decode()) > again * wanted:
                    slow.setdefault(name, {})[metric] = alone
        for name, metric, wanted in self._targets.first_targets():
            prompts = self._prompts.get(name)
            if wanted < math.inf and prompts is not None and len(prompts) >= _FEW and not self._in_time(name, wanted):
                again = _AGAIN if metric in self._late.get(name, ()) else 1.0
                if (alone := prompt(int(prompts.quantile(0.5)))) > again * wanted:
                    late.setdefault(name, {})[metric] = alone
        self._slow, self._late = slow, late
        return self._targets.give_up({n: frozenset((*slow.get(n, ()), *late.get(n, ()))) for n in (*slow, *late)})

    def _in_time(self, name: str, wanted: float) -> bool:
        """Whether half of the first tokens of this class came by then."""
        return name in self._firsts and self._firsts[name].quantile(0.5) <= wanted

    @property
    def unmet(self) -> str:
        """The infeasible targets of the classes served lately, in words that stay the same while they do."""
        return ", ".join(self._targets.named(name, metrics) for name, metrics in self._targets.lost.items())

    def explain(self, cause: str, step_time: float) -> str:
        """``cause`` after the infeasible targets and their figures; ``step_time``: the step-time target that is left, s."""
        if not self._targets.lost:
            return cause
        said = "; ".join(self._sentences())
        if self._targets.all_lost:
            said += (
                ": maximizing throughput"
                if step_time == math.inf
                else f"; {self._targets.tightest(step_time)} is still the target"
            )
        return f"{said}; {cause}" if cause else said

    def _sentences(self) -> Iterator[str]:
        for name in self._targets.lost:
            slow = self._slow.get(name, {})
            late = {metric: s for metric, s in self._late.get(name, {}).items() if metric not in slow}
            if slow:
                took = f"a single decode takes {1e3 * max(slow.values()):.1f} ms"
                yield f"{took}, so {self._targets.named(name, slow)} cannot be met"
            if late:
                took = f"half of the prompts take {1e3 * max(late.values()):.1f} ms or more alone"
                yield f"{took}, so {self._targets.named(name, late)} cannot be met"
