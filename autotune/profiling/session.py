"""One profiling run: calibrate, search, validate, find the capacity, recommend. Resumable at every step.

Everything measured goes into the study's journal the moment it exists, under a key that says what it was. A second run
of the same command finds it there and goes on with what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.evaluate import EvaluationError, Interrupted, Served, evaluate
from autotune.profile_parts import Capacity, ModelFacts, Point
from autotune.profiling.calibrate import Calibrator
from autotune.profiling.choice import candidates, choose, highest_held, refuted
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import Run, Stage, point, points
from autotune.profiling.reporting import Reporter
from autotune.profiling.setup import Setup, next_rate, rounded
from autotune.profiling.space import VLLM_DEFAULTS, VLLM_LABEL, SearchSpace, starting_points
from autotune.profiling.study import SweepStudy
from autotune.profiling.timing import CALIBRATION, SEARCH, VALIDATION, Meter, Schedule
from autotune.workload import Workload
from runtime.clock import Clock, MonotonicClock
from runtime.knobs import Knobs

CANDIDATES = 4
VALIDATION_SEEDS = 3
_UNBOUNDED_SEEDS = 2  # validations of each candidate when no budget bounds them
_CAPACITY_STEPS = 3
_KNEE_STEPS = 4


class Session:
    """Works on one study with one engine. ``stop`` is asked between and during measurements."""

    def __init__(
        self,
        engine: Served,
        model: ModelFacts,
        question: Question,
        study: SweepStudy,
        reporter: Reporter,
        *,
        stop: Callable[[], bool] | None = None,
        clock: Clock | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._engine, self._model, self._question = engine, model, question
        self._study, self._reporter = study, reporter
        self._stop = stop or (lambda: False)
        self._clock = clock or MonotonicClock()
        self._meter = Meter(self._clock, float(study.get("spent_s") or 0.0))
        self._schedule = schedule or Schedule.of(question.budget_s)
        self._baseline = engine.limits.clamp(VLLM_DEFAULTS)
        self._found = Findings(None, [], [], None, False, (0, 0), 0.0)
        self._serial = 0

    def run(self) -> Findings:
        """Go through the stages; whatever stops it, what was found by then is returned."""
        try:
            setup = self._found.setup = self._calibrate()
            self._reporter.ready(setup)
            load = setup.apply(self._question.workload)
            space = self._question.space.narrowed(setup.fitted)
            self._search(setup, load, space)
            if self._found.runs:
                self._validate(setup, load)
                self._capacity(setup)
        except Interrupted:
            self._found.stopped = True
        finally:
            self._study.put("spent_s", self._meter.spent)
            self._found.failures = self._study.failures()
            self._found.spent_s = self._meter.spent
        return self._found

    # -- stages ---------------------------------------------------------------------------------------------------------

    def _calibrate(self) -> Setup:
        stored = self._study.get("setup")
        if stored is not None:
            self._reporter.note(f"going on with a study of {len(self._study.completed())} trials; --fresh begins anew")
            return Setup.model_validate(stored)
        self._reporter.stage("calibrating")
        question, schedule = self._question, self._schedule
        calibrator = Calibrator(
            self._engine,
            self._model,
            question.workload,
            seed=question.seed,
            clock=self._clock,
            stop=self._stop,
            advance=lambda share, note: self._reporter.progress(share / 2, "", note, None),
        )
        setup = calibrator.run(
            slo=question.slo,
            rate=question.rate,
            saturate_s=schedule.saturate_s,
            window_s=schedule.window_s,
            warmup_s=schedule.warmup_s,
        )
        if question.rate is None:
            setup = self._knee(setup)
        setup = setup.at(setup.rate, question.workload, question.seed)
        self._study.put("setup", setup.model_dump(mode="json"))
        self._study.put("seeds", list(range(question.seed + 1, question.seed + 1 + VALIDATION_SEEDS)))
        for label, knobs in starting_points(question.space.narrowed(setup.fitted), setup.fitted):
            override = knobs if label == VLLM_LABEL else None
            self._study.enqueue(label, question.space.narrowed(setup.fitted).params(knobs), override)
        found = setup.calibration
        self._reporter.stage_done(
            "", f"alone {found.alone_tpot_ms:.1f} ms a token, {found.saturated_rate:.1f} req/s when flooded"
        )
        return setup

    def _knee(self, setup: Setup) -> Setup:
        """``setup`` with the rate at which its own guess keeps some promises and breaks some."""
        known: list[tuple[float, float]] = []
        rate = setup.rate
        for step in range(_KNEE_STEPS):
            load = setup.model_copy(update={"rate": rate}).apply(self._question.workload)
            found = self._measure("search", "knee", setup.fitted, load, setup, self._question.seed, -1).score
            known.append((rate, found.attainment))
            note = f"{found.attainment:.0%} in SLO at {found.offered_rate:.3g} req/s"
            self._reporter.progress(0.5 + 0.5 * (step + 1) / _KNEE_STEPS, "", note, None)
            better = next_rate(rate, found, setup.mean_output, known)
            if better is None or (better > rate and rate >= setup.most_rate):
                break
            rate = rounded(min(better, setup.most_rate))
        return setup.model_copy(update={"rate": rate})

    def _search(self, setup: Setup, load: Workload, space: SearchSpace) -> None:
        self._reporter.stage("searching")
        for earlier in self._study.completed():
            self._found.runs.append(Run.model_validate(earlier.user_attrs["result"]))
        begun = self._meter.spent if self._found.runs else self._schedule.until(CALIBRATION) or 0.0
        end = self._schedule.until(CALIBRATION + SEARCH)
        failed = len(self._study.failures())
        while self._more_trials(len(self._found.runs), end):
            trial, label, knobs = self._study.ask(space, self._question.seed)
            try:
                run = self._measure("search", label, knobs, load, setup, self._question.seed, trial.number)
            except Interrupted:
                self._study.failed(trial, "interrupted", again=True)
                raise
            except EvaluationError as error:
                self._study.failed(trial, str(error))
                self._reporter.note(f"trial {trial.number} failed ({knobs}): {error}")
                if (failed := failed + 1) > 3 + len(self._found.runs):
                    raise
                continue
            self._study.done(trial, run.score.goodput, run.model_dump(mode="json"))
            self._study.put("spent_s", self._meter.spent)
            self._found.runs.append(run)
            self._show(len(self._found.runs), begun, end)
        self._reporter.stage_done(f"{len(self._found.runs)} trials", self._best_note(self._found.comparable()))

    def _more_trials(self, done: int, end: float | None) -> bool:
        if self._stop():
            raise Interrupted("interrupted")
        if self._question.trials is not None and done >= self._question.trials:
            return False
        return done < 2 or self._meter.fits(end, self._run_guess())

    def _show(self, done: int, begun: float, end: float | None) -> None:
        note = self._best_note(self._found.comparable())
        shares, left = [], []
        if self._question.trials is not None:
            shares.append(done / self._question.trials)
            left.append((self._question.trials - done) * self._meter.typical(self._run_guess()))
        if end is not None and end > begun:
            shares.append((self._meter.spent - begun) / (end - begun))
            left.append(end - self._meter.spent)
        self._reporter.progress(
            min(1.0, max(shares, default=0.0)), f"{done} trials", note, max(0.0, min(left, default=0.0))
        )

    def _validate(self, setup: Setup, load: Workload) -> None:
        """The best few and the baseline under fresh seeds, seed by seed, so that all have met the same ones."""
        search = points(run for run in self._found.runs if run.stage == "search")
        chosen = candidates(search, self._baseline, setup.slo, CANDIDATES)
        end = self._schedule.until(CALIBRATION + SEARCH + VALIDATION)
        seeds: Sequence[int] = self._study.get("seeds")
        if end is None:
            rounds = _UNBOUNDED_SEEDS
        else:
            fitting = (end - self._meter.spent) / (len(chosen) * self._meter.typical(self._run_guess()))
            rounds = max(1, min(len(seeds), round(fitting)))
        total, done = rounds * len(chosen), 0
        self._found.validated = (0, total)
        self._reporter.stage("validating")
        for seed in seeds[:rounds]:
            for label, knobs in chosen:
                run = self._recorded("validation", label, knobs, load, setup, seed)
                done += 1
                self._found.validated = (done, total)
                if run is not None:
                    self._found.runs.append(run)
                left = (total - done) * self._meter.typical(self._run_guess())
                best = self._best_note(points(r for r in self._found.runs if r.stage == "validation"))
                self._reporter.progress(done / total, f"{done}/{total}", best, left)
        self._reporter.stage_done(f"{done}/{total}", self._best_note(self._found.comparable()))

    def _capacity(self, setup: Setup) -> None:
        """The balanced setting at other rates, up while it keeps the share and down while it does not, then in between."""
        choice = choose(self._found.comparable(), setup.slo)["balanced"]
        if self._question.rate is not None:
            kept = None if refuted(choice.point, setup.slo) else choice.point.rate
            self._found.capacity = Capacity(knobs=choice.knobs, rate=kept, tried=(choice.point,))
            return
        self._reporter.stage("capacity")
        tried = [choice.point]
        held, rate = highest_held(tried, setup.slo)
        self._found.capacity = Capacity(knobs=choice.knobs, rate=held, tried=tuple(tried))
        for step in range(_CAPACITY_STEPS):
            if step and not self._meter.fits(self._schedule.until(1.0), self._run_guess()):
                break
            rate = rounded(min(max(rate, setup.rate / 10), setup.most_rate))
            if any(p.rate == rate for p in tried):
                break
            load = setup.at(rate, self._question.workload, self._question.seed).apply(self._question.workload)
            run = self._recorded("capacity", "balanced", choice.knobs, load, setup, self._question.seed + 101 + step)
            if run is None:
                break
            self._found.runs.append(run)
            tried.append(point([run]))
            held, rate = highest_held(tried, setup.slo)
            self._found.capacity = Capacity(knobs=choice.knobs, rate=held, tried=tuple(tried))
            note = f"{tried[-1].attainment:.0%} in SLO at {tried[-1].offered_rate:.3g} req/s"
            self._reporter.progress((step + 1) / _CAPACITY_STEPS, f"{step + 1}/{_CAPACITY_STEPS}", note, None)
        self._reporter.stage_done(f"{len(tried) - 1} rates", "")

    # -- measuring ------------------------------------------------------------------------------------------------------

    def _recorded(self, stage: Stage, label: str, knobs: Knobs, load: Workload, setup: Setup, seed: int) -> Run | None:
        """A measurement outside the search: taken from the study if it is there, None if it failed."""
        key = f"run/{stage}/{knobs}/{load.rate:g}/{seed}"
        if (stored := self._study.get(key)) is not None:
            return Run.model_validate(stored)
        try:
            run = self._measure(stage, label, knobs, load, setup, seed, -1)
        except Interrupted:
            raise
        except EvaluationError as error:
            self._reporter.note(f"{stage} of {knobs} failed: {error}")
            return None
        self._study.put(key, run.model_dump(mode="json"))
        self._study.put("spent_s", self._meter.spent)
        return run

    def _measure(
        self, stage: Stage, label: str, knobs: Knobs, load: Workload, setup: Setup, seed: int, trial: int
    ) -> Run:
        begun = self._clock.now()
        self._serial += 1
        found = evaluate(
            self._engine,
            knobs,
            load,
            setup.slo,
            vocab_size=self._model.vocab_size,
            seed=seed,
            duration=setup.window_s,
            warmup=setup.warmup_s,
            prompt_seed=(self._question.seed << 20)
            + self._serial,  # other tokens each time: no prefix of an earlier run
            label=f"{stage}-{self._serial}",
            stop=self._stop,
            clock=self._clock,
        )
        self._meter.took(self._clock.now() - begun)
        return Run(stage=stage, label=label, trial=trial, score=found)

    def _run_guess(self) -> float:
        return self._schedule.window_s + 2 * self._schedule.warmup_s

    def _best_note(self, found: Sequence[Point]) -> str:
        if not found:
            return ""
        best = max(found, key=lambda p: p.goodput.mean).goodput
        return f"best {best.mean:.1f} ± {(best.high - best.low) / 2:.1f} req/s in SLO"
