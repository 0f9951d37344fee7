"""What every stage works with, and the one way it measures: on the hardware, once, kept in the study at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic
from uuid import uuid4

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.fingerprint import OtherWork
from autotune.profiling.findings import Findings, Question
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, Stage
from autotune.profiling.refit import cost_name
from autotune.profiling.reporting import Reporter
from autotune.profiling.study import RUN, SweepStudy, measured_run
from autotune.profiling.target import Measurement, OfferedLoad, ProfilingTarget, Simulates
from autotune.profiling.timing import Meter, Schedule
from runtime.clock import Clock


@dataclass(frozen=True)
class MeasurementRequest(Generic[SettingT]):
    """A measurement to be made: ``setting`` under the arrivals of ``rate`` and ``seed``.

    ``repeat`` tells apart measurements of one setting under one rate and seed.
    """

    stage: Stage
    setting: SettingT
    rate: float
    seed: int
    repeat: int = 0

    @property
    def key(self) -> str:
        """What the study keeps it under."""
        return f"{RUN}{self.stage}/{self.setting}/{self.rate:g}/{self.seed}/{self.repeat}"


@dataclass
class Context(Generic[SettingT, SetupT, CostT, SpaceT]):
    """One session's target, question, study and what it has found so far."""

    target: ProfilingTarget[SettingT, SetupT, CostT, SpaceT]
    question: Question[SpaceT]
    study: SweepStudy
    reporter: Reporter
    schedule: Schedule
    meter: Meter
    host: Clock
    found: Findings[SettingT, SetupT, CostT, SpaceT]
    stop: Callable[[], bool]
    warm: bool = False  # whether the engine has served such a load in this session
    session: str = field(default_factory=lambda: uuid4().hex[:8])  # whose time it is

    def check(self) -> None:
        """Raise :class:`Interrupted` if somebody asked to stop."""
        if self.stop():
            raise Interrupted("interrupted")

    def keep_time(self) -> None:
        self.study.spend(self.session, self.meter.own)
        if self.study.shared:  # other machines may be at work on it
            self.meter.others(**self.study.spent(but=self.session))

    def simulator(self, setup: SetupT) -> Simulates[SettingT]:
        """Of ``setup``'s load, by the cost model found."""
        assert self.found.cost is not None
        return self.target.simulator(self.found.cost, setup)

    @property
    def cost_name(self: Context) -> str:
        """Of the cost model that simulations go by."""
        assert self.found.cost is not None
        return cost_name(self.found.cost)

    def stored(self, key: str, setup: SetupT, find: Callable[[], SetupT]) -> SetupT:
        """What ``find`` makes of ``setup``, kept under ``key`` from then on: another time it might not come as far."""

        def simulated() -> dict[str, Any]:
            with self.meter.simulating():
                return find().model_dump(mode="json")

        found = type(setup).model_validate(self.study.measured(key, simulated, stop=self.stop))
        self.keep_time()
        return found

    def in_time(self, end: float | None, request: MeasurementRequest[SettingT]) -> bool:
        """Whether that fits before ``end`` seconds are spent. What the study has already always does."""
        return self.meter.fits(end, self.run_guess) or self.study.measurements.known(request.key)

    def within(self, share: float) -> Callable[[], bool]:
        """Says when ``share`` of the budget has been spent from now on."""
        budget = self.schedule.budget_s
        end = None if budget is None else self.meter.spent_s + share * budget
        return lambda: self.meter.late(end)

    @property
    def run_guess(self) -> float:
        """Seconds a measurement takes, before one has been made: warm-up, window, and as long a drain as the best trial had in
        simulation, where an SLO without a deadline waits for long answers; at least as long as the warm-up."""
        return self.schedule.window_s + self.schedule.warmup_s + max(self.schedule.warmup_s, self._simulated_drain())

    def decided(self, key: str, decide: Callable[[], bool]) -> bool:
        """What ``decide`` says of the time there is, kept under ``key``: who takes up the study goes the same way."""
        return bool(self.study.measured(key, lambda: {"yes": decide()}, stop=self.stop)["yes"])

    def measured(self, request: MeasurementRequest[SettingT], setup: SetupT, label: str) -> Run | None:
        """A measurement on the hardware: from the study if it is there, None if it failed."""
        stage, setting, key = request.stage, request.setting, request.key
        self.check()
        try:
            found = measured_run(
                self.study, key, lambda: self._measure(request, setup, label), setting, request.rate, self.stop
            )
        except Interrupted:
            raise
        except EvaluationError as error:
            failure = (stage, setting, str(error))
            if failure not in self.found.unmeasured:
                self.found.unmeasured.append(failure)
                self.reporter.note(f"{stage} of {setting} failed: {error}")
            return None
        self.keep_time()
        return self.found.measured.setdefault(key, found)

    def observe(
        self, request: MeasurementRequest[SettingT], setup: SetupT, label: str, learn: Callable[[Run], None]
    ) -> str | None:
        """Measure, have ``learn`` take in the run, and count how long both took; the cause where it failed.

        What is found in the study tells nothing of how long a measurement takes.
        """
        begun = self.meter.own
        run = self.measured(request, setup, label)
        if run is None:
            return next(why for _, setting, why in reversed(self.found.unmeasured) if setting == request.setting)
        learn(run)
        if (spent := self.meter.own)["hardware_s"] > begun["hardware_s"]:
            self.meter.took(sum(spent.values()) - sum(begun.values()))
        return None

    def recall(self) -> None:
        """Have in ``found`` what an earlier session measured and this one has not come to."""
        self._recall(lambda key: key.startswith(RUN))

    def earlier(self, rate: float) -> list[Run]:
        """What was measured to compare settings at ``rate`` before the study was extended. ``found`` has all of that time."""
        keys = self.study.earlier
        self._recall(keys.__contains__)
        known = [run for key, run in self.found.measured.items() if key in keys]
        return [run for run in known if run.stage == "validation" and run.score.rate == rate]

    def _recall(self, wanted: Callable[[str], bool]) -> None:
        for key, stored in self.study.measurements.results():
            if wanted(key):
                self.found.measured.setdefault(key, Run.model_validate(stored))

    def _simulated_drain(self) -> float:
        """Seconds from the end of the window until the last answer, of the best trial; 0 before there is one."""
        setup, trials = self.found.setup, self.found.simulated
        if setup is None or not trials:
            return 0.0
        objective = Objective.under(setup)
        best = max(trials, key=lambda run: objective.value(run.score)).score
        warmup, _ = self.simulator(setup).window(best.rate)
        return best.wall_s - warmup - best.window_s

    def _measure(self, request: MeasurementRequest[SettingT], setup: SetupT, label: str) -> Run:
        if not self.warm and not self.target.virtual:
            self._warm_up(request, setup)
        self.warm = True
        begun, work = self.target.clock.now(), OtherWork()
        load = OfferedLoad(request.rate, request.seed, setup.window_s, setup.warmup_s)
        found = self._served(request.setting, load, setup, f"{request.stage}-{self.study.count('measurements')}")
        if not self.target.virtual:
            self.found.others.append((self.target.clock.now() - begun, work.cores()))
        score = found.score.model_copy(update={"rate": request.rate})  # to the last digit: runs are compared by it
        return Run.of(request.setting, request.stage, label, score, steps=found.steps)

    def _warm_up(self, request: MeasurementRequest[SettingT], setup: SetupT) -> None:
        """Serve a load before the first measurement, which would hold what is slow once, and what is left to be collected."""
        self.reporter.progress(0.0, "", "warming up", None)
        gc.collect()
        load = self.target.warm_up(setup, request.rate, request.seed)
        try:
            self._served(request.setting, load, setup, f"warm-up-{self.study.count('warm-ups')}")
        except Interrupted:
            raise
        except EvaluationError:  # told of where it is measured
            self.reporter.progress(0.0, "", "the warm-up failed", None)

    def _served(self, setting: SettingT, load: OfferedLoad, setup: SetupT, label: str) -> Measurement:
        tokens = (self.question.seed << 20) + self.study.count("loads")
        with self.meter.hardware():
            return self.target.measure(setting, load, setup, prompt_seed=tokens, label=label, stop=self.stop)
