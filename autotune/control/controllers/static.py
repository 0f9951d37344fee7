"""Leaves the knobs at the starting values: the baseline for other controllers, and the simplest one.

Formula: knobs = start, budget = ``token_budget``. Regime: ``static``. Failure mode: any change of traffic or machine.
"""

from __future__ import annotations

from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView


@register
class StaticController:
    """Holds ``start``: attainment, log and steering as with any other controller, and no knob turned but by an operator."""

    name = "static"

    def __init__(self, start: Knobs) -> None:
        self.start = start
        self._steps = 0

    def observe_step(self, record: StepRecord) -> None:
        self._steps += record.steps

    def observe_request(self, record: RequestRecord) -> None:
        pass

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now, knobs
        return Proposal(limits.clamp(self.start), "static", "holding the starting knobs", {"steps": self._steps})

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget
