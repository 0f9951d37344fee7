"""What every stage works with, and the one way it measures: on the hardware, once, kept in the study at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError, Interrupted, evaluate
from autotune.measure.score import Score
from autotune.profile.fingerprint import OtherWork
from autotune.profile.parts import ModelFacts
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import Run, Stage
from autotune.profiling.reporting import Reporter
from autotune.profiling.setup import Setup, balanced_seeds
from autotune.profiling.simulator import Simulator
from autotune.profiling.study import SweepStudy
from autotune.profiling.timing import Meter, Schedule
from autotune.workload import Workload
from runtime.clock import Clock
from runtime.knobs import Knobs

_UNSEEN = 1 << 16  # to the seed of a load nobody measures


@dataclass(frozen=True)
class Asked:
    """A measurement to be made: ``knobs`` under the arrivals of ``rate`` requests/s and ``seed``.

    ``repeat`` tells apart measurements of one setting under one rate and seed.
    """

    stage: Stage
    knobs: Knobs
    rate: float
    seed: int
    repeat: int = 0

    @property
    def key(self) -> str:
        """What the study keeps it under."""
        return f"run/{self.stage}/{self.knobs}/{self.rate:g}/{self.seed}/{self.repeat}"


@dataclass
class Context:
    """One session's engine, question, study and what it has found so far."""

    engine: Engine
    model: ModelFacts
    question: Question
    study: SweepStudy
    reporter: Reporter
    schedule: Schedule
    meter: Meter
    clock: Clock  # the hardware's
    host: Clock
    found: Findings
    stop: Callable[[], bool]
    warm: bool = False  # whether the engine has served such a load in this session

    def check(self) -> None:
        """Raise :class:`Interrupted` if somebody asked to stop."""
        if self.stop():
            raise Interrupted("interrupted")

    def keep_time(self) -> None:
        self.study.put("spent", {"hardware_s": self.meter.hardware_s, "simulating_s": self.meter.simulating_s})

    def simulator(self, setup: Setup) -> Simulator:
        """Of ``setup``'s load on this engine, by the cost model found."""
        assert self.found.cost is not None
        return Simulator.of(self.found.cost, self.engine, self.question.workload, setup)

    def settled(self, key: str, settle: Callable[[], Setup]) -> Setup:
        """What ``settle`` finds in simulation, kept under ``key`` from then on: another time it might not come as far."""

        def simulated() -> dict[str, Any]:
            with self.meter.simulating():
                return settle().model_dump(mode="json")

        found = Setup.model_validate(self.study.measured(key, simulated, stop=self.stop))
        self.keep_time()
        return found

    def in_time(self, end: float | None, asked: Asked) -> bool:
        """Whether that fits before ``end`` seconds are spent. What the study has already always does."""
        return self.meter.fits(end, self.run_guess) or self.study.measurements.known(asked.key)

    def within(self, share: float) -> Callable[[], bool]:
        """Says when ``share`` of the budget has been spent from now on."""
        budget = self.schedule.budget_s
        end = None if budget is None else self.meter.spent_s + share * budget
        return lambda: self.meter.late(end)

    @property
    def run_guess(self) -> float:
        """Seconds a measurement takes, before one has been made."""
        return self.schedule.window_s + 2 * self.schedule.warmup_s

    def decided(self, key: str, decide: Callable[[], bool]) -> bool:
        """What ``decide`` says of the time there is, kept under ``key``: who takes up the study goes the same way."""
        return bool(self.study.measured(key, lambda: {"yes": decide()}, stop=self.stop)["yes"])

    def measured(self, asked: Asked, setup: Setup, label: str) -> Run | None:
        """A measurement on the hardware: from the study if it is there, None if it failed."""
        stage, knobs, key = asked.stage, asked.knobs, asked.key
        self.check()
        try:
            found = self.study.measured(
                key,
                lambda: self._measure(asked, setup, label).model_dump(mode="json"),
                stop=self.stop,
                params={**knobs.as_dict(), "rate": asked.rate},
                value=lambda run: run["score"]["goodput"],
            )
        except Interrupted:
            raise
        except EvaluationError as error:
            failure = (stage, knobs, str(error))
            if failure not in self.found.unmeasured:
                self.found.unmeasured.append(failure)
                self.reporter.note(f"{stage} of {knobs} failed: {error}")
            return None
        self.keep_time()
        return self.found.measured.setdefault(key, Run.model_validate(found))

    def recall(self) -> None:
        """Have in ``found`` what an earlier session measured and this one has not come to."""
        for key, stored in self.study.measurements.results():
            if key.startswith("run/"):
                self.found.measured.setdefault(key, Run.model_validate(stored))

    def _measure(self, asked: Asked, setup: Setup, label: str) -> Run:
        if not self.warm and not self.engine.capabilities.virtual_time:
            self._warm_up(asked, setup)
        self.warm = True
        begun, work = self.clock.now(), OtherWork()
        found = self._served(asked, setup, f"{asked.stage}-{self.study.count('measurements')}")
        if not self.engine.capabilities.virtual_time:
            self.found.others.append((self.clock.now() - begun, work.cores()))
        found = found.model_copy(update={"rate": asked.rate})  # as asked, to the last digit: runs are compared by it
        return Run(stage=asked.stage, label=label, trial=-1, score=found)

    def _warm_up(self, asked: Asked, setup: Setup) -> None:
        """Have the engine serve a load like that ``asked`` for.

        It gets faster while its libraries meet the shapes of their products; the calibration's steps have few of them.
        """
        self.reporter.progress(0.0, "", "warming up", None)
        load = self._load(asked, setup)
        (seed,) = balanced_seeds(load, asked.seed + _UNSEEN, 1, setup.warmup_s, setup.window_s)
        self._served(replace(asked, seed=seed), setup, f"warm-up-{self.study.count('warm-ups')}")

    def _load(self, asked: Asked, setup: Setup) -> Workload:
        return setup.model_copy(update={"rate": asked.rate}).apply(self.question.workload)

    def _served(self, asked: Asked, setup: Setup, label: str) -> Score:
        """The load ``asked`` for, served."""
        with self.meter.hardware():
            return evaluate(
                self.engine,
                asked.knobs,
                self._load(asked, setup),
                setup.slo,
                vocab_size=self.model.vocab_size,
                seed=asked.seed,
                duration=setup.window_s,
                warmup=setup.warmup_s,
                # tokens of its own each time: no prefix of an earlier load is found
                prompt_seed=(self.question.seed << 20) + self.study.count("loads"),
                label=label,
                stop=self.stop,
            )
