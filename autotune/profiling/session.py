"""One profiling run: calibrate, simulate, validate, find the capacity, recommend. Resumable at every step.

The hardware is asked once what its steps cost. Hundreds of settings are then tried in simulation, and only the best few are
measured. Everything measured goes into the study the moment it exists, under a key that says what it was. A second run of
the same command finds it there and goes on with what is missing.

Any :class:`autotune.engines.Engine` will do as the hardware: the live engine, or a simulated one in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.engines import Engine
from autotune.measure.evaluate import Interrupted
from autotune.profile.parts import ModelFacts
from autotune.profiling.findings import Findings, Question
from autotune.profiling.reporting import Reporter
from autotune.profiling.stages.calibrating import calibrate
from autotune.profiling.stages.capacity import find_capacity
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.settling import SETTLED, settle_rate, to_knee
from autotune.profiling.stages.simulating import simulate
from autotune.profiling.stages.twins import simulate_twins
from autotune.profiling.stages.validating import validate
from autotune.profiling.study import SweepStudy
from autotune.profiling.timing import Meter, Schedule
from runtime.clock import Clock, MonotonicClock


class Session:
    """Works on one study with one engine. ``stop`` is asked between and during measurements.

    ``host``: the clock that simulating takes its time by.
    """

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
        host = host or MonotonicClock()
        spent = study.get("spent") or {}
        self._context = Context(
            engine=engine,
            model=model,
            question=question,
            study=study,
            reporter=reporter,
            schedule=schedule or Schedule.of(question.budget_s),
            meter=Meter(engine.clock, host, **spent),
            clock=engine.clock,
            host=host,
            found=Findings(space=question.space),
            stop=stop or (lambda: False),
        )

    def run(self) -> Findings:
        """Go through the stages; whatever stops it, what was found by then is returned."""
        context, found = self._context, self._context.found
        try:
            if context.study.measurements.find(SETTLED) is not None:
                context.reporter.note("going on with the study of an earlier run; --fresh begins anew")
            found.setup = calibrate(context)
            space = context.question.space.narrowed(found.setup.fitted)
            context.reporter.stage("simulating")
            found.setup = settle_rate(context, found.setup, space)
            context.reporter.ready(found.setup)
            simulate(context, found.setup, space)
            found.setup = to_knee(context, found.setup, space)
            validate(context, found.setup)
            find_capacity(context, found.setup)
        except Interrupted:
            found.stopped = True
            context.recall()
        finally:
            simulate_twins(context)
            context.keep_time()
            found.hardware_s, found.simulating_s = context.meter.hardware_s, context.meter.simulating_s
        return found
