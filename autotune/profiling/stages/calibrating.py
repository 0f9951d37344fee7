"""The calibrating stage: what a step or a call costs here, and the load and the SLO that follow from it."""

from __future__ import annotations

from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.stages.context import Context


def calibrate(context: Context[SettingT, SetupT, CostT, SpaceT]) -> SetupT:
    """The setup; steps and cost model go into ``context.found``. From the study if it was done before."""
    found, target, reporter = context.found, context.target, context.reporter
    again = target.calibrated(context.study)

    def advance(share: float, note: str) -> None:
        if not again:
            reporter.progress(share, "", note, None)

    if not again:
        reporter.stage("calibrating")
    made = target.calibrate(
        context.question,
        context.study,
        context.schedule,
        context.meter,
        stop=context.stop,
        advance=advance,
    )
    found.steps, found.cost = list(made.steps), made.cost
    found.others += made.others
    context.keep_time()
    if not again:
        reporter.stage_done(made.amount, made.note)
        if made.warnings:
            reporter.note(f"warning: {'; '.join(made.warnings)}; is the machine busy?")
    return made.setup
