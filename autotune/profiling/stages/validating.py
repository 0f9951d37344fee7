"""The validating stage: measurements on the hardware, each where it is expected to improve the choice the most.

The best by simulation is measured first, then vLLM's defaults, then the best again, for the noise of the hardware. Then the
other settings people will look at, once each; then whatever the belief (:mod:`autotune.profiling.belief`) has most to gain
from, until nothing is worth a measurement or the time is over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from autotune.evaluate import EvaluationError
from autotune.profile.parts import Confidence
from autotune.profiling.belief import Belief, Observation, count_noise, repeat_noise
from autotune.profiling.choice import GIVE_UP, alike, latency
from autotune.profiling.points import Run
from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.simulating import Finalist, baseline_of, finalist, finalists, to_knee
from autotune.profiling.timing import CALIBRATION, VALIDATION
from autotune.score import Score
from runtime.slo import SLO

WORTH = 0.001
"""Share of goodput a measurement must be expected to gain to be made."""

OFF_BY = 0.02
"""Share by which the hardware's speed may differ from what the simulation took it for before the rate is put right."""

_MOST_RUNS, _MOVES = 24, 2
_SPEEDS, _BISECTIONS = (0.3, 3.0), 8


def validate(context: Context, setup: Setup) -> None:
    """Measure; what is expected of each setting, the confidence and the rate, put right, go into ``context.found``."""
    context.reporter.stage("validating")
    finals = finalists(context, setup)
    for _ in range(_MOVES):
        first = _measure(context, setup, best_of(finals, setup.slo), 0, noisy=True)
        speed = setup.speed if first is None else speed_of(context, setup, first)
        if abs(speed / setup.speed - 1) <= OFF_BY:
            break
        rate = setup.rate if context.question.rate is not None else setup.rate * speed / setup.speed
        setup = to_knee(context, setup.model_copy(update={"speed": speed, "rate": min(rate, setup.most_rate)}))
        context.found.setup = setup
        told = f"the hardware serves as at {speed:.0%} of its calibrated speed"
        context.reporter.note(f"{told}: comparing at {setup.rate:.3g} req/s")
        finals = finalists(context, setup)
    _Race(context, setup, finals).run()


class _Race:
    """Measures finalists of one comparison and keeps what is believed of them."""

    def __init__(self, context: Context, setup: Setup, finals: list[Finalist]) -> None:
        self._context, self._setup, self._finals = context, setup, finals
        self._speeds: defaultdict[int, list[float]] = defaultdict(list)
        self._belief = Belief(
            [f.point.attainment for f in finals],
            [_behaviour(f) for f in finals],
            quantum=1 / max(1.0, setup.offered_rate * setup.window_s),
        )
        self._opening = self._first_looks()
        self._noisy = self._opening[0]
        self._counts: Counter[int] = Counter()
        self._failed: dict[int, str] = {}

    def run(self) -> None:
        context = self._context
        end = context.schedule.until(CALIBRATION, VALIDATION)
        try:
            while (index := self._next(end)) is not None:
                self._observe(index)
                self._show(end)
        finally:
            self._conclude()
        if not self._belief.observations and self._failed:
            raise EvaluationError(next(iter(self._failed.values())))
        done, _ = context.found.validated
        context.found.validated = (done, done)
        context.reporter.stage_done(f"{done}/{done}", self._note())

    def _first_looks(self) -> list[int]:
        """The best; the yardstick; the best again; the most headroom and the most throughput, where they are others.

        The yardstick comes before the repeat: should the time end there, two settings were compared.
        """
        finals, slo, trials = self._finals, self._setup.slo, self._context.question.trials
        best = finals.index(best_of(finals, slo))
        shares = [f.point.attainment for f in finals]
        good = [i for i, share in enumerate(shares) if share >= (1 - GIVE_UP) * shares[best]]
        quick = min(good, key=lambda i: (latency(finals[i].point, slo), -shares[i]))
        full = max(range(len(finals)), key=lambda i: (finals[i].point.throughput.mean, shares[i]))
        yardstick = baseline_of(finals)
        order = [best] if yardstick is None else [best, finals.index(yardstick)]
        for index in (quick, full):
            if not any(alike(finals[index].knobs, finals[known].knobs) for known in order):
                order.append(index)
        if trials is not None:  # one that was the best until the speed was known has been measured too
            other = {run.knobs for run in self._context.found.runs if run.stage == "validation"} - {finals[best].knobs}
            order = order[: max(1, trials - len(other))]
        return [*order[:2], order[0], *order[2:]]

    def _next(self, end: float | None) -> int | None:
        context, done = self._context, self._counts.total()
        if done >= _MOST_RUNS or (done >= 2 and not context.in_time(end)):
            return None
        if self._opening:
            return self._opening.pop(0)
        trials = context.question.trials
        full = trials is not None and len(self._counts) >= trials
        allowed = [i for i in range(len(self._finals)) if i not in self._failed and (i in self._counts or not full)]
        if not self._belief.observations or not allowed:
            return None
        index, gain = self._belief.next(allowed)
        return index if gain >= WORTH else None

    def _observe(self, index: int) -> None:
        """One more measurement of a finalist, and its twin."""
        if index in self._failed:
            return
        final, number = self._finals[index], self._counts[index]
        run = _measure(self._context, self._setup, final, number, noisy=index == self._noisy)
        self._counts[index] += 1
        if run is None:
            causes = [cause for _, knobs, cause in self._context.found.unmeasured if knobs == final.knobs]
            self._failed[index] = causes[-1]
            return
        self._speeds[index].append(math.log(speed_of(self._context, self._setup, run) / self._setup.speed))
        speeds = self._speeds[index]
        setup = self._setup.model_copy(
            update={"speed": self._setup.speed * math.exp(sum(speeds) / (len(speeds) + 1))}  # half-way for one run
        )
        with self._context.meter.simulating():
            simulator = self._context.simulator(setup)
            twin = simulator.twin(run)
            again = finalist(final.label, final.knobs, simulator, setup)
        difference = run.score.attainment - twin.score.attainment
        full = run.score.met == run.score.offered
        self._belief.observe(Observation(index, difference, full), simulated=again.point.attainment)

    def _conclude(self) -> None:
        """What is believed and how sure it is, as far as it has come."""
        found, belief = self._context.found, self._belief
        if not belief.observations:
            return
        found.expected = {self._finals[i].knobs: min(1.0, max(0.0, float(belief.mean[i]))) for i in belief.measured}
        yardstick = baseline_of(self._finals)
        found.baseline = None if yardstick is None else yardstick.knobs
        points = {p.knobs: p for p in found.comparable()}
        mine = [points[self._finals[i].knobs] for i in belief.measured]
        alike_runs = [
            ((run.knobs, run.score.seed), run.score.goodput)
            for run in found.runs
            if run.stage == "validation" and run.score.rate == self._setup.rate
        ]
        repeats = repeat_noise(alike_runs)
        each = len(mine)
        counted = count_noise(sum(p.met for p in mine) // each, sum(p.offered for p in mine) // each)
        found.noise = max(repeats or 0.0, counted)
        chosen = found.settings()["balanced"].knobs
        choice = next((i for i in belief.measured if self._finals[i].knobs == chosen), belief.choice())
        sure = belief.sureness(choice)
        best = points[self._finals[choice].knobs]
        simulated = {i: self._finals[i].point.attainment for i in belief.measured}
        found.confidence = confidence(
            sure.best,
            sure.regret,
            repeats,
            found.noise,
            len(belief.measured),
            full=all(p.met == p.offered for p in mine),
            separated=all(p is best or p.attainment_high < best.attainment_low for p in mine),
            simulation_agrees=simulated[choice] >= max(simulated.values()),
        )

    def _show(self, end: float | None) -> None:
        context, done = self._context, self._counts.total()
        planned = done + len(self._opening) + (0 if self._opening else 1)
        left = len(self._opening) * context.meter.typical(context.run_guess)
        share = done / max(1, planned)
        if end is not None:
            room = end - context.meter.hardware_s
            planned = done + max(len(self._opening), int(room / context.meter.typical(context.run_guess)))
            left = max(0.0, room)
            share = done / max(1, planned)
        planned = min(planned, _MOST_RUNS)
        context.found.validated = (done, planned)
        context.reporter.progress(min(1.0, share), f"{done}/{planned}", self._note(), left)

    def _note(self) -> str:
        """The best so far, as it measured."""
        if not self._belief.observations:
            return ""
        knobs = self._finals[self._belief.choice()].knobs
        mine = next(p for p in self._context.found.comparable() if p.knobs == knobs).goodput
        return f"best {mine.mean:.1f} ± {(mine.high - mine.low) / 2:.1f} req/s in SLO"


def confidence(
    best: float,
    regret: float,
    repeats: float | None,
    noise: float,
    measured: int,
    *,
    full: bool = False,
    separated: bool = True,
    simulation_agrees: bool = True,
) -> Confidence:
    """The figures and the sentence.

    ``repeats``: by how much runs of the same requests differed, None: nothing was repeated; ``noise``: that of a share of so
    many requests, no less. ``full``: every run kept everything. ``separated``: no interval of another setting reaches
    into the recommended one's. ``simulation_agrees``: no other setting measured is better in simulation.
    """
    regret = max(0.0, regret)
    if full:
        told = "noise is not visible: every run kept everything"
    elif repeats is None:
        told = "nothing was measured twice"
    else:
        told = f"runs of one setting differ by {repeats:.1%}"
    sure = (
        f"the best with a probability of {best:.0%}, and is expected to serve {regret:.1%} less than the best of them"
    )
    if measured < 2:
        told += "; the recommended setting is the only one measured: the recommendation rests on simulation"
    elif separated:
        told += f"; of {measured} settings measured the recommended one is {sure}"
    else:
        told += f"; the measurements do not separate the {measured} settings measured: "
        preferred = (
            "simulation prefers the recommended one, which is" if simulation_agrees else "the recommended one is"
        )
        told += f"{preferred} {sure}"
    return Confidence(noise=round(noise, 5), best=round(best, 4), regret=round(regret, 5), sentence=told)


def best_of(finals: Sequence[Finalist], slo: SLO) -> Finalist:
    """By simulation: most in SLO, of equals the quicker."""
    return max(finals, key=lambda f: (f.point.attainment, -latency(f.point, slo)))


def _measure(context: Context, setup: Setup, final: Finalist, number: int, *, noisy: bool) -> Run | None:
    """Measurement ``number`` of a setting: each under the next seed, but for the second of a ``noisy`` one, a repeat."""
    seeds = setup.validation_seeds
    again = noisy and number == 1
    place = 0 if again else number - (noisy and number > 1)
    repeat = 1 if again else place // len(seeds) * 2
    return context.measured(
        "validation", final.label, final.knobs, setup, setup.rate, seeds[place % len(seeds)], repeat
    )


def speed_of(context: Context, setup: Setup, run: Run) -> float:
    """How fast the hardware was in ``run``, in units of the cost model's machine.

    By bisection: the speed at which the simulation of the same requests has the same typical latencies. Those tell a
    few percent where shares of a short window tell nothing, because all promises are kept in both.
    """
    low, high = _SPEEDS
    with context.meter.simulating():
        for _ in range(_BISECTIONS):
            context.check()
            middle = math.sqrt(low * high)
            twin = context.simulator(setup.model_copy(update={"speed": middle})).twin(run)
            slow = _latency(twin.score) > _latency(run.score)
            low, high = (middle, high) if slow else (low, middle)
    return math.sqrt(low * high)


def _latency(score: Score) -> float:
    """Typical latency of a request, on a scale of logarithms."""
    values = (score.tpot_ms.p50, score.e2e_ms.p50)
    return sum(math.log(v) for v in values if v)


def _behaviour(final: Finalist) -> list[float]:
    """How a setting behaves in the simulation, in octaves: settings that behave alike are mispredicted alike."""
    p = final.point
    values = (p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms, final.tokens, final.running)
    return [math.log2(max(v, 1e-3)) if v is not None else 20.0 for v in values]
