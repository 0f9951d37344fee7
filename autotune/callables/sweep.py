"""One profiling run of a callable: calibrate, simulate the grid, measure the best few under fresh seeds, choose."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.callables.calibrate import Calibration, calibrate
from autotune.callables.load import Load
from autotune.callables.measure import measure
from autotune.callables.outcome import Outcome, best_first
from autotune.callables.settings import AS_IT_COMES, ONE_AT_A_TIME, STRATEGIES, Setting, StrategyName, grid
from autotune.callables.simulate import simulate
from autotune.callables.subject import Subject
from autotune.evaluate import Interrupted
from autotune.profiling.reporting import Reporter, Silent
from runtime.slo import SLO

RATE_SHARE = 0.8
"""Of what the callable can do by its calibration: near enough to the limit for settings to differ."""

MOST_RATE = 1000.0
"""Items/s that are offered unless asked for: one process sends these on time."""

_CALIBRATING, _SIMULATING = 0.15, 0.15  # of the budget
_SIMULATED_ITEMS = 2000
_MEASURED, _ROUNDS = 4, 2  # settings, and runs of each
_SHORTEST_S, _LONGEST_S = 0.5, 60.0  # of a window
_PROMISED = 10  # calls of one item that the promise lasts, unless it is given


@dataclass(frozen=True)
class Question:
    """What was asked. ``most``: items in a call, at most; ``slo`` and ``rate``: None for the run to find."""

    slo: SLO | None
    rate: float | None
    budget_s: float
    seed: int = 0
    most: int = 256
    strategies: Sequence[StrategyName] = STRATEGIES


@dataclass
class Findings:
    """What came of it so far. ``capacity`` items/s in calls of ``capacity_size``, by the calibration; ``load``: of the windows
    measured, None when none was."""

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
) -> Findings:
    """See the module. Once ``stop`` returns true what has been found so far is returned."""
    reporter = reporter or Silent()
    end = now() + question.budget_s
    reporter.stage("calibrating")
    calibration = calibrate(
        subject,
        seed=question.seed,
        budget_s=_CALIBRATING * question.budget_s,
        most=question.most,
        longest_s=None if question.slo is None or question.slo.e2e_ms is None else question.slo.e2e_ms / 1e3,
        stop=stop,
        progress=lambda share, count: reporter.progress(share, count, "", None),
    )
    found = _settled(subject, question, calibration)
    reporter.stage_done(
        f"{calibration.largest} items", f"fit error {calibration.error:.1%}, up to {found.capacity:.3g} items/s"
    )
    reporter.note(f"SLO {found.slo} ({found.slo_from}); rate {found.rate:.3g} items/s ({found.rate_from})")
    reporter.stage("simulating")
    measuring_from = end - (1 - _CALIBRATING - _SIMULATING) * question.budget_s
    _simulate(found, subject, question, reporter, stop, lambda: now() > measuring_from)
    if found.simulated and not stop():
        reporter.stage("measuring")
        _measure(found, subject, question, reporter, stop, now, end)
    found.stopped = stop()
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
) -> None:
    """Fill ``found.simulated``: the yardsticks first, then the grid until the time is over. All under the same arrivals."""
    window = _SIMULATED_ITEMS / found.rate
    load = Load(found.rate, window, window / 10, question.seed + 1_000_003)
    one = found.calibration.seconds(1, subject.mean_cost) * 1e3
    assert found.slo.e2e_ms is not None
    settings = grid(
        question.strategies,
        largest=found.calibration.largest,
        slack_ms=found.slo.e2e_ms - one,
        mean_cost=subject.mean_cost if subject.costs_vary else None,
        seed=question.seed,
    )
    first = [AS_IT_COMES] if "adaptive" in question.strategies else []
    settings = [*first, ONE_AT_A_TIME, *(s for s in settings if s != ONE_AT_A_TIME)]
    costs = list(subject.costs)
    for index, setting in enumerate(settings):
        if stop() or (index > len(first) + 1 and over()):
            break
        found.simulated.append(simulate(setting, found.calibration, costs, load, found.slo))
        reporter.progress((index + 1) / len(settings), f"{index + 1}/{len(settings)}", "", None)
    best = max((o.share for o in found.simulated), default=0.0)
    reporter.stage_done(f"{len(found.simulated)}/{len(settings)}", f"best {best:.1%} in SLO")


def _measure(
    found: Findings,
    subject: Subject,
    question: Question,
    reporter: Reporter,
    stop: Callable[[], bool],
    now: Callable[[], float],
    end: float,
) -> None:
    """Rounds over the chosen few, each round under a seed of its own, until the next would end too late."""
    _warm_up(found, subject, question, stop)
    left = max(0.0, end - now())
    chosen = choose(found.simulated, min(_MEASURED, max(2, int(left / 5))))
    found.measured = [Outcome(setting, simulated=False) for setting in chosen]
    each = left / (_ROUNDS * len(chosen))
    warmup = min(2.0, each / 5)
    window = min(_LONGEST_S, max(_SHORTEST_S, each - warmup - 0.2))
    done, begun, total = 0, now(), _ROUNDS * len(chosen)
    for round_ in range(_ROUNDS):
        if round_ and now() + (now() - begun) / round_ > end + each:
            break
        found.load = Load(found.rate, window, warmup, question.seed + 2_000_003 + round_)
        for outcome in found.measured if round_ % 2 == 0 else reversed(found.measured):
            try:
                measure(outcome, subject, found.load, found.slo, stop)
            except Interrupted:
                break
            done += 1
            reporter.progress(done / total, f"{done}/{total}", f"{outcome.share:.1%} in SLO", max(0.0, end - now()))
        if stop():
            break
    if not done:
        found.measured, found.load = [], None
    reporter.stage_done(f"{done}/{total}", f"windows of {window:.3g} s")


def _warm_up(found: Findings, subject: Subject, question: Question, stop: Callable[[], bool]) -> None:
    """A run that nobody sees: what the simulation left to be collected, and whatever is slow once, would hit the first."""
    gc.collect()
    load = Load(found.rate, _SHORTEST_S, 0.0, question.seed + 2_000_002)
    with contextlib.suppress(Interrupted):
        measure(Outcome(found.simulated[0].setting, simulated=False), subject, load, found.slo, stop)


def choose(simulated: Sequence[Outcome], count: int) -> list[Setting]:
    """What is measured: the best by simulation, the batcher as it comes, and the next best unlike those before it."""
    ranked = [o.setting for o in best_first(simulated) if o.setting != ONE_AT_A_TIME]
    chosen = ranked[:1]
    if AS_IT_COMES in ranked and AS_IT_COMES not in chosen:
        chosen.append(AS_IT_COMES)
    for setting in ranked:
        if len(chosen) >= count:
            break
        if all(_unlike(setting, other) for other in chosen):
            chosen.append(setting)
    return chosen


def _unlike(a: Setting, b: Setting) -> bool:
    sizes = sorted((a.knobs.max_batch_size, b.knobs.max_batch_size))
    return a.strategy != b.strategy or sizes[1] >= 2 * sizes[0]


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-6))) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
