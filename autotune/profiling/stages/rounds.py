"""The measuring stage of few settings, in rounds: none is measured only in a bad minute of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.points import Run
from autotune.profiling.stages.context import Context, Request


def measure_in_rounds(
    context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT, settings: Sequence[SettingT]
) -> None:
    """Every setting once under each seed, a round a seed, every second one backwards; into ``context.found.measured``.

    The first round is made however late it is, another only if all but the last of it ends within the budget. A setting that
    fails is left out. Raises :class:`EvaluationError` if all of them do.
    """
    meter, reporter, budget = context.meter, context.reporter, context.question.budget_s
    left, planned = list(settings), len(setup.validation_seeds) * len(settings)
    runs: list[Run] = []
    each = setup.window_s + setup.warmup_s
    for number, seed in enumerate(setup.validation_seeds):
        turn = left if number % 2 == 0 else left[::-1]
        requests = [Request("validation", setting, setup.rate, seed, None) for setting in turn]
        missing = sum(not context.study.measurements.known(request.key) for request in requests)
        late = budget is not None and meter.spent_s + (missing - 1) * meter.typical(each) > budget
        if number and missing and late:
            break
        for request in requests:
            cause = context.observe(request, setup, str(request.setting), runs.append)
            if cause is not None:
                left.remove(request.setting)
                if not left:
                    raise EvaluationError(cause)
                continue
            done, note = len(runs), f"{runs[-1].score.attainment:.1%} attainment"
            remaining = (planned - done) * meter.typical(each)
            if budget is not None:
                remaining = min(remaining, max(0.0, budget - meter.spent_s))
            context.found.validated = done, planned
            reporter.progress(done / planned, f"{done}/{planned}", note, remaining)
    reporter.stage_done(f"{len(runs)}/{planned}", f"windows of {setup.window_s:.3g} s")
