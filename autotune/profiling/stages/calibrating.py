"""The calibrating stage: what a step costs on this engine, and the load and the promise that follow from it."""

from __future__ import annotations

from typing import Any

from autotune.cost.model import CostModel
from autotune.profile.fingerprint import OtherWork
from autotune.profile.parts import CostFacts, StepPoint
from autotune.profiling.calibrate import draw_setup, request_alone
from autotune.profiling.doubts import doubts
from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Context
from autotune.profiling.steps import measure_steps

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
        if told := doubts(found):
            context.reporter.note(f"doubtful: {'; '.join(told)}; is the machine busy?")
    return Setup.model_validate(stored["setup"])


def _measure(context: Context) -> dict[str, Any]:
    question, schedule, engine = context.question, context.schedule, context.engine
    work = OtherWork()
    with context.meter.hardware():
        begun = context.clock.now()
        alone = request_alone(engine, context.model, seed=question.seed, stop=context.stop)
        spent = context.clock.now() - begun
        context.reporter.progress(0.05, "", f"alone: {alone.tpot * 1000:.1f} ms a token", None)
        measured = measure_steps(
            engine,
            context.model,
            budget_s=max(schedule.calibrate_s - spent, schedule.calibrate_s / 2),
            seed=question.seed,
            stop=context.stop,
            advance=lambda share, note: context.reporter.progress(0.05 + 0.95 * share, "", note, None),
        )
        spent = context.clock.now() - begun
    others = None if engine.capabilities.virtual_time else work.cores()
    with context.meter.simulating():
        cost = measured.cost(spent)
        setup = draw_setup(
            engine,
            context.model,
            question.workload,
            cost.serving(),
            alone,
            seed=question.seed,
            slo=question.slo,
            rate=question.rate,
            window_s=schedule.window_s,
            warmup_s=schedule.warmup_s,
        )
    return {
        "setup": setup.model_dump(mode="json"),
        "steps": [point.model_dump(mode="json") for point in measured.points],
        "cost": cost.facts.model_dump(mode="json"),
        "others": others,
    }
