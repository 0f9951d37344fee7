"""The validating stage: measurements on the hardware, each where it is expected to improve the choice the most.

The first measurement tells the machine's speed while it serves. Where that differs from the calibration, settings are compared at
another rate. The best by simulation is measured first, and at once again, for the noise of the hardware; then vLLM's defaults and
the other settings people will look at, once each. Then the cost model is fitted again, with the steps of all these. Where that
changes it, settings are searched for anew, and what is expected of each is simulated anew; if they cannot be told apart at this
rate, they are compared at another. From then on that is measured from which the posterior (:mod:`autotune.profiling.posterior`)
has most to gain, until nothing is worth a measurement or the time is over.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.objective import GIVE_UP, Objective
from autotune.profiling.points import Run, points
from autotune.profiling.posterior import Observation, Posterior, confidence, count_noise, repeat_noise
from autotune.profiling.refit import refitted, speed_in, speed_of
from autotune.profiling.setup import Setup
from autotune.profiling.space import alike
from autotune.profiling.stages.candidates import Candidate, around, baseline_of, best_of, candidate, candidates
from autotune.profiling.stages.context import Context, Request
from autotune.profiling.stages.rate import at_speed, moved_key, with_candidates
from autotune.profiling.stages.simulating import simulate_again
from autotune.profiling.timing import (
    CALIBRATION,
    CANDIDATES,
    PAIRED,
    RATE_AGAIN,
    SIMULATION,
    TRIALS_AGAIN,
    VALIDATION,
)

WORTH = 0.0005
"""Share of goodput a measurement must be expected to gain to be made."""

OFF_BY, OFF_BY_AT_RATE = 0.02, 0.05
"""Shares by which the speed that one setting shows may differ from what the simulation took it for before everything is put
right; the latter at a rate that was given. A cost model that is a few percent wrong for that setting looks the same: a rate
that follows makes up for such a mistake, a fixed one does not."""

_MOVES = 2
_MOST_RUNS = 16  # if no more settings were asked for
_NOT_TOLD_APART = 0.7, 0.98  # attainments of the best setting below and above which settings can hardly be told apart
_TO_COMPARE = 3  # measurements, at the least


def validate(context: Context, setup: Setup) -> None:
    """Measure; what is expected of each setting, the confidence, the rate and the speed go into ``context.found``."""
    context.reporter.stage("validating")
    setup, chosen, tried = _placed(context, setup)
    may_move = context.question.rate is None and context.question.trials is None
    moved = Validation(context, setup, chosen, tried, may_move=may_move).run()
    if moved is not None:
        setup = _moved(context, setup, moved)
        Validation(context, setup, candidates(context, setup), []).run()


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
    half = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION / 2)
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
    baseline, trials = baseline_of(chosen), context.question.trials
    if baseline is None or (trials is not None and trials < 3):  # none is left for it
        return speed
    run = context.measured(request_for(setup, baseline, 0, noisy=False), setup, baseline.label)
    if run is None:
        return speed
    factors = [math.log(s / setup.speed) for s in (speed, _speed_in(context, setup, run))]
    return setup.speed * math.exp(min(factors, key=abs)) if factors[0] * factors[1] > 0 else setup.speed


def request_for(setup: Setup, one: Candidate, number: int, *, noisy: bool) -> Request:
    """Measurement ``number`` of a setting: each under the next seed, but for the second of a ``noisy`` one, a repeat."""
    seeds = setup.validation_seeds
    again = noisy and number == 1
    place = 0 if again else number - (noisy and number > 1)
    repeat = 1 if again else place // len(seeds) * 2
    return Request("validation", one.knobs, setup.rate, seeds[place % len(seeds)], repeat)


class Validation:
    """Measures candidates of one comparison and keeps what is expected of them.

    All that is expected rests on one cost model and one speed: when these change, every candidate and every measurement is
    simulated anew. ``tried``: those that have been measured already. Some may no longer be candidates: they may be chosen all
    the same. ``may_move``: whether the comparison may be given up for one at another rate.
    """

    def __init__(
        self,
        context: Context,
        setup: Setup,
        chosen: list[Candidate],
        tried: Sequence[Candidate],
        *,
        may_move: bool = False,
    ) -> None:
        self._context, self._setup, self._may_move = context, setup, may_move
        self._objective = Objective.under(setup)
        self._before = bool(context.found.expected)  # an earlier comparison stands until this one can tell
        self._candidates = list(chosen)
        self._runs: list[tuple[int, Run]] = []  # candidate, what it measured
        self._counts: Counter[int] = Counter()
        self._failed: dict[int, str] = {}
        with context.meter.simulating():
            self._add(tried)
        self._expect()
        best = best_of(self._candidates, self._objective).knobs
        places = self._places()
        self._tried = [places[knobs] for knobs in dict.fromkeys(one.knobs for one in tried) if knobs != best]
        self._most = max(_MOST_RUNS, 3 * (context.question.trials or 0) // 2)
        self._must = 0  # measurements made however late it is
        self._reviewed = False
        self._end = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION)
        self._opening = self._first_looks()
        self._noisy = self._opening[0]

    def run(self) -> float | None:
        """Measure. The speed of the hardware, if everything is to be compared again at that; None once it is done."""
        context = self._context
        try:
            for known in self._tried:
                self._observe(known)
            while (index := self._next()) is not None:
                self._observe(index)
                self._show()
                if not self._opening and not self._reviewed and (speed := self._review()) is not None:
                    return speed
        finally:
            self._conclude()
        if not self._runs and self._failed and not self._before:
            raise EvaluationError(next(iter(self._failed.values())))
        if self._runs and context.found.setup is not None:
            context.found.setup = context.found.setup.model_copy(update={"speed": self._refit()})
        done, _ = context.found.validated
        context.found.validated = (done, done)
        context.reporter.stage_done(f"{done}/{done}", self._note())
        return None

    # -- what is expected -------------------------------------------------------------------------------------------------

    def _places(self) -> dict[object, int]:
        return {one.knobs: i for i, one in enumerate(self._candidates)}

    def _add(self, more: Sequence[Candidate]) -> None:
        """Have settings among the candidates, simulated as these are."""
        simulators, known = around(self._context, self._setup), self._places()
        self._candidates += [
            candidate(one.label, one.knobs, simulators, self._setup) for one in more if one.knobs not in known
        ]

    def _expect(self) -> None:
        """The posterior of the candidates as they stand, and of all measurements against their paired simulations."""
        setup = self._setup
        self._posterior = Posterior(
            [self._objective.worth(one.point) for one in self._candidates],
            [_behaviour(one) for one in self._candidates],
            quantum=1 / max(1.0, setup.rate * setup.window_s),
        )
        for index, run in self._runs:
            self._posterior.observe(self._difference(index, run))

    def _difference(self, index: int, run: Run) -> Observation:
        """``run`` against the simulations of the same requests, at the speeds that the expectation rests on."""
        worth = self._objective.worth
        with self._context.meter.simulating():
            paired = [worth(one.paired(run).score) for one in around(self._context, self._setup)]
        full = self._objective.name == "goodput" and run.score.met == run.score.offered
        return Observation(index, worth(run.score) - sum(paired) / len(paired), full)

    def _review(self) -> float | None:
        """After the first looks: the cost model fitted to what was measured as well, and everything expected by that.

        The speed, if settings are to be compared at another rate: the first measurement chose the rate, and had it met the
        machine in a bad minute, all of them meet the SLO in everything that follows, or none does.
        """
        context, setup, self._reviewed = self._context, self._setup, True
        assert context.found.cost is not None
        runs = [run for run in context.found.runs if run.stage == "validation"]
        key = f"reviewed/{setup.rate:g}/{setup.speed:.6f}"
        known = context.study.measurements.find(key)
        if known is None and not self._time_for(_TO_COMPARE, simulating=True):
            return None
        speed = speed_of(context.found.cost, runs) or setup.speed
        faster, (low, high) = speed / setup.speed, _NOT_TOLD_APART
        best = max((p.weighted_attainment for p in points(self._validated())), default=0.0)
        in_vain = (best > high and faster > 1 and setup.rate < setup.most_rate) or (best < low and faster < 1)
        moves = self._may_move and in_vain and abs(faster - 1) > OFF_BY_AT_RATE
        stored = context.study.measured(key, lambda: {"speed": speed, "moves": moves}, stop=context.stop)
        if stored["moves"]:
            return float(stored["speed"])
        before = context.cost_name
        speed = self._refit()
        if context.cost_name != before:
            self._learn(speed)
        return None

    def _refit(self) -> float:
        """Have a cost model that has seen the steps of this comparison; the machine's speed by that."""
        found, runs = self._context.found, [run for _, run in self._runs]
        assert found.cost is not None
        with self._context.meter.simulating():
            found.cost = refitted(found.cost, found.steps, runs)
        return speed_of(found.cost, runs) or self._setup.speed

    def _learn(self, speed: float) -> None:
        """Expect everything anew by the cost model that has seen these steps, at ``speed``."""
        context, found = self._context, self._context.found
        measured = [self._candidates[i] for i, _ in self._runs]
        known = self._candidates
        if self._time_for(_TO_COMPARE, simulating=True, searching=True):
            setup = self._setup.model_copy(update={"speed": speed})
            simulate_again(context, setup, f"{speed:.6f}/{context.cost_name}")
        self._setup = found.setup = with_candidates(context, self._setup, speed)
        self._candidates = candidates(context, self._setup)
        with context.meter.simulating():
            self._add(measured)
        places = self._places()
        self._runs = [(places[known[i].knobs], run) for i, run in self._runs]
        self._counts = Counter(
            {places[known[i].knobs]: count for i, count in self._counts.items() if known[i].knobs in places}
        )
        self._failed = {places[known[i].knobs]: why for i, why in self._failed.items() if known[i].knobs in places}
        self._noisy = places.get(known[self._noisy].knobs, -1)
        self._expect()

    # -- what is measured next --------------------------------------------------------------------------------------------

    def _first_looks(self) -> list[int]:
        """The best, twice; the baseline; the most headroom and the most throughput, where they are others.

        Noise comes first. Only where there is no time for three measurements, the baseline comes before the repeat: two settings
        compared tell more than one measured twice.
        """
        chosen, trials = self._candidates, self._context.question.trials
        best = chosen.index(best_of(chosen, self._objective))
        shares = [self._objective.worth(one.point) for one in chosen]
        good = [i for i, share in enumerate(shares) if share >= (1 - GIVE_UP) * shares[best]]
        quick = min(good, key=lambda i: (self._objective.latency(chosen[i].point), -shares[i]))
        full = max(range(len(chosen)), key=lambda i: (chosen[i].point.throughput.mean, shares[i]))
        baseline = baseline_of(chosen)
        others = [] if baseline is None or baseline is chosen[best] else [chosen.index(baseline)]
        for index in (quick, full):
            if not any(alike(chosen[index].knobs, chosen[known].knobs) for known in (best, *others)):
                others.append(index)
        others = [index for index in others if index not in self._tried]
        if trials is not None:
            left = max(0, trials - 1 - len(self._tried))
            unmet = trials > 1 and baseline is not None and chosen.index(baseline) in others[:1]
            others = others[: max(left, unmet)]  # what was measured before a move does not take the baseline's place
        # with the best, at the least, however late it is; behind a move the baseline, if it was not measured before it
        needed = not self._tried or (baseline is not None and chosen.index(baseline) in others[:1])
        compared = others[:1] if needed else []
        noise_first = not compared or self._time_for(_TO_COMPARE, best)
        self._must = 1 + len(compared) + (noise_first and bool(compared))
        return [best, best, *others] if noise_first else [best, *compared, best, *others[1:]]

    def _time_for(
        self, runs: int, first: int | None = None, *, simulating: bool = False, searching: bool = False
    ) -> bool:
        """Whether there is time for so many measurements, of which that of ``first`` may have been made already.

        ``simulating``: and to find a rate and candidates before them; ``searching``: and for trials before those.
        """
        context, setup, end = self._context, self._setup, self._end
        if end is not None and simulating:
            end -= context.schedule.until(RATE_AGAIN, CANDIDATES, *[TRIALS_AGAIN] * searching) or 0.0

        def fits() -> bool:
            made = first is not None and context.study.measurements.known(
                request_for(setup, self._candidates[first], 0, noisy=True).key
            )
            return context.meter.fits(end, context.run_guess, runs - made)

        return context.decided(f"room/{runs}/{first}/{end}/{setup.rate:g}/{setup.speed:.6f}", fits)

    def _next(self) -> int | None:
        index = None if self._counts.total() >= self._most else self._wanted()
        if index is None or (self._must <= 0 and not self._context.in_time(self._end, self._request(index))):
            return None
        if self._opening:
            self._must -= 1
            self._opening.pop(0)
        return index

    def _wanted(self) -> int | None:
        """What would be measured next, had it no end."""
        if self._opening:
            return self._opening[0]
        trials = self._context.question.trials
        full = trials is not None and len(self._counts) >= trials
        allowed = [i for i in range(len(self._candidates)) if i not in self._failed and (i in self._counts or not full)]
        if not self._runs or not allowed:
            return None
        index, gain = self._posterior.next(allowed)
        return index if gain >= WORTH else None

    def _request(self, index: int) -> Request:
        """The next measurement of a candidate."""
        return request_for(self._setup, self._candidates[index], self._counts[index], noisy=index == self._noisy)

    def _observe(self, index: int) -> None:
        """One more measurement of a candidate, and its paired simulation."""
        if index in self._failed:
            return

        def learn(run: Run) -> None:
            self._counts[index] += 1
            difference = self._difference(index, run)  # may be interrupted
            self._runs.append((index, run))
            self._posterior.observe(difference)

        cause = self._context.observe(self._request(index), self._setup, self._candidates[index].label, learn)
        if cause is not None:
            self._counts[index] += 1
            self._failed[index] = cause

    # -- what comes of it -------------------------------------------------------------------------------------------------

    def _validated(self) -> list[Run]:
        return self._context.found.validated_at(self._setup.rate)

    def _conclude(self) -> None:
        """What is expected and how sure it is, as far as it has come.

        Of a second comparison only once it has compared two settings: before, the first one tells more.
        """
        found, posterior, runs = self._context.found, self._posterior, [run for _, run in self._runs]
        if not runs or (self._before and len(posterior.measured) < 2):
            return
        assert found.cost is not None
        found.candidates = [one.point for one in self._candidates]
        found.setup = self._setup.model_copy(update={"speed": speed_of(found.cost, runs) or self._setup.speed})
        found.expected = {self._candidates[i].knobs: posterior.expected(i) for i in posterior.measured}
        baseline = baseline_of(self._candidates)
        found.baseline = None if baseline is None else baseline.knobs
        measured = {p.knobs: p for p in points(self._validated())}
        mine = [measured[self._candidates[i].knobs] for i in posterior.measured]
        objective = self._objective
        by_goodput = objective.name == "goodput"
        repeats = repeat_noise([((run.knobs, run.score.seed), objective.value(run.score)) for run in self._validated()])
        each = len(mine)
        counted = count_noise(sum(p.met for p in mine) // each, sum(p.offered for p in mine) // each)
        found.noise = max(repeats or 0.0, counted) if by_goodput else repeats or 0.0
        chosen = found.settings()["balanced"].knobs
        choice = next((i for i in posterior.measured if self._candidates[i].knobs == chosen), posterior.choice())
        sure = posterior.sureness(choice)
        best = measured[self._candidates[choice].knobs]
        simulated = {i: objective.worth(self._candidates[i].point) for i in posterior.measured}
        found.confidence = confidence(
            sure.best,
            objective.regret(sure.regret, objective.worth(best)),
            repeats,
            found.noise,
            len(posterior.measured),
            unbeaten=sure.unbeaten if len(objective.equals(mine, best, found.expected, found.noise)) > 1 else None,
            full=by_goodput and all(p.met == p.offered for p in mine),
            near=sum(p is not best and p.attainment_high >= best.attainment_low for p in mine) if by_goodput else 0,
            takes_longer=not by_goodput,
            simulation_agrees=simulated[choice] >= max(simulated.values()),
        )

    def _show(self) -> None:
        context, done, end = self._context, self._counts.total(), self._end
        planned = done + len(self._opening) + (0 if self._opening else 1)
        left = len(self._opening) * context.meter.typical(context.run_guess)
        share = done / max(1, planned)
        if end is not None:
            left = max(0.0, end - context.meter.spent_s)
            planned = done + max(len(self._opening), int(left / context.meter.typical(context.run_guess)))
            share = done / max(1, planned)
        planned = min(planned, self._most)
        context.found.validated = (done, planned)
        context.reporter.progress(min(1.0, share), f"{done}/{planned}", self._note(), left)

    def _note(self) -> str:
        """The best so far, as it measured."""
        if not self._runs:
            return ""
        knobs = self._candidates[self._posterior.choice()].knobs
        point = next(p for p in points(self._validated()) if p.knobs == knobs)
        if self._objective.name != "goodput":
            return self._objective.said(point)
        mine = point.goodput
        return f"best {mine.mean:.1f} ± {(mine.high - mine.low) / 2:.1f} req/s within the SLO"


def _behaviour(one: Candidate) -> list[float]:
    """How a setting behaves in the simulation, in octaves: settings that behave alike are mispredicted alike."""
    p = one.point
    values = (p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms, one.tokens, one.running)
    return [math.log2(max(v, 1e-3)) if v is not None else 20.0 for v in values]
