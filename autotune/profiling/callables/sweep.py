"""One profiling run of a callable: calibrate, simulate the grid, measure the best few under fresh seeds, choose.

What is measured goes into the study the moment it exists; a second run of the same study finds it there and goes on with
what is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.measure.evaluate import Interrupted
from autotune.profile.callable import StrategyName
from autotune.profiling.callables.calibrate import Calibration, calibrate
from autotune.profiling.callables.kept import Kept, NothingKept
from autotune.profiling.callables.load import Load
from autotune.profiling.callables.outcome import Outcome, best_first
from autotune.profiling.callables.rounds import Plan, Rounds, plan
from autotune.profiling.callables.settings import AS_IT_COMES, ONE_AT_A_TIME, STRATEGIES, Setting, grid
from autotune.profiling.callables.simulate import simulate
from autotune.profiling.callables.subject import Subject
from autotune.profiling.reporting import Reporter, Silent
from runtime.slo import SLO

RATE_SHARE = 0.8
"""Of what the callable can do by its calibration: near enough to the limit for settings to differ."""

MOST_RATE = 1000.0
"""Items/s that are offered unless asked for: one process sends these on time."""

_CALIBRATING, _SIMULATING = 0.15, 0.15  # of the budget
_SIMULATED_ITEMS = 2000
_BEGUN = "begun"
_PROMISED = 10  # calls of one item that the promise lasts, unless it is given


@dataclass(frozen=True)
class Question:
    """What was asked. ``most``: items in a call, at most; ``slo`` and ``rate``: None for the run to find. ``replicas``:
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

    calibration: Calibration
    slo: SLO
    slo_from: str
    rate: float
    rate_from: str
    capacity: float
    capacity_size: int
    simulated: list[Outcome] = field(default_factory=list)
    measured: list[Outcome] = field(default_factory=list)
    load: Load | None = None
    tried: int = 0
    stopped: bool = False

    @property
    def ranked(self) -> list[Outcome]:
        """The best first: of those measured, else of those simulated."""
        return best_first([o for o in self.measured if o.offered] or self.simulated)


def sweep(
    subject: Subject,
    question: Question,
    reporter: Reporter | None = None,
    stop: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
    study: Kept | None = None,
) -> Findings:
    """See the module. Once ``stop`` returns true what has been found so far is returned; Interrupted if that is nothing."""
    reporter, study = reporter or Silent(), study or NothingKept()
    if study.get(_BEGUN):
        reporter.note("going on with the study of an earlier run; --fresh begins anew")
    study.put(_BEGUN, True)
    end = now() + question.budget_s
    reporter.stage("calibrating")
    calibration = calibrate(
        subject,
        seed=question.seed,
        budget_s=_CALIBRATING * question.budget_s,
        most=question.most,
        workers=question.replicas,
        longest_s=None if question.slo is None or question.slo.e2e_ms is None else question.slo.e2e_ms / 1e3,
        stop=stop,
        progress=lambda share, count: reporter.progress(share, count, "", None),
        study=study,
    )
    found = _settled(subject, question, calibration)
    reporter.stage_done(
        f"{calibration.largest} items", f"fit error {calibration.error:.1%}, up to {found.capacity:.3g} items/s"
    )
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
            planned = plan(found.simulated, max(0.0, end - now()))
            planned.keep(study)
        rounds.run(planned, reporter, now() + planned.runs * planned.each_s)
    found.stopped = stop()
    if not found.simulated:
        raise Interrupted("stopped before the first setting was tried")
    return found


def _settled(subject: Subject, question: Question, calibration: Calibration) -> Findings:
    """The promise and the rate, as asked or from the calibration."""
    slo, slo_from = question.slo, "given"
    if slo is None:
        one = calibration.seconds(1, subject.mean_cost) * 1e3
        slo = SLO(e2e_ms=max(20.0, _rounded_up(_PROMISED * one)))
        slo_from = f"{_PROMISED} times a call of one item, and at least 20 ms"
    assert slo.e2e_ms is not None
    # An item waits for the call before its own: a size serves all comers only if two calls fit the promise.
    capacity, size = calibration.capacity(subject.mean_cost, slo.e2e_ms / 2e3)
    rate, rate_from = question.rate, "as asked"
    if rate is None:
        rate = min(RATE_SHARE * capacity, MOST_RATE)
        rate_from = f"{RATE_SHARE:.0%} of what it can do inside the SLO"
        if rate == MOST_RATE:
            rate_from = "the most that is offered unless --rate asks for more"
    return Findings(calibration, slo, slo_from, float(f"{rate:.4g}"), rate_from, capacity, size)


def _simulate(
    found: Findings,
    subject: Subject,
    question: Question,
    reporter: Reporter,
    stop: Callable[[], bool],
    over: Callable[[], bool],
    planned: Plan | None,
) -> None:
    """Fill ``found.simulated``: the yardsticks first, then the grid until the time is over, or only what is ``planned`` to be
    measured already. All under the same arrivals."""
    window = _SIMULATED_ITEMS / found.rate
    load = Load(found.rate, window, window / 10, question.seed + 1_000_003)
    one = found.calibration.seconds(1, subject.mean_cost) * 1e3
    assert found.slo.e2e_ms is not None
    settings: Sequence[Setting] = grid(
        question.strategies,
        largest=found.calibration.largest,
        slack_ms=found.slo.e2e_ms - one,
        mean_cost=subject.mean_cost if subject.costs_vary else None,
        seed=question.seed,
        workers=question.replicas,
    )
    if planned is not None:
        settings = planned.settings
    first = [AS_IT_COMES] if "adaptive" in question.strategies else []
    settings = list(dict.fromkeys([*first, ONE_AT_A_TIME, *settings]))
    costs = list(subject.costs)
    for index, setting in enumerate(settings):
        if stop() or (index > len(first) + 1 and over()):
            break
        found.simulated.append(simulate(setting, found.calibration, costs, load, found.slo, subject.new_grouping()))
        reporter.progress((index + 1) / len(settings), f"{index + 1}/{len(settings)}", "", None)
    found.tried = len(found.simulated) if planned is None else planned.tried
    best = max((o.share for o in found.simulated), default=0.0)
    reporter.stage_done(f"{len(found.simulated)}/{len(settings)}", f"best {best:.1%} in SLO")


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-6))) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
