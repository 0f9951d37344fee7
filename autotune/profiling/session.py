"""One profiling run: calibrate, simulate, measure, choose. Resumable at every step.

The hardware is asked once what its steps or calls cost. Hundreds of settings are then tried in simulation, and only the best few
are measured. Everything measured goes into the study the moment it exists, under a key that says what it was. A second run of
the same command finds it there and goes on with what is missing.

Any :class:`autotune.profiling.target.ProfilingTarget` will do. :class:`Session` profiles an LLM engine, live or in virtual time;
:class:`autotune.profiling.callable.CallableSession` a callable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from autotune.engines import Engine
from autotune.measure.evaluate import Interrupted
from autotune.profile.parts import ModelFacts
from autotune.profiling.findings import Findings, Question
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.reporting import Reporter
from autotune.profiling.setup import Setup
from autotune.profiling.stages.calibrating import calibrate
from autotune.profiling.stages.capacity import find_capacity
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.engine_validation import simulate_paired, validate
from autotune.profiling.stages.rate import FOUND, find_rate, raise_rate
from autotune.profiling.stages.simulating import simulate
from autotune.profiling.study import SweepStudy
from autotune.profiling.target import EngineTarget, ProfilingTarget
from autotune.profiling.timing import Meter, Schedule
from runtime.clock import Clock, MonotonicClock
from runtime.errors import EngineClosedError


class Sweep(ABC, Generic[SettingT, SetupT, CostT, SpaceT]):
    """Works on one study of one target. ``stop`` is asked between and during measurements.

    ``host``: the clock that simulating takes its time by.
    """

    begun_with: str
    """What the study holds once there is something to go on with."""

    def __init__(
        self,
        target: ProfilingTarget[SettingT, SetupT, CostT, SpaceT],
        question: Question[SpaceT],
        study: SweepStudy,
        reporter: Reporter,
        schedule: Schedule,
        *,
        stop: Callable[[], bool] | None = None,
        host: Clock | None = None,
    ) -> None:
        host = host or MonotonicClock()
        self._context: Context[SettingT, SetupT, CostT, SpaceT] = Context(
            target=target,
            question=question,
            study=study,
            reporter=reporter,
            schedule=schedule,
            meter=Meter(target.clock, host, **study.spent()),
            host=host,
            found=Findings(space=question.space),
            stop=stop or (lambda: False),
        )

    def run(self) -> Findings[SettingT, SetupT, CostT, SpaceT]:
        """Go through the stages; what stops it, or an engine that closes, has what was found by then returned."""
        context, found = self._context, self._context.found
        try:
            if context.study.measurements.find(self.begun_with) is not None:
                context.reporter.note("resuming the study of an earlier run; --fresh begins anew")
            found.setup = calibrate(context)
            context.reporter.stage("simulating")
            found.setup = self._at_rate(found.setup)
            simulate(context, found.setup)
            self._measure(found.setup)
        except (Interrupted, EngineClosedError) as error:
            found.stopped = True
            context.recall()
            found.setup = _last_compared(found)
            if isinstance(error, EngineClosedError):
                found.fault = " ".join(str(error).split())
        finally:
            self._end()
            context.keep_time()
            found.hardware_s, found.simulating_s = context.meter.hardware_s, context.meter.simulating_s
        return found

    @abstractmethod
    def _at_rate(self, setup: SetupT) -> SetupT:
        """``setup`` at the rate where settings are compared."""

    @abstractmethod
    def _measure(self, setup: SetupT) -> None:
        """Measure the best of what was simulated, each through ``context.measured``."""

    def _end(self) -> None:
        """What is still to be found when measuring has ended, or was stopped."""


def _last_compared(found: Findings[SettingT, SetupT, CostT, SpaceT]) -> SetupT | None:
    """The setup, at the rate of the latest comparison: one at another rate has only begun where nothing was measured at it."""
    rates = [run.score.rate for run in found.runs if run.stage == "validation"]
    if found.setup is None or not rates or found.setup.rate in rates:
        return found.setup
    return found.setup.model_copy(update={"rate": rates[-1]})


class Session(Sweep):
    """Profiles an LLM engine. Its rate is looked for in simulation, and its settings are measured where the posterior has most to
    gain; then its capacity is looked for."""

    begun_with = FOUND

    def __init__(
        self,
        engine: Engine,
        model: ModelFacts,
        question: Question,
        study: SweepStudy,
        reporter: Reporter,
        *,
        stop: Callable[[], bool] | None = None,
        schedule: Schedule | None = None,
        host: Clock | None = None,
    ) -> None:
        target = EngineTarget(engine, model, question.workload)
        # the requests of a finite workload might not last for longer windows
        short = question.rate is None or question.workload.finite
        schedule = schedule or Schedule.of(question.budget_s, capacity=short)
        super().__init__(target, question, study, reporter, schedule, stop=stop, host=host)

    def _at_rate(self, setup: Setup) -> Setup:
        found = find_rate(self._context, setup, self._context.question.space.narrowed(setup.fitted))
        self._context.reporter.ready(found)
        return found

    def _measure(self, setup: Setup) -> None:
        context, found = self._context, self._context.found
        setup = raise_rate(context, setup, context.question.space.narrowed(setup.fitted))
        found.setup = setup
        validate(context, setup)
        find_capacity(context, found.setup)

    def _end(self) -> None:
        simulate_paired(self._context)
