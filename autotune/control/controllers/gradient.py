"""Gradient2: a concurrency limit that follows the ratio of recent to long-term mean step time. It knows no SLO.

Formula. Once a decision, with r the mean step time since the last one and r̄ its long exponential average (``window`` samples, the
first ten of which are averaged plainly): g = clamp(tolerance·r̄ / r, ½, 1); limit ← (1 − smoothing)·limit + smoothing·(g·limit +
queue), between ``least`` and the ceiling. Where r̄ > 2·r, r̄ ← 0.95·r̄. The limit is ``max_batch_size``, for sequences at once are
its concurrency and a step is their round trip; or, if ``knob`` says so, ``token_budget``, in whole tiles
(:mod:`.parts.tiles`), with it ``chunk_size``. The other knobs stay as they were at the start, ``max_wait_ms`` at 0.

Units: sequences, or tokens; seconds. Regimes: ``steady`` (g = 1, the limit grows by the queue it allows), ``shedding`` (g < 1),
``demand-limited`` (less than half of the limit in use: nothing changes), ``learning`` (no step yet).

Failure mode: it defends whatever latency it is used to. A target it does not know is missed for as long as traffic stays
the same; when prompts grow, it takes the longer steps for congestion and cuts the batch, and then for the new normal.

Source: Netflix's concurrency-limits, ``Gradient2Limit``, with its defaults (tolerance 1.5, smoothing 0.2, queue 4, window 600).
Its lowest limit is 20; a large model may hold fewer sequences than that, so here it is 4. Limiting tokens is ours.
"""

from __future__ import annotations

from typing import Literal

from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from autotune.control.controllers.rival_parts.step_window import StepWindow
from autotune.control.controllers.rival_parts.tiles import in_whole_tiles
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import TILE, SchedulerView

_WARM_UP = 10


@register
class GradientController:
    """See the module. ``queue`` and ``least`` are sequences, or tokens."""

    name = "gradient"

    def __init__(
        self,
        start: Knobs,
        *,
        knob: Literal["max_batch_size", "token_budget"] = "max_batch_size",
        tolerance: float = 1.5,
        smoothing: float = 0.2,
        queue: int = 4,
        least: int = 4,
        window: int = 600,
        tile: int = TILE,
    ) -> None:
        if not tolerance >= 1:
            raise ValueError(f"tolerance is {tolerance!r}; it must be at least 1")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing is {smoothing!r}; it must be above 0 and at most 1")
        for name, value in (("queue", queue), ("least", least), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 on")
        self.start = start
        self.knob = knob
        self.limit = float(getattr(start, knob))
        self._tolerance, self._smoothing, self._queue = tolerance, smoothing, queue
        self._least, self._long_window, self._tile = least, window, tile
        self._long = 0.0
        self._samples = 0
        self._window = StepWindow()

    def observe_step(self, record: StepRecord) -> None:
        self._window.add(record)

    def observe_request(self, record: RequestRecord) -> None:
        pass

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now
        window = self._window
        evidence = window.evidence()
        if len(window):
            used = window.most_running if self.knob == "max_batch_size" else window.tokens
            regime, cause = self._update(window.seconds, used)
        elif self._samples:
            regime, cause = "demand-limited", "no step with decodes since the last decision: holding the limit"
        else:
            regime, cause = "learning", "no step measured yet: holding the limit"
        self.limit = min(max(self.limit, self._least), getattr(limits, self.knob))
        window.clear()
        value = max(1, int(self.limit))
        wanted = self.start.with_(max_wait_ms=0.0, **{self.knob: value})
        if self.knob == "token_budget":
            wanted = wanted.with_(chunk_size=value)
        evidence |= {"long_ms": round(1e3 * self._long, 3), "limit": round(self.limit, 1)}
        return Proposal(in_whole_tiles(limits.clamp(wanted), knobs, limits, self._tile), regime, cause, evidence)

    def _update(self, now_s: float, used: float) -> tuple[str, str]:
        self._samples += 1
        weight = 1 / self._samples if self._samples <= _WARM_UP else 2 / (self._long_window + 1)
        what = "sequences" if self.knob == "max_batch_size" else "tokens"
        self._long += weight * (now_s - self._long)
        if self._long > 2 * now_s:
            self._long *= 0.95
        said = f"steps take {1e3 * now_s:.1f} ms, {1e3 * self._long:.1f} ms on average"
        if used < self.limit / 2:
            return (
                "demand-limited",
                f"{said}; {used:.0f} of {self.limit:.0f} {what} were in a step: the limit does not bind",
            )
        slope = min(1.0, max(0.5, self._tolerance * self._long / now_s))
        wanted = slope * self.limit + self._queue
        self.limit += self._smoothing * (wanted - self.limit)
        return "steady" if slope == 1 else "shedding", f"{said}; moving the limit to {self.limit:.0f} {what}"

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget
