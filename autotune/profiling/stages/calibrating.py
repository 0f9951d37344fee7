"""The calibrating stage: what a step costs on this engine, and the load and the SLO that follow from it."""

from __future__ import annotations

from typing import Any

from autotune.cost.model import CostModel
from autotune.profile.fingerprint import OtherWork
from autotune.profile.parts import CostFacts, StepPoint
from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Context
from autotune.profiling.warnings import warnings

_KEY = "calibration"


def calibrate(context: Context) -> Setup:
    """The setup; steps and cost model go into ``context.found``. From the study if it was done before."""
    found, again = context.found, context.study.measurements.find(_KEY)
    if again is None:
        context.reporter.stage("calibrating")
    stored = again or context.study.measured(_KEY, lambda: _measure(context), stop=context.stop)
    found.steps = [StepPoint.model_validate(point) for point in stored["steps"]]
    found.cost = CostModel.from_facts(CostFacts.model_validate(stored["cost"]))
    if (others := stored.get("others")) is not None:
        found.others.append((found.cost.facts.seconds, others))
    context.keep_time()
    if again is None:
        facts = found.cost.facts
        steps = sum(point.repeats for point in found.steps)
        context.reporter.stage_done(f"{steps} steps", f"{facts.points} kinds, fit error {facts.error:.1%}")
        if reasons := warnings(found):
            context.reporter.note(f"doubtful: {'; '.join(reasons)}; is the machine busy?")
    return Setup.model_validate(stored["setup"])


def _measure(context: Context) -> dict[str, Any]:
    question, work = context.question, OtherWork()
    found = context.target.calibrate(
        context.schedule,
        context.meter,
        slo=question.slo,
        rate=question.rate,
        seed=question.seed,
        stop=context.stop,
        advance=lambda share, note: context.reporter.progress(share, "", note, None),
    )
    return {
        "setup": found.setup.model_dump(mode="json"),
        "steps": [point.model_dump(mode="json") for point in found.steps],
        "cost": found.cost.facts.model_dump(mode="json"),
        "others": None if context.target.virtual else work.cores(),
    }
