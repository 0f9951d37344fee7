"""The measuring stage of few settings, in rounds: none is measured only in a bad minute of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.stages.context import Context, Request


def measure_in_rounds(
    context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT, settings: Sequence[SettingT], seeds: Sequence[int]
) -> None:
    """Every setting once under each of ``seeds``, a round a seed, every second one backwards; into ``context.found.measured``.

    The first round is made however late it is, another only if all but the last of it ends within the budget. A setting that
    fails is left out. Raises :class:`EvaluationError` if all of them do.
    """
    found, meter, reporter, budget = context.found, context.meter, context.reporter, context.question.budget_s
    left, done, share = list(settings), 0, 0.0
    each = setup.window_s + setup.warmup_s
    for number, seed in enumerate(seeds):
        turn = left if number % 2 == 0 else left[::-1]
        requests = [Request("validation", setting, setup.rate, seed, None) for setting in turn]
        missing = sum(not context.study.measurements.known(request.key) for request in requests)
        late = budget is not None and meter.spent_s + (missing - 1) * meter.typical(each) > budget
        if number and missing and late:
            break
        for request in requests:
            held = meter.hardware_s
            run = context.measured(request, setup, str(request.setting))
            if run is None:
                left.remove(request.setting)
                if not left:
                    raise EvaluationError(found.unmeasured[-1][2])
                continue
            if meter.hardware_s > held:  # measured now, and not found in the study
                meter.took(meter.hardware_s - held)
            done += 1
            share = run.score.attainment
            planned = len(seeds) * len(settings)
            remains = (planned - done) * meter.typical(each)
            if budget is not None:
                remains = min(remains, max(0.0, budget - meter.spent_s))
            found.validated = done, planned
            reporter.progress(done / planned, f"{done}/{planned}", f"{share:.1%} attainment", remains)
    reporter.stage_done(f"{done}/{len(seeds) * len(settings)}", f"windows of {setup.window_s:.3g} s")
