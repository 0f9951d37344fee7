"""One profiling run of a callable: calibrate, simulate the grid, measure the best few under fresh seeds, choose.

What is measured goes into the study the moment it exists: the calls timed for each size, where the calibration ended, which
settings are measured under what load, and each run of one. A second run of the same study finds it there and goes on with
what is missing. What is simulated is not kept: it costs no call of the function, and comes out the same again.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.measure.score import Score
from autotune.profile import Machine
from autotune.profile.callable import BatcherSetting, Point, StrategyName
from autotune.profiling.callable_calibration import CallCost, calibrate
from autotune.profiling.callable_runs import measure, simulate
from autotune.profiling.callable_space import AS_IT_COMES, ONE_AT_A_TIME, STRATEGIES, choose, grid
from autotune.profiling.callable_subject import Subject
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, callable_point
from autotune.profiling.reporting import Reporter, Silent
from autotune.profiling.study import SweepStudy, kept_run
from autotune.profiling.target import Load
from autotune.version import __version__
from runtime.knobs import Knobs
from runtime.slo import SLO

RATE_SHARE = 0.8
"""Of what the callable can do by its calibration: near enough to the limit for settings to differ."""

MOST_RATE = 1000.0
"""Items/s that are offered unless asked for: one process sends these on time."""

_CALIBRATING, _SIMULATING = 0.15, 0.15  # of the budget
_SIMULATED_ITEMS = 2000
_SLO_CALLS = 10  # the SLO in calls of one item, unless it is given
_MEASURED, _ROUNDS = 4, 2  # settings, and runs of each
_SHORTEST_S, _LONGEST_S = 0.5, 60.0  # of a window
_SIMULATED_SEED, _WARM_UP_SEED, _MEASURED_SEED = 1_000_003, 2_000_002, 2_000_003  # to the seed of the question
_BEGUN, _PLAN = "begun", "plan"  # facts of the study


@dataclass(frozen=True)
class Question:
    """What is asked. ``most``: items in a call, at most; ``slo`` and ``rate``: None for the run to find. ``replicas``:
    workers that call at a time."""

    slo: SLO | None
    rate: float | None
    budget_s: float
    seed: int = 0
    most: int = 256
    strategies: Sequence[StrategyName] = STRATEGIES
    replicas: int = 1


@dataclass
class Findings:
    """What came of it so far. ``capacity`` items/s in calls of ``capacity_size``, by the calibration; ``load``: of the windows
    measured, None when none was. ``tried``: settings simulated, in an earlier session too."""

    cost: CallCost
    slo: SLO
    slo_from: str
    rate: float
    rate_from: str
    capacity: float
    capacity_size: int
    simulated: list[Point] = field(default_factory=list)
    measured: list[Point] = field(default_factory=list)
    load: Load | None = None
    tried: int = 0
    stopped: bool = False

    @property
    def ranked(self) -> list[Point]:
        """The best first: of those measured, else of those simulated."""
        return Objective(self.slo).ranked([p for p in self.measured if p.offered] or self.simulated)


def identity(subject: Subject, question: Question, inputs: Path, machine: Machine) -> dict[str, Any]:
    """What a study is about: only a run that asks the same goes on with it. The function counts as changed when a file of it
    has."""
    return {
        "function": subject.name,
        "files of the function": _digest(subject.sources),
        "inputs": _digest([inputs]),
        "cost": subject.cost_name,
        "slo": None if question.slo is None else str(question.slo),
        "rate": question.rate,
        "budget": f"{question.budget_s:g}s",
        "most": question.most,
        "replicas": question.replicas,
        "strategies": list(question.strategies),
        "seed": question.seed,
        "machine": machine.model_dump(mode="json", include={"cpu", "cores", "threads"}),
        "autotune": __version__,
    }


def sweep(
    subject: Subject,
    question: Question,
    study: SweepStudy,
    reporter: Reporter | None = None,
    stop: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
) -> Findings:
    """See the module. Once ``stop`` returns true what has been found so far is returned; Interrupted if that is nothing."""
    reporter = reporter or Silent()
    if study.get(_BEGUN):
        reporter.note("going on with the study of an earlier run; --fresh begins anew")
    study.put(_BEGUN, True)
    end = now() + question.budget_s
    reporter.stage("calibrating")
    cost = calibrate(
        subject,
        study,
        seed=question.seed,
        budget_s=_CALIBRATING * question.budget_s,
        most=question.most,
        workers=question.replicas,
        longest_s=None if question.slo is None or question.slo.e2e_ms is None else question.slo.e2e_ms / 1e3,
        stop=stop,
        progress=lambda share, count: reporter.progress(share, count, "", None),
    )
    found = _settled(subject, question, cost)
    reporter.stage_done(f"{cost.largest} items", f"fit error {cost.error:.1%}, up to {found.capacity:.3g} items/s")
    reporter.note(f"SLO {found.slo} ({found.slo_from}); rate {found.rate:.3g} items/s ({found.rate_from})")
    planned = Plan.kept(study)
    reporter.stage("simulating")
    measuring = (1 - _CALIBRATING - _SIMULATING) * question.budget_s
    _simulate(found, subject, question, reporter, stop, lambda: now() > end - measuring, planned)
    if found.simulated and not stop():
        reporter.stage("measuring")
        rounds = Rounds(found, subject, question.seed, study, stop, now)
        if planned is None:
            rounds.warm_up()
            planned = plan(found, max(0.0, end - now()))
            planned.keep(study)
        rounds.run(planned, reporter, now() + planned.runs * planned.each_s)
    found.stopped = stop()
    if not found.simulated:
        raise Interrupted("stopped before the first setting was tried")
    return found


def _settled(subject: Subject, question: Question, cost: CallCost) -> Findings:
    """The SLO and the rate, as given or from the calibration."""
    slo, slo_from = question.slo, "given"
    if slo is None:
        one = cost.seconds(1, subject.mean_cost) * 1e3
        slo = SLO(e2e_ms=max(20.0, _rounded_up(_SLO_CALLS * one)))
        slo_from = f"{_SLO_CALLS} times a call of one item, and at least 20 ms"
    assert slo.e2e_ms is not None
    # An item waits for the call before its own: a size serves all comers only if two calls fit the SLO.
    capacity, size = cost.capacity(subject.mean_cost, slo.e2e_ms / 2e3)
    rate, rate_from = question.rate, "as asked"
    if rate is None:
        rate = min(RATE_SHARE * capacity, MOST_RATE)
        rate_from = f"{RATE_SHARE:.0%} of what it can do inside the SLO"
        if rate == MOST_RATE:
            rate_from = "the most that is offered unless --rate asks for more"
    return Findings(cost, slo, slo_from, float(f"{rate:.4g}"), rate_from, capacity, size)


def _simulate(
    found: Findings,
    subject: Subject,
    question: Question,
    reporter: Reporter,
    stop: Callable[[], bool],
    over: Callable[[], bool],
    planned: Plan | None,
) -> None:
    """Fill ``found.simulated``: the baselines first, then the grid until the time is over, or only what is ``planned`` to be
    measured already. All under the same arrivals."""
    window = _SIMULATED_ITEMS / found.rate
    load = Load(found.rate, question.seed + _SIMULATED_SEED, window, window / 10)
    one = found.cost.seconds(1, subject.mean_cost) * 1e3
    assert found.slo.e2e_ms is not None
    settings: Sequence[BatcherSetting] = grid(
        question.strategies,
        largest=found.cost.largest,
        slack_ms=found.slo.e2e_ms - one,
        mean_cost=subject.mean_cost if subject.costs_vary else None,
        seed=question.seed,
        workers=question.replicas,
    )
    if planned is not None:
        settings = planned.settings
    first = [AS_IT_COMES] if "adaptive" in question.strategies else []
    settings = list(dict.fromkeys([*first, ONE_AT_A_TIME, *settings]))
    for index, setting in enumerate(settings):
        if stop() or (index > len(first) + 1 and over()):
            break
        score = simulate(setting, found.cost, subject.costs, load, found.slo, subject.new_grouping())
        found.simulated.append(callable_point(setting, [score], simulated=True))
        reporter.progress((index + 1) / len(settings), f"{index + 1}/{len(settings)}", "", None)
    found.tried = len(found.simulated) if planned is None else planned.tried
    best = max((p.attainment for p in found.simulated), default=0.0)
    reporter.stage_done(f"{len(found.simulated)}/{len(settings)}", f"best {best:.1%} in SLO")


class Plan(NamedTuple):
    """What is measured. ``each_s``: what a run takes in all. ``tried``: settings simulated to come to it."""

    settings: Sequence[BatcherSetting]
    window_s: float
    warmup_s: float
    each_s: float
    tried: int

    @property
    def runs(self) -> int:
        return _ROUNDS * len(self.settings)

    def keep(self, study: SweepStudy) -> None:
        settings = [{"strategy": s.strategy, "knobs": s.knobs.as_dict()} for s in self.settings]
        study.put(_PLAN, {**self._asdict(), "settings": settings})

    @classmethod
    def kept(cls, study: SweepStudy) -> Plan | None:
        """That of an earlier session of the same study."""
        known: dict[str, Any] | None = study.get(_PLAN)
        if known is None:
            return None
        settings = [BatcherSetting(s["strategy"], Knobs(**s["knobs"])) for s in known["settings"]]
        return cls(**{**known, "settings": settings})


def plan(found: Findings, left_s: float) -> Plan:
    """What to measure in ``left_s`` seconds."""
    ranked = [point.setting for point in found.ranked]
    chosen = choose(ranked, min(_MEASURED, max(2, int(left_s / 5))))
    each = left_s / (_ROUNDS * len(chosen))
    warmup = min(2.0, each / 5)
    window = min(_LONGEST_S, max(_SHORTEST_S, each - warmup - 0.2))
    return Plan(chosen, window, warmup, each, len(found.simulated))


class Rounds:
    """Rounds over the chosen few, each round under a seed of its own, until the next would end too late."""

    def __init__(
        self,
        found: Findings,
        subject: Subject,
        seed: int,
        study: SweepStudy,
        stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._found, self._subject, self._seed = found, subject, seed
        self._study, self._stop, self._now = study, stop, now
        self._warm = False

    def warm_up(self) -> None:
        """A run that nobody sees: what the simulation left to be collected, and whatever is slow once, would hit the first."""
        if self._warm:
            return
        self._warm = True
        gc.collect()
        load = Load(self._found.rate, self._seed + _WARM_UP_SEED, _SHORTEST_S, 0.0)
        with contextlib.suppress(EvaluationError):  # a setting that fails is told of where it is measured
            self._measure(self._found.simulated[0].setting, load)

    def run(self, plan: Plan, reporter: Reporter, end: float) -> None:
        """Fill ``found.measured``, with what was measured before and with what was not. A setting that fails is left out;
        EvaluationError if all of them do."""
        found, now = self._found, self._now
        scores: dict[BatcherSetting, list[Score]] = {setting: [] for setting in plan.settings}
        done, begun = 0, now()
        for round_ in range(_ROUNDS):
            if self._stop() or (round_ and now() + (now() - begun) / round_ > end + plan.each_s):
                break
            load = Load(found.rate, self._seed + _MEASURED_SEED + round_, plan.window_s, plan.warmup_s)
            for setting in list(scores) if round_ % 2 == 0 else list(reversed(scores)):
                try:
                    scores[setting].append(self._one(setting, load))
                except Interrupted:
                    break
                except EvaluationError as error:
                    del scores[setting]
                    if not scores:
                        raise
                    reporter.note(f"{setting} failed: {error}")
                    continue
                done += 1
                found.load = load
                left, share = max(0.0, end - now()), scores[setting][-1].attainment
                reporter.progress(done / plan.runs, f"{done}/{plan.runs}", f"{share:.1%} in SLO", left)
        found.measured = [callable_point(s, runs, simulated=False) for s, runs in scores.items() if runs]
        reporter.stage_done(f"{done}/{plan.runs}", f"windows of {plan.window_s:.3g} s")

    def _one(self, setting: BatcherSetting, load: Load) -> Score:
        def run() -> Run:
            self.warm_up()
            return Run(stage="validation", label=str(setting), trial=-1, score=self._measure(setting, load))

        key = f"run/validation/{setting}/{load.rate:g}/{load.seed}"
        return kept_run(self._study, key, run, setting.knobs, load.rate, self._stop).score

    def _measure(self, setting: BatcherSetting, load: Load) -> Score:
        found = self._found
        return measure(setting, self._subject, load, found.slo, self._stop, workers=found.cost.workers)


def _digest(paths: Sequence[Path]) -> str:
    made = hashlib.sha256()
    for path in paths:
        made.update(path.read_bytes() if path.is_file() else b"")
    return made.hexdigest()[:12]


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-6))) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
