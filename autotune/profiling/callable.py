"""A callable in a batcher as what is profiled: its calibration, its simulator, its settings, and which of them may be measured.

The rest is as for an LLM engine (:mod:`autotune.profiling.session`): one study, one search in simulation, one validation. A
callable has no KV pool and no steps to fit a cost model to; its load follows from the calibration, so no rate is looked for.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from autotune.engines import Engine, callable_source
from autotune.measure.evaluate import Interrupted, evaluate
from autotune.measure.score import Score
from autotune.profile import Machine
from autotune.profile.callable import MOST_RATE, BatcherSetting, CallablePoint, items_per_s, why_rate
from autotune.profile.fingerprint import package_version
from autotune.profiling.batcher_space import ONE_AT_A_TIME, OPEN, BatcherSpace, alike, choose, grid
from autotune.profiling.calls import CallCost, calibrated, measure_calls
from autotune.profiling.findings import Findings, Question
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, by_setting, callable_points
from autotune.profiling.reporting import Reporter
from autotune.profiling.session import Sweep
from autotune.profiling.setup import Comparison, balanced_seeds
from autotune.profiling.simulator import PAIRED
from autotune.profiling.stages.candidates import Candidate, around, candidate, stored_candidates
from autotune.profiling.stages.validation import Validation
from autotune.profiling.study import SweepStudy
from autotune.profiling.subject import Subject
from autotune.profiling.target import Calibrated, Measurement, OfferedLoad, Proposals
from autotune.profiling.timing import CALIBRATE_S, Meter, Schedule
from autotune.simulate.batcher import SimulatedBatcher
from autotune.workload import Workload, parse_workload
from runtime.batching.groupings import Grouping
from runtime.batching.item import Call
from runtime.clock import Clock, MonotonicClock
from runtime.errors import InputError
from runtime.slo import SLO
from runtime.version import __version__

ITEMS: Workload = parse_workload("poisson:rate=1,prompt=1,output=1")
"""Poisson arrivals; the number in each prompt says which of the inputs comes."""

RATE_SHARE = 0.8
"""Of what the callable can do by its calibration: near enough to the limit for settings to differ."""

_CALIBRATING, _SIMULATING = 0.15, 0.15  # of the budget
SIMULATED_WARM_UP = 0.1  # of a simulated window
_SIMULATED_ITEMS = 2000
_SLO_CALLS = 10  # the SLO in calls of one item, unless it is given
_MEASURED, _RUNS = 4, 2  # settings, unless a number is requested, and runs that windows are sized for of each
_SEEDS = 6  # to measure under
_FEWEST_ITEMS, _MANY_ITEMS = 2.0, 50.0  # in a window on average: fewer tell nothing; of so many any window will do
_SHORT_S = 5.0  # to measure a setting: where there is less, fewer are
_SHORTEST_S, _LONGEST_S, _UNBOUNDED_S = 0.5, 60.0, 6.0  # of a window; the latter where there is no budget
_SIMULATED_SEED, _FRESH_SEED, _MEASURED_SEED = 1_000_003, 1_500_003, 2_000_003  # to the seed of the question
_UNSEEN = 1 << 16  # to the seed of a load nobody measures


class CallableSetup(Comparison):
    """What the calibration of a callable decided. ``capacity``: items/s in calls of ``capacity_size``."""

    capacity: float
    capacity_size: int

    @property
    def e2e_ms(self) -> float:
        """The one target of the SLO."""
        assert self.slo.e2e_ms is not None
        return self.slo.e2e_ms


CallableQuestion: TypeAlias = Question[BatcherSpace]
CallableFindings: TypeAlias = Findings[BatcherSetting, CallableSetup, CallCost, BatcherSpace]


def ranked(found: CallableFindings) -> list[CallablePoint]:
    """The best setting first: of those measured, else of those simulated."""
    assert found.setup is not None
    failed = {setting for _, setting, _ in found.unmeasured}
    measured = [p for p in callable_points(found.runs) if p.offered and p.setting not in failed]
    order = Objective.under(found.setup).ranked(measured or callable_points(found.simulated))
    chosen = found.choice()[0] if found.expected else None
    return sorted(order, key=lambda p: p.setting != chosen)


def identity(
    subject: Subject, question: CallableQuestion, inputs: Path, machine: Machine, *, replicas: int = 1
) -> dict[str, Any]:
    """What a study is about: only a run that asks the same goes on with it. The function counts as changed when a file of it
    has; PyTorch counts where the function has brought it along."""
    return {
        "function": subject.name,
        "files of the function": _digest(subject.sources),
        "inputs": _digest([inputs]),
        "cost": subject.cost_name,
        "slo": None if question.slo is None else str(question.slo),
        "rate": question.rate,
        "budget": f"{question.budget_s:g}s",
        "most": question.space.most,
        "replicas": replicas,
        "strategies": list(question.space.strategies),
        "seed": question.seed,
        "machine": machine.model_dump(mode="json", include={"cpu", "cores", "flags", "threads"}),
        "gpu": None if machine.gpu is None else machine.gpu.name,
        "autotune": __version__,
        **({"torch": package_version("torch")} if "torch" in sys.modules else {}),
    }


# -- the target -----------------------------------------------------------------------------------------------------------


class CallableTarget:
    """``subject`` behind a batcher with so many ``replicas``, which call it at a time."""

    virtual = False
    unit = "items/s"
    baseline = "as it comes"
    alike = staticmethod(alike)

    def __init__(self, subject: Subject, replicas: int = 1, clock: Clock | None = None) -> None:
        self.subject, self.replicas = subject, replicas
        self.clock = clock or MonotonicClock()

    def calibrated(self, study: SweepStudy) -> bool:
        return calibrated(study)

    def calibrate(
        self,
        question: CallableQuestion,
        study: SweepStudy,
        schedule: Schedule,
        meter: Meter,
        *,
        stop: Callable[[], bool],
        advance: Callable[[float, str], None],
    ) -> Calibrated[CallableSetup, CallCost]:
        """As in :class:`~autotune.profiling.target.ProfilingTarget`; the calls of each size are one measurement."""
        slo = question.slo
        if question.rate is not None:  # raises for too few items: now, not when all is measured
            measured_seeds(question.seed, question.rate, schedule)
        with meter.hardware():
            cost = measure_calls(
                self.subject,
                study,
                seed=question.seed,
                budget_s=schedule.calibrate_s,
                most=question.space.calibrated_to,
                workers=self.replicas,
                longest_s=None if slo is None or slo.e2e_ms is None else slo.e2e_ms / 1e3,
                stop=stop,
                progress=advance,
                clock=self.clock.now,
            )
        setup = draw_setup(self.subject, question, cost, schedule)
        return Calibrated(
            setup=setup,
            cost=cost,
            amount=f"{cost.largest} items",
            note=f"fit error {cost.error:.1%}, up to {items_per_s(setup.capacity)}",
        )

    def proposals(self, question: CallableQuestion, setup: CallableSetup, cost: CallCost) -> Proposals[BatcherSetting]:
        """The baselines, then the whole grid, which is small; nothing is proposed beyond it."""
        subject = self.subject
        settings = grid(
            question.space.strategies,
            largest=cost.largest,
            slack_ms=setup.e2e_ms - cost.seconds(1, subject.mean_cost) * 1e3,
            mean_cost=subject.mean_cost if subject.costs_vary else None,
            seed=question.seed,
            workers=self.replicas,
        )
        baselines = [ONE_AT_A_TIME]
        if "adaptive" in question.space.strategies:
            free = question.space.as_it_comes
            baselines.insert(0, free)
            if self.replicas == 1:  # no window makes a difference
                settings = [
                    one for one in settings if one._replace(knobs=one.knobs.with_(max_wait_ms=OPEN.max_wait_ms)) != free
                ]
        starting = [(label(setting, question.space), setting) for setting in dict.fromkeys([*baselines, *settings])]
        return Proposals(starting, None, len(starting), len(baselines))

    def simulator(self, cost: CallCost, setup: CallableSetup) -> CallSimulator:
        return CallSimulator(
            cost.at_speed(setup.speed), self.subject.costs, setup.slo, setup.warmup_s, self.subject.grouping
        )

    def warm_up(self, setup: CallableSetup, rate: float, seed: int) -> OfferedLoad:
        """Half a second, for whatever is slow once."""
        return OfferedLoad(rate, seed + _UNSEEN, _SHORTEST_S, 0.0)

    def measure(
        self,
        setting: BatcherSetting,
        load: OfferedLoad,
        setup: CallableSetup,
        *,
        prompt_seed: int,
        label: str,
        stop: Callable[[], bool],
    ) -> Measurement:
        """As in :class:`~autotune.profiling.target.ProfilingTarget`, by a batcher of its own. The inputs follow from the seed of
        ``load``, so ``prompt_seed`` says nothing."""
        del prompt_seed
        options = {
            "slo": setup.slo,
            "cost": self.subject.cost,
            "grouping": self.subject.new_grouping(),
            "collate": self.subject.collate,
            "strategy": setting.strategy,
            "replicas": self.replicas,
        }
        engine = callable_source(self.subject.function, self.subject.inputs, options).start(setting.knobs)
        try:
            found = offered_to(engine, len(self.subject.inputs), load, setup.slo, label=label, stop=stop)
        finally:
            engine.close(drain=False)
        return Measurement(found)


def label(setting: BatcherSetting, space: BatcherSpace) -> str:
    """What runs of it are called."""
    return CallableTarget.baseline if setting == space.as_it_comes else str(setting)


def draw_setup(subject: Subject, question: CallableQuestion, cost: CallCost, schedule: Schedule) -> CallableSetup:
    """The SLO and the rate, as given or from the calibration."""
    slo, slo_from = question.slo, "given"
    if slo is None:
        one = cost.seconds(1, subject.mean_cost) * 1e3
        slo = SLO(e2e_ms=max(20.0, _rounded_up(_SLO_CALLS * one)))
        slo_from = f"{_SLO_CALLS} times a call of one item, and at least 20 ms"
    assert slo.e2e_ms is not None
    # An item waits for the call before its own: a size serves all comers only if two calls fit the SLO.
    capacity, size = cost.capacity(subject.mean_cost, slo.e2e_ms / 2e3)
    rate = float(f"{question.rate or min(RATE_SHARE * capacity, MOST_RATE):.4g}")
    return CallableSetup(
        rate=rate,
        rate_from="calibration" if question.rate is None else "user",
        slo=slo,
        slo_from=slo_from,
        window_s=schedule.window_s,
        warmup_s=schedule.warmup_s,
        validation_seeds=measured_seeds(question.seed, rate, schedule),
        simulated_seeds=(question.seed + _SIMULATED_SEED, question.seed + _FRESH_SEED),
        capacity=capacity,
        capacity_size=size,
    )


def measured_seeds(seed: int, rate: float, schedule: Schedule) -> tuple[int, ...]:
    """Seeds to measure under, of windows near the mean load. Raises :class:`InputError` where next to nothing falls into one."""
    first, expected = seed + _MEASURED_SEED, rate * schedule.window_s
    if expected < _FEWEST_ITEMS:
        longer = "a longer --budget or " if schedule.window_s < _LONGEST_S else ""
        raise InputError(
            f"at {items_per_s(rate)} a window of {schedule.window_s:.3g} s brings {expected:.2g} on average; it takes "
            f"{_FEWEST_ITEMS:g}: give {longer}a higher --rate"
        )
    if expected > _MANY_ITEMS:
        return tuple(range(first, first + _SEEDS))
    return tuple(balanced_seeds(ITEMS.at_rate(rate), first, _SEEDS, schedule.warmup_s, schedule.window_s))


@dataclass(frozen=True)
class CallSimulator:
    """The batcher's own core and strategies in virtual time, over inputs of ``costs``. Calls scatter around what ``cost`` says as
    they did when it was measured. ``warmup_s``: of the hardware."""

    cost: CallCost
    costs: Sequence[int]
    slo: SLO
    warmup_s: float = 0.0
    grouping: str | Grouping = "arrival"

    def window(self, rate: float) -> tuple[float, float]:
        """(warm-up, window) of :meth:`long`, s. At any rate it holds the same items."""
        window = _SIMULATED_ITEMS / rate
        return SIMULATED_WARM_UP * window, window

    def long(self, setting: BatcherSetting, rate: float, seed: int, *, stop: Callable[[], bool] | None = None) -> Score:
        """Under as many items as tell settings apart."""
        if stop is not None and stop():
            raise Interrupted("stopped while simulating")
        warmup, window = self.window(rate)
        return self.served(setting, OfferedLoad(rate, seed, window, warmup))

    def paired(self, run: Run) -> Run:
        """The simulation of the very items that ``run`` measured."""
        score, setting = run.score, run.batcher_setting
        found = self.served(setting, OfferedLoad(score.rate, score.seed, score.window_s, self.warmup_s))
        return Run.of(setting, "simulation", PAIRED, found)

    def served(self, setting: BatcherSetting, load: OfferedLoad) -> Score:
        """What comes of ``load`` under ``setting``."""
        cost, scatter = self.cost, random.Random(load.seed)

        def service(call: Call) -> float:
            return cost.price.of(len(call.items), call.cost) * scatter.choice(cost.ratios)

        engine = SimulatedBatcher(
            service,
            self.costs,
            strategy=setting.strategy,
            grouping=copy.deepcopy(self.grouping),  # one that holds nothing yet
            slo=self.slo,
            knobs=setting.knobs,
            workers=cost.workers,
            slowdown=cost.slowdown if cost.workers > 1 else None,
        )
        return offered_to(engine, len(self.costs), load, self.slo)


def offered_to(engine: Engine, inputs: int, load: OfferedLoad, slo: SLO, **options: Any) -> Score:
    """What comes of ``load`` of so many ``inputs``, live or in virtual time. ``options`` are those of
    :func:`~autotune.measure.evaluate.evaluate`."""
    return evaluate(
        engine, None, ITEMS.at_rate(load.rate), slo,
        vocab_size=inputs, seed=load.seed, duration=load.window_s, warmup=load.warmup_s, **options,
    )  # fmt: skip


# -- the session ----------------------------------------------------------------------------------------------------------


class CallableValidation(Validation[BatcherSetting, CallableSetup, CallCost, BatcherSpace]):
    """Validates settings of a callable. They are few and no capacity is looked for behind it, so what time is left is
    theirs."""

    def _unsettled(self) -> int | None:
        """What was measured but once or not at all, for that may have been a bad minute; then the choice, until it has met
        arrivals enough to say that it meets the SLO or violates it."""
        few = [i for i in range(len(self._candidates)) if self._counts[i] < _RUNS and i not in self._failed]
        if few:
            return max(few, key=self._posterior.expected)
        self._conclude()
        choice, objective = self._choice(), self._objective
        point = by_setting(self._validated())[self._candidates[choice].setting]
        plain = len(set(point.seeds)) >= _RUNS and (objective.confirmed(point) or objective.refuted(point))
        return None if plain or choice in self._failed else choice


class CallableSession(Sweep[BatcherSetting, CallableSetup, CallCost, BatcherSpace]):
    """Profiles a callable. Its rate follows from the calibration. The best few settings by simulation, and the batcher as it
    comes, are candidates.
    """

    begun_with = "calls/1"

    def __init__(
        self,
        target: CallableTarget,
        question: CallableQuestion,
        study: SweepStudy,
        reporter: Reporter,
        *,
        stop: Callable[[], bool] | None = None,
        host: Clock | None = None,
    ) -> None:
        budget, self._count, each = question.budget_s, question.trials or _MEASURED, _UNBOUNDED_S
        if budget is not None:
            left = (1 - _CALIBRATING - _SIMULATING) * budget
            self._count = min(self._count, max(2, int(left / _SHORT_S)))
            each = left / (_RUNS * self._count)
        warmup = min(2.0, each / 5)
        schedule = Schedule(
            budget,
            window_s=min(_LONGEST_S, max(_SHORTEST_S, each - warmup - 0.2)),
            warmup_s=warmup,
            calibrate_s=CALIBRATE_S if budget is None else _CALIBRATING * budget,
            simulate_s=None if budget is None else _SIMULATING * budget,
        )
        super().__init__(target, question, study, reporter, schedule, stop=stop, host=host)

    def _at_rate(self, setup: CallableSetup) -> CallableSetup:
        """The one it has; no other is looked for."""
        why = why_rate(setup.rate_from, setup.rate, setup.capacity)
        self._context.reporter.note(f"SLO {setup.slo} ({setup.slo_from}); rate {items_per_s(setup.rate)} ({why})")
        return setup

    def _measure(self, setup: CallableSetup) -> None:
        context = self._context
        context.check()
        context.reporter.stage("measuring")
        context.recall()
        CallableValidation(context, setup, self._candidates(setup), end=context.question.budget_s).run()

    def _candidates(self, setup: CallableSetup) -> list[Candidate]:
        """The best by simulation, and the batcher as it comes; simulated again under a seed that the search has not seen."""
        context = self._context
        best_first = Objective.under(setup).ranked(callable_points(context.found.simulated))
        space = context.question.space
        chosen = choose([point.setting for point in best_first], self._count, space.as_it_comes)

        def simulated() -> list[Candidate]:
            return [candidate(label(setting, space), setting, around(context, setup), setup) for setting in chosen]

        return stored_candidates(context, f"candidates/{setup.rate:g}/{setup.speed:.6f}", simulated)


def _digest(paths: Sequence[Path]) -> str:
    made = hashlib.sha256()
    for path in paths:
        made.update(path.read_bytes() if path.is_file() else b"")
    return made.hexdigest()[:12]


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-6))) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
