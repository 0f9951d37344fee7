"""How settings of an engine or a callable are measured: each time where it is expected to improve the choice the most.

The best by simulation is measured first, and at once again, for the noise of the hardware; then the baseline and the other
settings people will look at, once each. From then on that is measured from which the posterior
(:mod:`autotune.profiling.posterior`) has most to gain, until nothing is worth a measurement or the time is over. All settings
meet the same arrivals in the same order of seeds, and each measurement is compared with the simulation of the very same requests.
What fails is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.objective import GIVE_UP, Objective
from autotune.profiling.points import Run, by_setting
from autotune.profiling.posterior import Observation, Posterior, confidence, count_noise, repeat_noise
from autotune.profiling.setup import Comparison
from autotune.profiling.stages.candidates import Candidate, around, baseline_of, best_of, candidate
from autotune.profiling.stages.context import Context, MeasurementRequest

WORTH = 0.0005
"""Share of goodput a measurement must be expected to gain to be made."""

TO_COMPARE = 3
"""Measurements of a comparison, at the least."""

_MOST_RUNS = 16  # if no more settings were requested
_MOST_FAILED = 4  # settings, before anything was measured


def request_for(setup: Comparison, one: Candidate, number: int, *, noisy: bool) -> MeasurementRequest[Any]:
    """Measurement ``number`` of a setting: each under the next seed, but for the second of a ``noisy`` one, a repeat."""
    seeds = setup.validation_seeds
    again = noisy and number == 1
    place = 0 if again else number - (noisy and number > 1)
    repeat = 1 if again else place // len(seeds) * 2
    return MeasurementRequest("validation", one.setting, setup.rate, seeds[place % len(seeds)], repeat)


class Validation(Generic[SettingT, SetupT, CostT, SpaceT]):
    """Measures candidates of one comparison and keeps what is expected of them, until ``end`` seconds are spent (None: no end).

    All that is expected rests on one cost model and one speed. ``tried``: those that have been measured already. Some may no
    longer be candidates: they may be chosen all the same, as may those measured before the study was extended. What an engine
    learns from its steps, and what is still measured when nothing improves the choice, is up to subclasses.
    """

    def __init__(
        self,
        context: Context[SettingT, SetupT, CostT, SpaceT],
        setup: SetupT,
        chosen: Sequence[Candidate],
        tried: Sequence[Candidate] = (),
        *,
        end: float | None = None,
    ) -> None:
        self._context, self._setup, self._end = context, setup, end
        self._objective = Objective.under(setup)
        self._before = bool(context.found.expected)  # an earlier comparison stands until this one can tell
        self._candidates = list(chosen)
        self._counts: Counter[int] = Counter()
        self._failed: dict[int, str] = {}
        earlier = context.earlier(setup.rate)
        with context.meter.simulating():
            self._add([*tried, *earlier])
        places = self._places()
        self._runs = [(places[run.setting], run) for run in earlier]  # candidate, what it measured
        self._expect()
        best = best_of(self._candidates, self._objective).setting
        self._tried = [places[setting] for setting in dict.fromkeys(one.setting for one in tried) if setting != best]
        self._most = max(_MOST_RUNS, 3 * (context.question.trials or 0) // 2)
        self._must = 0  # measurements made however late it is
        self._reviewed = False
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
                if not self._opening and not self._reviewed:
                    self._reviewed = True
                    if (speed := self._review()) is not None:
                        return speed
        finally:
            self._conclude()
        if not self._runs and self._failed and not self._before:
            raise EvaluationError(f"{next(iter(self._failed.values()))}; --fresh measures anew")
        if self._runs and context.found.setup is not None:
            context.found.setup = context.found.setup.model_copy(update={"speed": self._learned_speed()})
        done, _ = context.found.validated
        context.found.validated = (done, done)
        context.reporter.stage_done(f"{done}/{done}", self._note())
        return None

    # -- what differs by what is measured ---------------------------------------------------------------------------------

    def _review(self) -> float | None:
        """Once, after the first looks: learn from them. A speed of the hardware ends it, to compare anew at that."""
        return None

    def _speed(self, runs: Sequence[Run]) -> float:
        """Of the hardware, by what ``runs`` tell."""
        return self._setup.speed

    def _learned_speed(self) -> float:
        """The same at the end, by a cost model that has seen these measurements."""
        return self._setup.speed

    def _unsettled(self) -> int | None:
        """What is measured once no measurement improves the choice; None: nothing."""
        return None

    # -- what is expected -------------------------------------------------------------------------------------------------

    def _places(self) -> dict[object, int]:
        return {one.setting: i for i, one in enumerate(self._candidates)}

    def _add(self, more: Sequence[Candidate | Run]) -> None:
        """Have settings among the candidates, simulated as these are."""
        simulators, known = around(self._context, self._setup), self._places()
        new: dict[Any, str] = {one.setting: one.label for one in more if one.setting not in known}
        self._candidates += [candidate(label, setting, simulators, self._setup) for setting, label in new.items()]

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
        full = self._objective.name == "goodput" and run.score.met == run.score.offered > 0
        return Observation(index, worth(run.score) - sum(paired) / len(paired), full)

    # -- what is measured next --------------------------------------------------------------------------------------------

    def _first_looks(self) -> list[int]:
        """The best, twice; the baseline; the most headroom and the most throughput, where they are others; else the second best.

        Noise comes first. Only where there is no time for three measurements, the baseline comes before the repeat: two settings
        compared tell more than one measured twice.
        """
        chosen, trials = self._candidates, self._context.question.trials
        best = chosen.index(best_of(chosen, self._objective))
        shares = [self._objective.worth(one.point) for one in chosen]
        good = [i for i, share in enumerate(shares) if share >= (1 - GIVE_UP) * shares[best]]
        quick = min(good, key=lambda i: (self._objective.latency(chosen[i].point), -shares[i]))
        full = max(range(len(chosen)), key=lambda i: (chosen[i].point.throughput.mean, shares[i]))
        baseline, alike = baseline_of(self._context, chosen), self._context.target.alike
        others = [] if baseline is None or baseline is chosen[best] else [chosen.index(baseline)]
        for index in (quick, full):
            if not any(alike(chosen[index].setting, chosen[known].setting) for known in (best, *others)):
                others.append(index)
        if not others and not self._tried:
            rest = [index for index in range(len(chosen)) if index != best]
            others = sorted(rest, key=lambda index: self._objective.order(chosen[index].point), reverse=True)[:1]
        others = [index for index in others if index not in self._tried]
        if trials is not None:
            left = max(0, trials - 1 - len(self._tried))
            unmet = trials > 1 and baseline is not None and chosen.index(baseline) in others[:1]
            others = others[: max(left, unmet)]  # what was measured before a move does not take the baseline's place
        # with the best, at the least, however late it is; behind a move the baseline, if it was not measured before it
        needed = not self._tried or (baseline is not None and chosen.index(baseline) in others[:1])
        compared = others[:1] if needed else []
        noise_first = not compared or self._time_to_compare(best)
        self._must = 1 + len(compared) + (noise_first and bool(compared))
        return [best, best, *others] if noise_first else [best, *compared, best, *others[1:]]

    def _time_to_compare(self, first: int | None = None, *, simulating_s: float | None = 0.0) -> bool:
        """Whether there is time for ``TO_COMPARE`` measurements, of which that of ``first`` may have been made already.

        ``simulating_s``: seconds that are simulated before them.
        """
        context, setup = self._context, self._setup
        end = self._end if self._end is None or not simulating_s else self._end - simulating_s

        def fits() -> bool:
            made = first is not None and context.study.measurements.known(
                request_for(setup, self._candidates[first], 0, noisy=True).key
            )
            return context.meter.fits(end, context.run_guess, TO_COMPARE - made)

        # the name it has in studies since their first version
        return context.decided(f"room/{TO_COMPARE}/{first}/{end}/{setup.rate:g}/{setup.speed:.6f}", fits)

    def _next(self) -> int | None:
        index = None if self._counts.total() >= self._most else self._wanted()
        if index is None:
            return None
        optional = self._must <= 0 and bool(self._runs or self._before)  # something is measured however late it is
        if optional and not self._context.in_time(self._end, self._request(index)):
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
        if not allowed or (not self._runs and len(self._failed) >= _MOST_FAILED):
            return None
        if not self._runs:  # all that was tried has failed
            return max(allowed, key=lambda i: self._objective.order(self._candidates[i].point))
        index, gain = self._posterior.next(allowed)
        return index if gain >= WORTH else self._unsettled()

    def _request(self, index: int) -> MeasurementRequest[SettingT]:
        """The next measurement of a candidate."""
        return request_for(self._setup, self._candidates[index], self._counts[index], noisy=index == self._noisy)

    def _observe(self, index: int) -> None:
        """One more measurement of a candidate, and its paired simulation."""
        if index in self._failed:
            return

        def learn(run: Run) -> None:
            self._counts[index] += 1
            if any(run is known for _, known in self._runs):  # before the study was extended
                return
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
        found.candidates = [one.point for one in self._candidates]
        found.setup = self._setup.model_copy(update={"speed": self._speed(runs)})
        found.expected = {self._candidates[i].setting: posterior.expected(i) for i in posterior.measured}
        baseline = baseline_of(self._context, self._candidates)
        found.baseline = None if baseline is None else baseline.setting
        measured, objective = by_setting(self._validated()), self._objective
        mine = {setting: measured[setting] for setting in found.expected}
        by_goodput = objective.name == "goodput"
        repeats = repeat_noise(
            [((run.setting, run.score.seed), objective.value(run.score)) for run in self._validated()]
        )
        if by_goodput:
            shown = repeats
        else:  # an objective of shares of E2E: people know the E2E
            means = [((r.setting, r.score.seed), r.score.e2e_mean_ms or 0.0) for r in self._validated()]
            shown = repeat_noise(means)
        each = len(mine)
        counted = count_noise(sum(p.met for p in mine.values()) // each, sum(p.offered for p in mine.values()) // each)
        found.noise = max(repeats or 0.0, counted) if by_goodput else repeats or 0.0
        if not any(p.offered for p in mine.values()):  # their windows were empty
            found.confidence = None
            return
        choice = self._choice()
        chosen = self._candidates[choice].setting
        worse = [s for s in mine if s != chosen and found.measured_worse(s, chosen)]
        sure = posterior.sureness(choice, [i for i in posterior.measured if self._candidates[i].setting in worse])
        best = measured[chosen]
        most = objective.worth(best) + sure.regret  # what the best would be worth
        lost = sure.regret / most if most > 0 and not by_goodput else sure.regret
        simulated = {i: objective.worth(self._candidates[i].point) for i in posterior.measured}
        found.confidence = confidence(
            sure.best,
            objective.regret(lost, most),
            shown,
            found.noise if by_goodput else shown or 0.0,
            len(posterior.measured),
            unbeaten=sure.unbeaten if len(objective.equals(mine, chosen, found.expected, found.noise)) > 1 else None,
            full=by_goodput and all(p.met == p.offered > 0 for p in mine.values()),
            near=sum(p is not best and p.attainment_high >= best.attainment_low for p in mine.values())
            if by_goodput
            else 0,
            takes_longer=not by_goodput,
            simulation_agrees=simulated[choice] >= max(simulated.values()),
        )

    def _choice(self) -> int:
        """What would be recommended now."""
        chosen, _ = self._context.found.choice()
        measured = self._posterior.measured
        return next((i for i in measured if self._candidates[i].setting == chosen), self._posterior.choice())

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
        point = by_setting(self._validated())[self._candidates[self._posterior.choice()].setting]
        unit = self._context.target.unit
        if self._objective.name != "goodput":
            return self._objective.said(point, unit)
        mine = point.goodput
        half = "" if mine.half is None else f" ± {mine.half:.1f}"
        return f"best {mine.mean:.1f}{half} {unit} within the SLO"


def _behaviour(one: Candidate) -> list[float]:
    """How a setting behaves in the simulation, in octaves: settings that behave alike are mispredicted alike."""
    p = one.point
    values = (p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms, one.tokens, one.running)
    return [math.log2(max(v, 1e-3)) if v is not None else 20.0 for v in values]
