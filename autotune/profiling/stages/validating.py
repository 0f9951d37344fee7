"""The validating stage: measurements on the hardware, at a rate and a speed that they themselves put right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.finalists import Finalist, baseline_of, best_of, finalists
from autotune.profiling.stages.race import Race, asked
from autotune.profiling.stages.settling import at_speed, knee_key
from autotune.profiling.stages.speed import OFF_BY, OFF_BY_AT_RATE, speed_of, told_speed
from autotune.profiling.timing import CALIBRATION, SIMULATION, VALIDATION

_MOVES = 2


def validate(context: Context, setup: Setup) -> None:
    """Measure; what is expected of each setting, the confidence, the rate and the speed go into ``context.found``."""
    context.reporter.stage("validating")
    finals = finalists(context, setup)
    tried: list[Finalist] = []
    told: list[float] = []  # the speed, by each run so far
    off_by = OFF_BY if context.question.rate is None else OFF_BY_AT_RATE
    half = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION / 2)
    for move in range(_MOVES):
        best = best_of(finals, setup.slo)
        request = asked(setup, best, 0, noisy=True)
        late = bool(move) and context.decided(
            f"late/{half}/{setup.rate:g}/{setup.speed:.6f}", partial(context.meter.late, half)
        )
        if late and not context.study.measurements.known(request.key):
            break
        tried.append(best)
        first = context.measured(request, setup, best.label)
        speed = setup.speed if first is None else speed_of(context, setup, first)
        if context.question.rate is not None and abs(speed / setup.speed - 1) > off_by:
            speed = _agreed(context, setup, finals, speed)
        if abs(speed / setup.speed - 1) <= off_by:
            break
        went_on = context.study.measurements.known(knee_key(setup, speed))  # a session of a larger budget did
        if late and not went_on:
            break
        before, setup, finals = setup.rate, *_moved(context, setup, speed)
        context.found.setup = setup
        if setup.rate != before:
            tried = []  # at another rate than the others will be: not to be compared
            told.append(speed)
    may_move = context.question.rate is None and context.question.trials is None
    elsewhere = Race(context, setup, finals, tried, told, may_move=may_move).run()
    if elsewhere is not None:
        setup, finals = _moved(context, setup, elsewhere)
        Race(context, setup, finals, [], []).run()


def _moved(context: Context, setup: Setup, speed: float) -> tuple[Setup, list[Finalist]]:
    """``setup`` for a machine of that ``speed``, and the settings worth measuring there."""
    setup = at_speed(context, setup, speed)
    context.reporter.note(f"{told_speed(speed)}: comparing at {setup.rate:.3g} req/s")
    return setup, finalists(context, setup)


def _agreed(context: Context, setup: Setup, finals: Sequence[Finalist], speed: float) -> float:
    """The nearer to the present one of ``speed`` and what vLLM's defaults tell (the present one where they are at odds).

    A machine that has changed has changed for both; where a cost model is wrong for one setting, near the knee its latencies look
    like those of quite another machine. At a given rate nothing would make up for that.
    """
    yardstick, trials = baseline_of(finals), context.question.trials
    if yardstick is None or (trials is not None and trials < 3):  # no room for it
        return speed
    run = context.measured(asked(setup, yardstick, 0, noisy=False), setup, yardstick.label)
    if run is None:
        return speed
    told = [math.log(s / setup.speed) for s in (speed, speed_of(context, setup, run))]
    return setup.speed * math.exp(min(told, key=abs)) if told[0] * told[1] > 0 else setup.speed
