"""What is profiled: it can be calibrated, simulated and measured. The stages know nothing else of it.

:class:`Target` is the protocol and :class:`EngineTarget` an LLM engine behind it, live or in virtual time. What another kind of
thing to profile needs is its own calibration and its own simulator, not its own stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from autotune.cost.model import CostModel
from autotune.engines import Engine
from autotune.measure.evaluate import Recorder, evaluate
from autotune.measure.score import Score
from autotune.profile.parts import ModelFacts, StepPoint
from autotune.profiling.calibrate import draw_setup, request_alone
from autotune.profiling.points import Run
from autotune.profiling.setup import Setup
from autotune.profiling.simulator import Simulator
from autotune.profiling.steps import measure_steps, served_points
from autotune.profiling.timing import Meter, Schedule
from autotune.workload import Workload
from runtime.clock import Clock
from runtime.knobs import Knobs
from runtime.slo import SLO


class Load(NamedTuple):
    """What a measurement serves: ``rate`` requests/s drawn by ``seed``, counted for ``window_s`` behind ``warmup_s``."""

    rate: float
    seed: int
    window_s: float
    warmup_s: float


class Measured(NamedTuple):
    """What a measurement found; ``steps``: one point for each kind, empty where there are no step records."""

    score: Score
    steps: tuple[StepPoint, ...] = ()


class Calibrated(NamedTuple):
    """What steps cost, and the load that follows from it."""

    setup: Setup
    steps: list[StepPoint]
    cost: CostModel


class Simulates(Protocol):
    """A target's counterpart in virtual time, by a cost model and at a speed."""

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data that tells what it simulates from what another machine would."""
        ...

    def window(self, rate: float) -> tuple[float, float]:
        """(warm-up, window) of :meth:`long`, s."""
        ...

    def long(self, knobs: Knobs, rate: float, seed: int, *, stop: Callable[[], bool] | None = None) -> Score:
        """Under as many requests as tell settings apart."""
        ...

    def paired(self, run: Run) -> Run:
        """The simulation of the very requests that ``run`` measured."""
        ...


class Target(Protocol):
    """What the stages work with. ``virtual``: it lives in virtual time, so nothing warms up and nobody disturbs it."""

    clock: Clock
    virtual: bool

    def calibrate(
        self,
        schedule: Schedule,
        meter: Meter,
        *,
        slo: SLO | None,
        rate: float | None,
        seed: int,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> Calibrated:
        """Measure what its steps cost, and draw the load and the SLO from that (``slo``, ``rate``: as the user gave them)."""
        ...

    def simulator(self, cost: CostModel, setup: Setup) -> Simulates:
        """It under ``setup``'s load in virtual time, by ``cost`` at ``setup.speed``. Picklable."""
        ...

    def measure(
        self, knobs: Knobs, load: Load, setup: Setup, *, prompt_seed: int, label: str, stop: Callable[[], bool]
    ) -> Measured:
        """Serve ``load`` under ``knobs``. Raises :class:`~autotune.measure.evaluate.EvaluationError` or ``Interrupted``."""
        ...


class EngineTarget:
    """An engine that serves a language model, under the lengths and arrivals of ``workload``."""

    def __init__(self, engine: Engine, model: ModelFacts, workload: Workload) -> None:
        self._engine, self._model, self._workload = engine, model, workload
        self.virtual = engine.capabilities.virtual_time
        self.clock = engine.clock

    def calibrate(
        self,
        schedule: Schedule,
        meter: Meter,
        *,
        slo: SLO | None,
        rate: float | None,
        seed: int,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> Calibrated:
        engine, model = self._engine, self._model
        with meter.hardware():
            begun = self.clock.now()
            alone = request_alone(engine, model, seed=seed, stop=stop)
            spent = self.clock.now() - begun
            advance(0.05, f"alone: {alone.tpot * 1000:.1f} ms a token")
            measured = measure_steps(
                engine,
                model,
                budget_s=max(schedule.calibrate_s - spent, schedule.calibrate_s / 2),
                seed=seed,
                stop=stop,
                advance=lambda share, note: advance(0.05 + 0.95 * share, note),
            )
            spent = self.clock.now() - begun
        with meter.simulating():
            cost = measured.cost(spent)
            setup = draw_setup(
                engine,
                model,
                self._workload,
                cost.serving(),
                alone,
                seed=seed,
                slo=slo,
                rate=rate,
                window_s=schedule.window_s,
                warmup_s=schedule.warmup_s,
            )
        return Calibrated(setup, measured.points, cost)

    def simulator(self, cost: CostModel, setup: Setup) -> Simulator:
        return Simulator.of(cost, self._engine, self._workload, setup)

    def measure(
        self, knobs: Knobs, load: Load, setup: Setup, *, prompt_seed: int, label: str, stop: Callable[[], bool]
    ) -> Measured:
        """As in :class:`Target`. ``prompt_seed``: tokens of its own each time, so that no prefix of an earlier load is found."""
        log = Recorder()
        unsubscribe = self._engine.subscribe(log)
        try:
            score = evaluate(
                self._engine,
                knobs,
                setup.model_copy(update={"rate": load.rate}).apply(self._workload),
                setup.slo,
                vocab_size=self._model.vocab_size,
                seed=load.seed,
                duration=load.window_s,
                warmup=load.warmup_s,
                prompt_seed=prompt_seed,
                label=label,
                stop=stop,
            )
        finally:
            unsubscribe()
        return Measured(score, served_points(log.steps))
