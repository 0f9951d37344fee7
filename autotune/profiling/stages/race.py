"""Measurements of the finalists of one comparison, each where it is expected to improve the choice the most.

The best by simulation is measured first, and at once again, for the noise of the hardware; then vLLM's defaults and the other
settings people will look at, once each; then whatever the belief (:mod:`autotune.profiling.belief`) has most to gain from, until
nothing is worth a measurement or the time is over.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.belief import Belief, Observation, count_noise, repeat_noise
from autotune.profiling.choice import GIVE_UP, alike, equals, latency
from autotune.profiling.confidence import confidence
from autotune.profiling.points import Run, points
from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Asked, Context
from autotune.profiling.stages.finalists import Finalist, around, baseline_of, best_of, finalist
from autotune.profiling.stages.speed import OFF_BY_AT_RATE, speed_of
from autotune.profiling.timing import CALIBRATION, FINALISTS, KNEE, SIMULATION, VALIDATION

WORTH = 0.0005
"""Share of goodput a measurement must be expected to gain to be made."""

_MOST_RUNS = 16  # if no more settings were asked for
_NOTHING_TOLD = 0.7, 0.98  # shares of the best setting below and above which settings can hardly be told apart
_TO_COMPARE = 3  # measurements, at the least


class Race:
    """Measures finalists of one comparison and keeps what is believed of them.

    ``tried``: those that have been measured already. Some may no longer be finalists: they are candidates all the same.
    ``told``: the speeds that measurements at other rates told; ``may_move``: whether the comparison may be given up for one at
    another rate.
    """

    def __init__(
        self,
        context: Context,
        setup: Setup,
        finals: list[Finalist],
        tried: Sequence[Finalist],
        told: Sequence[float],
        *,
        may_move: bool = False,
    ) -> None:
        simulators = around(context, setup)
        known = {f.knobs for f in finals}
        with context.meter.simulating():
            finals = [*finals, *(finalist(f.label, f.knobs, simulators, setup) for f in tried if f.knobs not in known)]
        self._context, self._setup, self._finals = context, setup, finals
        self._speeds: defaultdict[int, list[float]] = defaultdict(list)
        self._told, self._may_move = [math.log(speed) for speed in told], may_move
        self._before = bool(context.found.expected)  # an earlier comparison stands until this one can tell
        self._belief = Belief(
            [f.point.attainment for f in finals],
            [_behaviour(f) for f in finals],
            quantum=1 / max(1.0, setup.rate * setup.window_s),
        )
        best = best_of(finals, setup.slo).knobs
        places = {f.knobs: i for i, f in enumerate(finals)}
        self._tried = [places[knobs] for knobs in dict.fromkeys(f.knobs for f in tried) if knobs != best]
        self._most = max(_MOST_RUNS, 3 * (context.question.trials or 0) // 2)
        self._must = 0  # measurements made however late it is
        self._looked = False
        self._end = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION)
        self._opening = self._first_looks()
        self._noisy = self._opening[0]
        self._counts: Counter[int] = Counter()
        self._failed: dict[int, str] = {}

    def run(self) -> float | None:
        """Measure. The speed of the hardware, if everything is to be compared again at that; None once it is done."""
        context = self._context
        try:
            for known in self._tried:
                self._observe(known)
            while (index := self._next()) is not None:
                self._observe(index)
                self._show()
                if (speed := self._elsewhere()) is not None:
                    return speed
        finally:
            self._conclude()
        if not self._belief.observations and self._failed and not self._before:
            raise EvaluationError(next(iter(self._failed.values())))
        done, _ = context.found.validated
        context.found.validated = (done, done)
        context.reporter.stage_done(f"{done}/{done}", self._note())
        return None

    def _elsewhere(self) -> float | None:
        """The speed that all measurements tell, after the first looks, where these tell no settings apart and it would.

        The first measurement chose the rate. Had it met the machine in a bad minute, everything is kept in all that follow.
        """
        context, setup = self._context, self._setup
        if self._opening or self._looked or not self._speeds:
            return None
        self._looked = True
        key = f"elsewhere/{setup.rate:g}/{setup.speed:.6f}"
        if (went := context.study.measurements.find(key)) is not None:
            return float(went["speed"])  # as an earlier session did, whatever its budget was
        speed = math.exp(statistics.median([*self._told, *(one for told in self._speeds.values() for one in told)]))
        faster, (low, high) = speed / setup.speed, _NOTHING_TOLD
        best = max(p.attainment for p in points(self._runs()))
        in_vain = (best > high and faster > 1 and setup.rate < setup.most_rate) or (best < low and faster < 1)
        moves = self._may_move and in_vain and abs(faster - 1) > OFF_BY_AT_RATE
        if not (moves and self._room(_TO_COMPARE, simulating=True)):
            return None
        return float(context.study.measured(key, lambda: {"speed": speed}, stop=context.stop)["speed"])

    def _runs(self) -> list[Run]:
        return self._context.found.validated_at(self._setup.rate)

    def _first_looks(self) -> list[int]:
        """The best, twice; the yardstick; the most headroom and the most throughput, where they are others.

        Noise comes first. Only where there is no time for three measurements, the yardstick comes before the repeat: two settings
        compared tell more than one measured twice.
        """
        finals, slo, trials = self._finals, self._setup.slo, self._context.question.trials
        best = finals.index(best_of(finals, slo))
        shares = [f.point.attainment for f in finals]
        good = [i for i, share in enumerate(shares) if share >= (1 - GIVE_UP) * shares[best]]
        quick = min(good, key=lambda i: (latency(finals[i].point, slo), -shares[i]))
        full = max(range(len(finals)), key=lambda i: (finals[i].point.throughput.mean, shares[i]))
        yardstick = baseline_of(finals)
        others = [] if yardstick is None or yardstick is finals[best] else [finals.index(yardstick)]
        for index in (quick, full):
            if not any(alike(finals[index].knobs, finals[known].knobs) for known in (best, *others)):
                others.append(index)
        others = [index for index in others if index not in self._tried]
        if trials is not None:
            left = max(0, trials - 1 - len(self._tried))
            unmet = trials > 1 and yardstick is not None and finals.index(yardstick) in others[:1]
            others = others[: max(left, unmet)]  # what was measured before a move does not take the yardstick's place
        # with the best, at the least, however late it is; behind a move the yardstick, if it was not measured before it
        needed = not self._tried or (yardstick is not None and finals.index(yardstick) in others[:1])
        compared = others[:1] if needed else []
        noise_first = not compared or self._room(_TO_COMPARE, best)
        self._must = 1 + len(compared) + (noise_first and bool(compared))
        return [best, best, *others] if noise_first else [best, *compared, best, *others[1:]]

    def _room(self, runs: int, first: int | None = None, *, simulating: bool = False) -> bool:
        """Whether there is time for so many measurements, of which that of ``first`` may have been made already.

        ``simulating``: and to find a rate and finalists before them.
        """
        context, setup, end = self._context, self._setup, self._end
        if end is not None and simulating:
            end -= context.schedule.until(KNEE, FINALISTS) or 0.0

        def fits() -> bool:
            made = first is not None and context.study.measurements.known(
                asked(setup, self._finals[first], 0, noisy=True).key
            )
            return context.meter.fits(end, context.run_guess, runs - made)

        return context.decided(f"room/{runs}/{first}/{end}/{setup.rate:g}/{setup.speed:.6f}", fits)

    def _next(self) -> int | None:
        index = None if self._counts.total() >= self._most else self._wanted()
        if index is None or (self._must <= 0 and not self._context.in_time(self._end, self._asked(index))):
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
        allowed = [i for i in range(len(self._finals)) if i not in self._failed and (i in self._counts or not full)]
        if not self._belief.observations or not allowed:
            return None
        index, gain = self._belief.next(allowed)
        return index if gain >= WORTH else None

    def _observe(self, index: int) -> None:
        """One more measurement of a finalist, and its twin."""
        if index in self._failed:
            return
        final = self._finals[index]
        meter = self._context.meter
        begun, held = meter.spent_s, meter.hardware_s
        run = self._context.measured(self._asked(index), self._setup, final.label)
        self._counts[index] += 1
        if run is None:
            causes = [cause for _, knobs, cause in self._context.found.unmeasured if knobs == final.knobs]
            self._failed[index] = causes[-1]
            return
        speed = speed_of(self._context, self._setup, run)  # may be interrupted
        self._speeds[index].append(math.log(speed))
        usual = math.log(self._setup.speed)
        speeds = [told - usual for told in self._speeds[index]]
        setup = self._setup.model_copy(
            update={"speed": self._setup.speed * math.exp(sum(speeds) / (len(speeds) + 1))}  # half-way for one run
        )
        with self._context.meter.simulating():
            simulators = around(self._context, setup)
            twins = [simulator.twin(run).score.attainment for simulator in simulators]
            again = finalist(final.label, final.knobs, simulators, setup)
        difference = run.score.attainment - sum(twins) / len(twins)
        full = run.score.met == run.score.offered
        self._belief.observe(Observation(index, difference, full), simulated=again.point.attainment)
        if meter.hardware_s > held:  # measured now, and not found in the study
            meter.took(meter.spent_s - begun)

    def _asked(self, index: int) -> Asked:
        """The next measurement of a finalist."""
        return asked(self._setup, self._finals[index], self._counts[index], noisy=index == self._noisy)

    def _speed(self) -> float:
        """Of the hardware over all settings measured: each tells the speed, and what the cost model is wrong by for it."""
        usual = math.log(self._setup.speed)
        told = [sum(speeds) / len(speeds) - usual for speeds in self._speeds.values()]
        return self._setup.speed * math.exp(sum(told) / (len(told) + 1))

    def _conclude(self) -> None:
        """What is believed and how sure it is, as far as it has come.

        Of a second comparison only once it has compared two settings: before, the first one tells more.
        """
        found, belief = self._context.found, self._belief
        if not belief.observations or (self._before and len(belief.measured) < 2):
            return
        found.finalists = [final.point for final in self._finals]
        found.setup = self._setup.model_copy(update={"speed": self._speed()})
        found.expected = {self._finals[i].knobs: belief.expected(i) for i in belief.measured}
        yardstick = baseline_of(self._finals)
        found.baseline = None if yardstick is None else yardstick.knobs
        measured = {p.knobs: p for p in points(self._runs())}
        mine = [measured[self._finals[i].knobs] for i in belief.measured]
        repeats = repeat_noise([((run.knobs, run.score.seed), run.score.goodput) for run in self._runs()])
        each = len(mine)
        counted = count_noise(sum(p.met for p in mine) // each, sum(p.offered for p in mine) // each)
        found.noise = max(repeats or 0.0, counted)
        chosen = found.settings()["balanced"].knobs
        choice = next((i for i in belief.measured if self._finals[i].knobs == chosen), belief.choice())
        sure = belief.sureness(choice)
        best = measured[self._finals[choice].knobs]
        simulated = {i: self._finals[i].point.attainment for i in belief.measured}
        found.confidence = confidence(
            sure.best,
            sure.regret,
            repeats,
            found.noise,
            len(belief.measured),
            unbeaten=sure.unbeaten if len(equals(mine, best, found.expected, found.noise)) > 1 else None,
            full=all(p.met == p.offered for p in mine),
            near=sum(p is not best and p.attainment_high >= best.attainment_low for p in mine),
            simulation_agrees=simulated[choice] >= max(simulated.values()),
        )

    def _show(self) -> None:
        context, done, end = self._context, self._counts.total(), self._end
        planned = done + len(self._opening) + (0 if self._opening else 1)
        left = len(self._opening) * context.meter.typical(context.run_guess)
        share = done / max(1, planned)
        if end is not None:
            room = end - context.meter.spent_s
            planned = done + max(len(self._opening), int(room / context.meter.typical(context.run_guess)))
            left = max(0.0, room)
            share = done / max(1, planned)
        planned = min(planned, self._most)
        context.found.validated = (done, planned)
        context.reporter.progress(min(1.0, share), f"{done}/{planned}", self._note(), left)

    def _note(self) -> str:
        """The best so far, as it measured."""
        if not self._belief.observations:
            return ""
        knobs = self._finals[self._belief.choice()].knobs
        mine = next(p for p in points(self._runs()) if p.knobs == knobs).goodput
        return f"best {mine.mean:.1f} ± {(mine.high - mine.low) / 2:.1f} req/s in SLO"


def asked(setup: Setup, final: Finalist, number: int, *, noisy: bool) -> Asked:
    """Measurement ``number`` of a setting: each under the next seed, but for the second of a ``noisy`` one, a repeat."""
    seeds = setup.validation_seeds
    again = noisy and number == 1
    place = 0 if again else number - (noisy and number > 1)
    repeat = 1 if again else place // len(seeds) * 2
    return Asked("validation", final.knobs, setup.rate, seeds[place % len(seeds)], repeat)


def _behaviour(final: Finalist) -> list[float]:
    """How a setting behaves in the simulation, in octaves: settings that behave alike are mispredicted alike."""
    p = final.point
    values = (p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms, final.tokens, final.running)
    return [math.log2(max(v, 1e-3)) if v is not None else 20.0 for v in values]
