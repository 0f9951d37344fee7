"""The validating stage of an engine, and what its steps teach meanwhile.

The first measurement tells the machine's speed while it serves. Where that differs from the calibration, settings are compared at
another rate. After the first looks the cost model is fitted again, with the steps of all these. Where that changes it, settings
are searched for anew, and what is expected of each is simulated anew; if they cannot be told apart at this rate, they are
compared at another.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from autotune.cost.model import CostModel
from autotune.measure.evaluate import EvaluationError
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, points
from autotune.profiling.refit import refitted, speed_in, speed_of
from autotune.profiling.setup import Setup
from autotune.profiling.space import SearchSpace
from autotune.profiling.stages.candidates import Candidate, baseline_of, best_of, candidates
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.rate import at_speed, moved_key, with_candidates
from autotune.profiling.stages.simulating import simulate_again
from autotune.profiling.stages.validation import Validation, request_for
from autotune.profiling.timing import (
    CALIBRATION,
    CANDIDATES,
    PAIRED,
    RATE_AGAIN,
    SIMULATION,
    TRIALS_AGAIN,
)
from runtime.knobs import Knobs

OFF_BY, OFF_BY_AT_RATE = 0.02, 0.05
"""Shares by which the speed that one setting shows may differ from what the simulation took it for before everything is put
right; the latter at a rate that was given. A cost model that is a few percent wrong for that setting looks the same: a rate
that follows makes up for such a mistake, a fixed one does not."""

_MOVES = 2
_COMPARED = "compared"  # how the last comparison was begun
_DISTINGUISHABLE = 0.7, 0.98  # attainments of the best setting between which settings differ enough to compare them


def validate(context: Context, setup: Setup) -> None:
    """Measure; what is expected of each setting, the confidence, the rate and the speed go into ``context.found``."""
    context.reporter.stage("validating")
    compared = context.study.get(_COMPARED)
    if context.study.earlier and compared is not None:  # what was measured can be compared at its rate alone
        setup = context.found.setup = Setup.model_validate(compared)
    setup, chosen, tried = _placed(context, setup)
    may_move = context.question.rate is None and context.question.trials is None
    moved = EngineValidation(context, setup, chosen, tried, may_move=may_move).run()
    if moved is not None:
        setup = _moved(context, setup, moved)
        EngineValidation(context, setup, candidates(context, setup), []).run()
    context.study.put(_COMPARED, setup.model_dump(mode="json"))


def simulate_paired(context: Context) -> None:
    """The simulation of everything that was measured, by the cost model and at the speed that the profile will have.

    Into ``context.found.paired``, one for each run as far as there is time; first those of the comparison.
    """
    found = context.found
    if found.setup is None or found.cost is None:
        return
    simulator, rate = context.simulator(found.setup), found.setup.rate
    found.paired, late = [], context.within(PAIRED)
    with context.meter.simulating():
        for run in sorted(found.runs, key=lambda run: run.stage == "validation" and run.score.rate != rate):
            if late():
                return
            with contextlib.suppress(EvaluationError):
                found.paired.append(simulator.paired(run))


def _placed(context: Context, setup: Setup) -> tuple[Setup, list[Candidate], list[Candidate]]:
    """``setup`` at the speed and the rate that a first measurement tells; the candidates there; which of them were measured."""
    chosen = candidates(context, setup)
    tried: list[Candidate] = []
    given = context.question.rate is not None
    off_by = OFF_BY_AT_RATE if given else OFF_BY
    half = context.schedule.until(CALIBRATION, SIMULATION, context.schedule.validation / 2)
    for move in range(_MOVES):
        best = best_of(chosen, Objective.under(setup))
        request = request_for(setup, best, 0, noisy=True)
        late = bool(move) and context.decided(
            f"late/{half}/{setup.rate:g}/{setup.speed:.6f}", partial(context.meter.late, half)
        )
        if late and not context.study.measurements.known(request.key):
            break
        tried.append(best)
        first = context.measured(request, setup, best.label)
        speed = _speed_in(context, setup, first)
        if given and abs(speed / setup.speed - 1) > off_by:
            speed = _agreed(context, setup, chosen, speed)
        if not given and _distinguishable(first):
            break
        if abs(speed / setup.speed - 1) <= off_by:
            break
        went_on = context.study.measurements.known(moved_key(context, setup, speed))  # a session of a larger budget did
        if late and not went_on:
            break
        rate, setup = setup.rate, _moved(context, setup, speed)
        chosen = candidates(context, setup)
        context.found.setup = setup
        if setup.rate != rate:
            tried = []  # at another rate than the others will be: not to be compared
    return setup, chosen, tried


def _distinguishable(run: Run | None) -> bool:
    """Whether settings differ enough at the rate of ``run``, of one of the best: whatever speed its steps tell, stay there.

    A cost model that is wrong for large steps alone tells a lower speed at a high rate, and by that a lower rate at which the
    speed is right again.
    """
    low, high = _DISTINGUISHABLE
    return run is not None and low <= run.score.weighted_attainment <= high


def _moved(context: Context, setup: Setup, speed: float) -> Setup:
    """``setup`` for a machine of that ``speed``."""
    setup = at_speed(context, setup, speed)
    context.reporter.note(
        f"the machine serves at {speed:.0%} of its calibrated speed: comparing at {setup.rate:.3g} req/s"
    )
    return setup


def _speed_in(context: Context, setup: Setup, run: Run | None) -> float:
    """The speed that ``run`` tells; as it was where it tells none."""
    assert context.found.cost is not None
    speed = None if run is None else speed_in(context.found.cost, run)
    return setup.speed if speed is None else speed


def _agreed(context: Context, setup: Setup, chosen: Sequence[Candidate], speed: float) -> float:
    """The nearer to the present one of ``speed`` and what vLLM's defaults tell (the present one where they are at odds).

    A machine that has changed has changed for both; a cost model may be wrong for one setting. At a given rate nothing would
    make up for that.
    """
    baseline, trials = baseline_of(context, chosen), context.question.trials
    if baseline is None or (trials is not None and trials < 3):  # none is left for it
        return speed
    run = context.measured(request_for(setup, baseline, 0, noisy=False), setup, baseline.label)
    if run is None:
        return speed
    factors = [math.log(s / setup.speed) for s in (speed, _speed_in(context, setup, run))]
    return setup.speed * math.exp(min(factors, key=abs)) if factors[0] * factors[1] > 0 else setup.speed


class EngineValidation(Validation[Knobs, Setup, CostModel, SearchSpace]):
    """Validates settings of an engine. When its cost model or its speed changes, every candidate and every measurement is
    simulated anew. ``may_move``: whether the comparison may be given up for one at another rate.
    """

    def __init__(
        self, context: Context, setup: Setup, chosen: Sequence[Candidate], *rest: Any, may_move: bool = False
    ) -> None:
        schedule = context.schedule
        super().__init__(
            context, setup, chosen, *rest, end=schedule.until(CALIBRATION, SIMULATION, schedule.validation)
        )
        self._may_move = may_move

    def _review(self) -> float | None:
        """The cost model fitted to what was measured as well, and everything expected by that.

        The speed, if settings are to be compared at another rate: the first measurement chose the rate, and had it met the
        machine in a bad minute, all of them meet the SLO in everything that follows, or none does.
        """
        context, setup = self._context, self._setup
        assert context.found.cost is not None
        runs = [run for run in context.found.runs if run.stage == "validation"]
        key = f"reviewed/{setup.rate:g}/{setup.speed:.6f}"
        known = context.study.measurements.find(key)
        if known is None and not self._time_to_compare(simulating_s=context.schedule.until(RATE_AGAIN, CANDIDATES)):
            return None
        speed = speed_of(context.found.cost, runs) or setup.speed
        faster, (low, high) = speed / setup.speed, _DISTINGUISHABLE
        best = max((p.weighted_attainment for p in points(self._validated())), default=0.0)
        in_vain = (best > high and faster > 1 and setup.rate < setup.most_rate) or (best < low and faster < 1)
        moves = self._may_move and in_vain and abs(faster - 1) > OFF_BY_AT_RATE
        stored = context.study.measured(key, lambda: {"speed": speed, "moves": moves}, stop=context.stop)
        if stored["moves"]:
            return float(stored["speed"])
        before = context.cost_name
        speed = self._learned_speed()
        if context.cost_name != before:
            self._learn(speed)
        return None

    def _speed(self, runs: Sequence[Run]) -> float:
        assert self._context.found.cost is not None
        return speed_of(self._context.found.cost, runs) or self._setup.speed

    def _learned_speed(self) -> float:
        """Have a cost model that has seen the steps of this comparison; the machine's speed by that."""
        found, runs = self._context.found, [run for _, run in self._runs]
        assert found.cost is not None
        with self._context.meter.simulating():
            found.cost = refitted(found.cost, found.steps, runs)
        return self._speed(runs)

    def _learn(self, speed: float) -> None:
        """Expect everything anew by the cost model that has seen these steps, at ``speed``."""
        context, found = self._context, self._context.found
        measured = [self._candidates[i] for i, _ in self._runs]
        known = self._candidates
        anew = context.schedule.until(RATE_AGAIN, CANDIDATES, TRIALS_AGAIN)
        if self._time_to_compare(simulating_s=anew):
            setup = self._setup.model_copy(update={"speed": speed})
            simulate_again(context, setup, f"{speed:.6f}/{context.cost_name}")
        self._setup = found.setup = with_candidates(context, self._setup, speed)
        self._candidates = candidates(context, self._setup)
        with context.meter.simulating():
            self._add(measured)
        now = self._places()
        moved = {i: now[one.knobs] for i, one in enumerate(known) if one.knobs in now}
        self._runs = [(moved[i], run) for i, run in self._runs]
        self._counts = Counter({moved[i]: count for i, count in self._counts.items() if i in moved})
        self._failed = {moved[i]: why for i, why in self._failed.items() if i in moved}
        self._noisy = moved.get(self._noisy, -1)
        self._expect()
