"""SLA-constrained dynamic batching: a binary search, with moving bounds, for the largest steps that meet the TPOT target.

Formula. Once a decision, with s the mean time of the steps since the last one that held decodes, b their mean size and τ the
tightest TPOT (or ITL) target: s above τ by ``tolerance`` → high ← max(b, low + α), low ← max(low − δ, least); s below τ by as
much → low ← min(b, high − α), high ← min(high + δ, most); else both ends close in on b, to b ± α/2. The limit is the middle of
the two, never below what decodes. α = ``wide`` × the limit, δ = ``slow`` × α, each at least 1.

What is searched is ``token_budget`` and with it ``chunk_size`` (b counts tokens), which is what a step's time depends on where
prompts are chunked into the steps of decodes; it is set in whole tiles (:mod:`.parts.tiles`). (The paper searches
``max_batch_size``, for prompts run elsewhere there.) The other knobs stay as at the start; ``max_wait_ms`` is 0.

Units: tokens; seconds. Regimes: ``above``, ``below``, ``inside`` (the tolerance), ``throughput`` (no target bounds a step),
``learning`` (no step yet).

Failure mode: it takes time for a function of one number. When lengths change, both ends are where the answer was, and it comes
back by δ a decision; when demand is low, b is small and pulls the low end down with it.

Source: Pang, Li and Wang, "Optimizing LLM Inference Throughput via Memory-aware and SLA-constrained Dynamic Batching"
(arXiv 2503.05248), Algorithm 2. It leaves α, δ and the tolerance open: a quarter, a quarter and 5% are ours. The paper's own
text was not at hand to check this against; descriptions of it and two implementations by others have the same three cases and
the middle as limit (one of them halves b where steps take too long).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.control.controllers.parts.targets import step_target
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from autotune.control.controllers.rival_parts.step_window import StepWindow
from autotune.control.controllers.rival_parts.tiles import in_whole_tiles, step_of_whole_tiles
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import TILE, SchedulerView

_LEAST = 32


@register
class BisectionController:
    """See the module."""

    name = "bisection"

    def __init__(
        self,
        slo: SLO,
        start: Knobs,
        *,
        wide: float = 0.25,
        slow: float = 0.25,
        tolerance: float = 0.05,
        tile: int = TILE,
    ) -> None:
        for name, value in (("wide", wide), ("slow", slow), ("tolerance", tolerance)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}; it must be above 0 and below 1")
        self.start = start
        self._wide, self._slow, self._tolerance, self._tile = wide, slow, tolerance, tile
        self.low = float(_LEAST)
        self.high = float(start.token_budget)
        self._target = step_target({"default": slo})
        self._window = StepWindow()

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        self._target = step_target(slos)

    def observe_step(self, record: StepRecord) -> None:
        self._window.add(record)

    def observe_request(self, record: RequestRecord) -> None:
        pass

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now
        window, most = self._window, float(limits.token_budget)
        if self._target == math.inf:
            self.low = self.high = most
            regime, cause = "throughput", "no target bounds a step: opening the knob"
        elif not len(window):
            regime, cause = "learning", "no step with decodes since the last decision: holding the limit"
        else:
            regime = self._move(window, most)
            cause = (
                f"steps of {window.tokens:.0f} take {1e3 * window.seconds:.1f} ms (target {1e3 * self._target:g} ms): "
                f"searching between {self.low:.0f} and {self.high:.0f}"
            )
        evidence = {**window.evidence(), "low": round(self.low, 1), "high": round(self.high, 1)}
        window.clear()
        value = max(1, int(min(self._middle, most)))
        wanted = self.start.with_(max_wait_ms=0.0, token_budget=value, chunk_size=value)
        return Proposal(in_whole_tiles(limits.clamp(wanted), knobs, limits, self._tile), regime, cause, evidence)

    def _move(self, window: StepWindow, most: float) -> str:
        wide = max(1.0, self._wide * self._middle)
        slow = max(1.0, self._slow * wide)
        size, least = window.tokens, min(float(_LEAST), most)
        if window.seconds > self._target * (1 + self._tolerance):
            self.high = max(size, self.low + wide)
            self.low -= slow
            regime = "above"
        elif window.seconds < self._target * (1 - self._tolerance):
            self.low = min(size, self.high - wide)
            self.high += slow
            regime = "below"
        else:
            self.low, self.high = size - wide / 2, size + wide / 2
            regime = "inside"
        self.low, self.high = min(max(self.low, least), most), min(max(self.high, least), most)
        return regime

    @property
    def _middle(self) -> float:
        return (self.low + self.high) / 2

    def budget(self, view: SchedulerView) -> int:
        return step_of_whole_tiles(max(int(self._middle), view.decoding, 1), view, self._tile)
