"""Gradient2: a concurrency limit that follows how latency now compares with latency lately. It has no target.

Formula. Once a decision, with r the mean step time since the last one and r̄ its long exponential average (600 samples, the first
ten of which are averaged plainly): g = clamp(1.5·r̄ / r, ½, 1); limit ← 0.8·limit + 0.2·(g·limit + 4), between 4 and the ceiling.
Where r̄ > 2·r, r̄ ← 0.95·r̄. The limit is ``max_batch_size``, for sequences at once are its concurrency and a step is their round
trip; the other knobs stay as they were at the start, ``max_wait_ms`` at 0.

Units: sequences; seconds. Regimes: ``steady`` (g = 1, the limit grows by the queue it allows), ``shedding`` (g < 1),
``demand-limited`` (less than half of the limit in use: nothing changes), ``learning`` (no step yet).

Failure mode: it defends whatever latency it is used to. A target it does not know is missed for as long as traffic stays
the same; when prompts grow, it takes the longer steps for congestion and cuts the batch, and then for the new normal.

Source: Netflix's concurrency-limits, ``Gradient2Limit``, with its defaults (tolerance 1.5, smoothing 0.2, queue 4, window 600).
Its lowest limit is 20; a large model may hold fewer sequences than that, so here it is 4.
"""

from __future__ import annotations

from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from autotune.control.controllers.step_window import StepWindow
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView

_TOLERANCE, _SMOOTHING, _QUEUE = 1.5, 0.2, 4
_LEAST = 4
_WINDOW, _WARM_UP = 600, 10


@register
class GradientController:
    """See the module."""

    name = "gradient"

    def __init__(self, start: Knobs) -> None:
        self.start = start
        self.limit = float(start.max_batch_size)
        self._long = 0.0
        self._samples = 0
        self._window = StepWindow()

    def observe_step(self, record: StepRecord) -> None:
        self._window.add(record)

    def observe_request(self, record: RequestRecord) -> None:
        pass

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now, knobs
        window = self._window
        evidence = window.evidence()
        if len(window):
            regime, cause = self._update(window.seconds, window.most_running)
        elif self._samples:
            regime, cause = "demand-limited", "no step with decodes since the last decision: holding the limit"
        else:
            regime, cause = "learning", "no step measured yet: holding the limit"
        self.limit = min(max(self.limit, _LEAST), limits.max_batch_size)
        window.clear()
        wanted = self.start.with_(max_batch_size=max(1, int(self.limit)), max_wait_ms=0.0)
        evidence |= {"long_ms": round(1e3 * self._long, 3), "limit": round(self.limit, 1)}
        return Proposal(limits.clamp(wanted), regime, cause, evidence)

    def _update(self, now_s: float, running: int) -> tuple[str, str]:
        self._samples += 1
        weight = 1 / self._samples if self._samples <= _WARM_UP else 2 / (_WINDOW + 1)
        self._long += weight * (now_s - self._long)
        if self._long > 2 * now_s:
            self._long *= 0.95
        said = f"steps take {1e3 * now_s:.1f} ms, {1e3 * self._long:.1f} ms on average"
        if running < self.limit / 2:
            return (
                "demand-limited",
                f"{said}; {running} of {self.limit:.0f} sequences ran at once: the limit does not bind",
            )
        slope = min(1.0, max(0.5, _TOLERANCE * self._long / now_s))
        wanted = slope * self.limit + _QUEUE
        self.limit += _SMOOTHING * (wanted - self.limit)
        return "steady" if slope == 1 else "shedding", f"{said}; moving the limit to {self.limit:.0f} sequences"

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget
