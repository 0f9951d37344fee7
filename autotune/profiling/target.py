"""What is profiled: it can be calibrated, simulated and measured. The stages know nothing else of it.

:class:`ProfilingTarget` is the protocol and :class:`EngineTarget` an LLM engine behind it, live or in virtual time. What another
kind of thing to profile needs is its own calibration, its own simulator and its own space, not its own stages: see
:mod:`autotune.profiling.callable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

from autotune.cost.model import CostModel
from autotune.engines import Engine
from autotune.engines.defaults import VLLM_LABEL
from autotune.measure.evaluate import evaluate, recorded
from autotune.measure.score import Score
from autotune.profile.fingerprint import OtherWork
from autotune.profile.parts import CostFacts, ModelFacts, StepPoint
from autotune.profiling.calibrate import draw_setup, request_alone
from autotune.profiling.findings import Findings, Question
from autotune.profiling.kinds import CostT, SettingT, SettingT_contra, SetupT, SpaceT
from autotune.profiling.points import Run
from autotune.profiling.search import Space
from autotune.profiling.setup import Setup, balanced_seeds, most_rate
from autotune.profiling.simulator import Simulator
from autotune.profiling.space import NEAR_BEST, alike, starting_points
from autotune.profiling.steps import measure_steps, served_points
from autotune.profiling.study import SweepStudy
from autotune.profiling.timing import Meter, Schedule
from autotune.profiling.warnings import warnings
from autotune.workload import Workload
from runtime.clock import Clock
from runtime.knobs import Knobs

_CALIBRATION = "calibration"
_LEAST = 4  # trials beside the starting points
_UNSEEN = 1 << 16  # to the seed of a load nobody measures


class OfferedLoad(NamedTuple):
    """What a measurement serves: ``rate`` requests/s drawn by ``seed``, counted for ``window_s`` behind ``warmup_s``."""

    rate: float
    seed: int
    window_s: float
    warmup_s: float


class Measurement(NamedTuple):
    """What a measurement found; ``steps``: one point for each kind, empty where there are no step records."""

    score: Score
    steps: tuple[StepPoint, ...] = ()


class Calibrated(NamedTuple, Generic[SetupT, CostT]):
    """What steps or calls cost, and the load that follows from it.

    ``steps``: one point for each kind, empty where there are no step records. ``others``: seconds, and the cores that other
    programs used meanwhile. ``amount``, ``note``: how much was measured and how well it fits, in words; ``warnings``: reasons
    to measure again.
    """

    setup: SetupT
    cost: CostT
    amount: str
    note: str
    steps: Sequence[StepPoint] = ()
    others: Sequence[tuple[float, float]] = ()
    warnings: Sequence[str] = ()


class Proposals(NamedTuple, Generic[SettingT]):
    """What to simulate: ``trials`` settings, first the ``starting`` ones, then what is proposed in ``space`` (None: nothing).

    ``least``: of them, however late it is.
    """

    starting: Sequence[tuple[str, SettingT]]
    space: Space[SettingT] | None
    trials: int
    least: int


class Simulates(Protocol[SettingT_contra]):
    """A target's counterpart in virtual time, by a cost model and at a speed. Picklable."""

    def window(self, rate: float) -> tuple[float, float]:
        """(warm-up, window) of :meth:`long`, s."""
        ...

    def long(
        self, setting: SettingT_contra, rate: float, seed: int, *, stop: Callable[[], bool] | None = None
    ) -> Score:
        """Under as many requests as tell settings apart."""
        ...

    def paired(self, run: Run) -> Run:
        """The simulation of the very requests that ``run`` measured."""
        ...


class ProfilingTarget(Protocol[SettingT, SetupT, CostT, SpaceT]):
    """What the stages work with. ``unit``: of a rate, in words; ``baseline``: the label of the setting others are compared with.

    ``virtual``: it lives in virtual time, so nothing warms up and nobody disturbs it.
    """

    clock: Clock
    virtual: bool
    unit: str
    baseline: str

    def alike(self, a: SettingT, b: SettingT, /) -> bool:
        """Whether two settings are so nearly the same that only one of them is worth a measurement."""
        ...

    def calibrated(self, study: SweepStudy) -> bool:
        """Whether ``study`` holds a calibration, so that none is measured."""
        ...

    def calibrate(
        self,
        question: Question[SpaceT],
        study: SweepStudy,
        schedule: Schedule,
        meter: Meter,
        *,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> Calibrated[SetupT, CostT]:
        """What its steps or calls cost, and the load and the SLO that follow from that. What is measured is kept in ``study``."""
        ...

    def proposals(self, question: Question[SpaceT], setup: SetupT, cost: CostT) -> Proposals[SettingT]:
        """The settings to simulate."""
        ...

    def simulator(self, cost: CostT, setup: SetupT) -> Simulates[SettingT]:
        """It under ``setup``'s load in virtual time, by ``cost`` and at the speed that ``setup`` says."""
        ...

    def warm_up(self, setup: SetupT, rate: float, seed: int) -> OfferedLoad:
        """What it serves before it is first measured at ``rate``, under a seed that no measurement has."""
        ...

    def measure(
        self,
        setting: SettingT,
        load: OfferedLoad,
        setup: SetupT,
        *,
        prompt_seed: int,
        label: str,
        stop: Callable[[], bool],
    ) -> Measurement:
        """Serve ``load`` under ``setting``. Raises :class:`~autotune.measure.evaluate.EvaluationError` or ``Interrupted``."""
        ...


class EngineTarget:
    """An engine that serves a language model, under the lengths and arrivals of ``workload``."""

    unit = "req/s"
    baseline = VLLM_LABEL
    alike = staticmethod(alike)

    def __init__(self, engine: Engine, model: ModelFacts, workload: Workload) -> None:
        self._engine, self._model, self._workload = engine, model, workload
        self.virtual = engine.capabilities.virtual_time
        self.clock = engine.clock

    def calibrated(self, study: SweepStudy) -> bool:
        return study.measurements.find(_CALIBRATION) is not None

    def calibrate(
        self,
        question: Question,
        study: SweepStudy,
        schedule: Schedule,
        meter: Meter,
        *,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> Calibrated:
        """As in :class:`ProfilingTarget`; all of it is one measurement."""

        def measure() -> dict[str, Any]:
            work = OtherWork()
            setup, steps, cost = self._measure_steps(question, schedule, meter, stop, advance)
            return {
                "setup": setup.model_dump(mode="json"),
                "steps": [point.model_dump(mode="json") for point in steps],
                "cost": cost.facts.model_dump(mode="json"),
                "others": None if self.virtual else work.cores(),
            }

        most_rate(
            question.workload, question.seed, schedule.window_s
        )  # raises for too few requests: now, not when it is measured
        stored = study.measured(_CALIBRATION, measure, stop=stop)
        steps = [StepPoint.model_validate(point) for point in stored["steps"]]
        cost = CostModel(CostFacts.model_validate(stored["cost"]))
        setup = Setup.model_validate(stored["setup"])
        found = Findings(space=question.space, setup=setup, steps=steps, cost=cost)
        if (others := stored.get("others")) is not None:
            found.others.append((cost.facts.seconds, others))
        return Calibrated(
            setup=setup,
            cost=cost,
            amount=f"{sum(point.repeats for point in steps)} steps",
            note=f"{cost.facts.points} kinds, fit error {cost.facts.error:.1%}",
            steps=steps,
            others=found.others,
            warnings=warnings(found),
        )

    def _measure_steps(
        self,
        question: Question,
        schedule: Schedule,
        meter: Meter,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> tuple[Setup, list[StepPoint], CostModel]:
        engine, model, seed = self._engine, self._model, question.seed
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
                slo=question.slo,
                classes=question.classes,
                objective=question.objective,
                rate=question.rate,
                window_s=schedule.window_s,
                warmup_s=schedule.warmup_s,
            )
        return setup, measured.points, cost

    def proposals(self, question: Question, setup: Setup, cost: CostModel) -> Proposals[Knobs]:
        """Defaults of other engines, the calibration's guess and the best near it; then what TPE makes of those."""
        space = question.space.narrowed(setup.fitted)
        starting = starting_points(space, setup.fitted)
        starting.sort(
            key=lambda named: not question.space.allows(named[1])
        )  # where trials are few, those that may be chosen
        known = {knobs for _, knobs in starting}
        starting += [(NEAR_BEST, knobs) for knobs in setup.candidates if knobs not in known]
        return Proposals(starting, space, question.sim_trials, len(starting) + _LEAST)

    def simulator(self, cost: CostModel, setup: Setup) -> Simulator:
        return Simulator.of(cost, self._engine, self._workload, setup)

    def warm_up(self, setup: Setup, rate: float, seed: int) -> OfferedLoad:
        """A load like that of the measurement: it gets faster while its libraries meet the shapes of their products, and the
        calibration's steps have few of them."""
        load = setup.model_copy(update={"rate": rate}).apply(self._workload)
        (seed,) = balanced_seeds(load, seed + _UNSEEN, 1, setup.warmup_s, setup.window_s)
        return OfferedLoad(rate, seed, setup.window_s, setup.warmup_s)

    def measure(
        self, setting: Knobs, load: OfferedLoad, setup: Setup, *, prompt_seed: int, label: str, stop: Callable[[], bool]
    ) -> Measurement:
        """As in :class:`ProfilingTarget`. ``prompt_seed``: tokens of its own each time, so that no prefix of an earlier
        load is found."""
        with recorded(self._engine) as log:
            score = evaluate(
                self._engine,
                setting,
                setup.model_copy(update={"rate": load.rate}).apply(self._workload),
                setup.slo,
                vocab_size=self._model.vocab_size,
                seed=load.seed,
                duration=load.window_s,
                warmup=load.warmup_s,
                prompt_seed=prompt_seed,
                label=label,
                stop=stop,
                classes=setup.classes,
            )
        return Measurement(score, served_points(log.steps, self._engine.facts.graphs))
