"""Measures the steps of a plan on a live engine, until a cost model fitted to them stands still or the time is over.

Everything is done in rounds, each in an order of its own, so that no kind of step meets only one mood of the machine. A small
anchor script runs in between, and times are divided by how the machine's pace then compares with its usual one. What is known
of a kind of step is its median; a first time that took much longer than the others (compilation, allocation) is left out, as
is all of the warm-up. An engine gets faster in its first seconds (shapes that a library meets for the first time, memory never
touched before), so what is measured in them counts only where nothing like it was measured again.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autotune.cost.fit import FEWEST, SERVED
from autotune.cost.model import CostModel, fit_cost_model, with_predictions
from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError
from autotune.profile.parts import JitterFacts, ModelFacts, StepPoint
from autotune.profiling.coverage import lacking
from autotune.profiling.excess import excess_of, jitter_of, served_over_told
from autotune.profiling.pace import Anchor, Pace
from autotune.profiling.served_steps import served_steps
from autotune.profiling.step_driver import Sample, Script, StepDriver
from autotune.profiling.step_plan import ANCHOR_STEPS, Mix, Pilot, StepPlan
from runtime.records import StepRecord
from runtime.step_model import StepFeatures, StepModel

ROUNDS = 3
"""A plan is sized so that this many rounds as the first one fit into the time. Later ones serve more, so the last is cut short; a
settled fit ends sooner."""

_MOST_ROUNDS = 16
_FIRST_ROUND = 3  # times the budget that a slow machine may take for the first one
_COLD_S, _COLD = 10.0, 0.25  # seconds in which an engine may get faster, at most; of the budget at most
_LATER = 2  # times a kind of step has to come about behind them for those before to be left out
_SETTLED = 0.01  # median relative change of the predictions by another round
_ANCHOR_EVERY = 0.15  # of a round
_FIRST = 1.5  # times the median of the others: a first time above that is left out
_STALL = 2.5  # times the median: above that a served step is left out
_UNLIKE = 0.2  # spread that is assumed of served steps of which there are few
_NEAR = math.log(1.1)  # contexts within a tenth of each other are one kind of step


class _Stretch(NamedTuple):
    """The steps of one script."""

    cold: bool  # whether in the engine's first seconds
    steps: list[Sample]
    served: bool  # whether they are steps as they come, no two alike


class MeasuredSteps(NamedTuple):
    """``points``: one for each kind of step, at the machine's usual pace. ``unevenness``: the slowest anchor over the fastest.

    ``seconds``: on the engine's clock. ``served``: what the steps of served loads took together, stalls and all, over what a
    model fitted to the points says; 1 where none were served. ``excess_s``: what serving adds to each, as short ones tell it;
    ``jitter``: how they scattered around that, None if there were too few.
    """

    points: list[StepPoint]
    unevenness: float
    seconds: float
    served: float
    excess_s: float
    jitter: JitterFacts | None

    def cost(self, seconds: float) -> CostModel:
        """The model of all of it, which took ``seconds``. Raises as :func:`~autotune.cost.model.fit_cost_model`."""
        return fit_cost_model(self.points, seconds=seconds, excess_s=self.excess_s, jitter=self.jitter)


def measure_steps(
    engine: Engine,
    model: ModelFacts,
    *,
    budget_s: float,
    seed: int,
    stop: Callable[[], bool] | None = None,
    advance: Callable[[float, str], None] = lambda share, note: None,
) -> MeasuredSteps:
    """What the steps of ``engine``, which must be idle, take: each kind's median, and what a model that did not see it says.

    ``budget_s``: seconds on the engine's clock, within which it ends, or soon after; a slow
    machine gets more for a first round, and up to as much again for what that had no room for
    (:mod:`autotune.profiling.coverage`). ``advance``: told the share that is done, and how. The engine is left idle, its knobs
    changed. Raises :class:`EvaluationError` when a request fails or too few kinds of steps came about, :class:`Interrupted` on
    ``stop``.
    """
    clock = engine.clock
    begun = clock.now()
    driver = StepDriver(engine, model.vocab_size, room_of(engine, model), seed=seed, stop=stop or (lambda: False))
    plan = StepPlan(driver, engine, seed)
    driver.run(plan.anchor())  # warm-up
    driver.run(plan.pilot())
    pilot = _speed(driver.run(plan.pilot()), driver.run(plan.anchor()))
    left = budget_s - (clock.now() - begun)
    seconds = max(left, 0.2 * budget_s) / ROUNDS
    warm = begun + min(_COLD_S, _COLD * budget_s)
    plan.scripts(seconds, pilot)
    rng = random.Random(seed)
    stretches: list[_Stretch] = []
    anchors: list[Anchor] = []
    points: list[StepPoint] = []
    probes: list[StepFeatures] = []
    told: list[float] = []

    def measure(task: Mix | Callable[[], Script]) -> None:
        at = clock.now()
        if isinstance(task, Mix):
            # no two loads have the same luck: one seed draws more than usual, or less, whatever the rate
            steps = served_steps(engine, model, task, seed=seed + len(stretches), stop=stop)
        else:
            steps = driver.run(task())
        stretches.append(_Stretch(at < warm, steps, isinstance(task, Mix)))

    for number in range(_MOST_ROUNDS):
        tasks = plan.round(number)
        for task in rng.sample(tasks, len(tasks)):
            if not anchors or clock.now() - anchors[-1].at > _ANCHOR_EVERY * seconds:
                anchors.append(Anchor(clock.now(), _anchored(driver.run(plan.anchor()))))
            measure(task)
            spent = clock.now() - begun
            advance(min(1.0, spent / budget_s), f"round {number + 1}, {len(stretches)} scripts")
            if spent > budget_s * (1 if number else _FIRST_ROUND):
                break
        anchors.append(Anchor(clock.now(), _anchored(driver.run(plan.anchor()))))
        points = step_points(stretches, Pace(anchors))
        if number == 0 and lacking(points):  # on a slow machine
            cut = clock.now()
            for least in plan.least():
                if clock.now() - cut < budget_s:
                    measure(least)
            points = step_points(stretches, Pace(anchors))
        if len(points) < FEWEST:
            raise EvaluationError(f"only {len(points)} kinds of steps came about; it takes {FEWEST} to fit their cost")
        fitted = fit_cost_model(points)
        probes = probes or [StepFeatures.of(record) for stretch in stretches for record, _ in stretch.steps]
        before, told = told, [fitted.predict(step) for step in probes]
        moved = statistics.median(abs(a / b - 1) for a, b in zip(told, before, strict=True)) if before else math.inf
        if clock.now() - begun > budget_s or moved < _SETTLED:
            break
    pace = Pace(anchors)
    served = _served_and_told(stretches, pace, fitted)
    return MeasuredSteps(
        with_predictions(points),
        pace.unevenness,
        clock.now() - begun,
        served_over_told(served),
        excess_of(served),
        jitter_of(served),
    )


def room_of(engine: Engine, model: ModelFacts) -> int:
    """Tokens that a request of a calibration may have in all: there is to be room for another."""
    return min(model.max_model_len, engine.facts.kv_tokens // 2)


def step_points(stretches: Sequence[_Stretch], pace: Pace) -> list[StepPoint]:
    """One point for each kind of step: medians, of times at the machine's usual pace.

    Served steps of about as many decodes and prompt tokens make one kind, and a point at their means: what now and then costs
    more (a sequence that leaves, or needs more room) belongs to them all.
    """
    kinds: dict[tuple[int, ...], list[tuple[bool, Sample]]] = {}
    for cold, steps, served in stretches:
        for record, seconds in steps:
            if seconds <= 0:  # a clock was set back
                continue
            if served:
                kind = (-1, record.chunks, *(_rough(n) for n in (record.decodes, record.prefill_tokens)))
            else:
                near = round(math.log(record.decode_context) / _NEAR) if record.decodes else 0
                kind = (record.decodes, record.chunks, record.prefill_tokens, record.prefill_context, near)
            kinds.setdefault(kind, []).append((cold, Sample(record, seconds / pace.at(record.end))))
    return [_served(_warm(found)) if kind[0] < 0 else _point(_warm(found)) for kind, found in kinds.items()]


def _served_and_told(stretches: Sequence[_Stretch], pace: Pace, model: StepModel) -> list[list[tuple[float, float]]]:
    """Of each served load, but for those of a cold engine: seconds that ``model`` says and that the steps took, in order."""
    return [
        [
            (told, s.seconds / pace.at(s.record.end))
            for s in stretch.steps
            if s.seconds > 0 and (told := model.predict(StepFeatures.of(s.record))) > 0
        ]
        for stretch in stretches
        if stretch.served and not stretch.cold
    ]


def _warm(found: Sequence[tuple[bool, Sample]]) -> list[Sample]:
    """Those of an engine no longer cold, where there are some."""
    later = [sample for cold, sample in found if not cold]
    return later if len(later) >= _LATER else [sample for _, sample in found]


def _rough(number: int) -> int:
    """Equal for numbers within an eighth of each other, or so."""
    return round(math.log(number) * 8) if number else -1


def _point(found: list[Sample]) -> StepPoint:
    seconds = [s.seconds for s in found]
    if len(seconds) > 1 and seconds[0] > _FIRST * statistics.median(seconds[1:]):
        found, seconds = found[1:], seconds[1:]
    return _summed_up(region_of(found[0].record), statistics.median(seconds), found)


def _served(found: list[Sample]) -> StepPoint:
    """Their mean, but for stalls."""
    middle = statistics.median(s.seconds for s in found)
    kept = [s for s in found if s.seconds < _STALL * middle]
    point = _summed_up(SERVED, statistics.fmean(s.seconds for s in kept), kept)
    return point.model_copy(update={"spread": max(point.spread, _UNLIKE)}) if len(kept) < 4 else point


def _summed_up(region: str, seconds: float, found: Sequence[Sample]) -> StepPoint:
    times = [s.seconds for s in found]
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 3 else (min(times), seconds, max(times))
    kinds = [StepFeatures.of(s.record) for s in found]
    means = {name: round(statistics.fmean(getattr(k, name) for k in kinds)) for name in StepFeatures._fields}
    return StepPoint(region=region, seconds=seconds, spread=(high - low) / seconds, repeats=len(times), **means)


def region_of(record: StepRecord) -> str:
    """Which part of the plan a planned step belongs to."""
    if not record.prefill_tokens:
        return "decode"
    if record.decodes:
        return "mixed"
    return "prefill" if record.prefill_context == record.prefill_tokens else "prefix"


def _speed(prompts: Sequence[Sample], decodes: Sequence[Sample]) -> Pilot:
    """The pilot's figures. Raises :class:`EvaluationError` when it holds no prompt or no decode."""
    each = [s.seconds / s.record.prefill_tokens for s in prompts if s.record.prefill_tokens >= 8]
    if not each:
        raise EvaluationError("the engine computed no prompt in the calibration's pilot")
    return Pilot(min(each), statistics.median(_decodes(decodes)))


def _anchored(anchor: Sequence[Sample]) -> float:
    """Seconds of an anchor: its prompts, and as many typical decode steps as there should be."""
    prompts = sum(s.seconds for s in anchor[1:] if s.record.prefill_tokens)
    return prompts + ANCHOR_STEPS * statistics.median(_decodes(anchor))


def _decodes(anchor: Sequence[Sample]) -> list[float]:
    seconds = [s.seconds for s in anchor if not s.record.prefill_tokens]
    if not seconds:
        raise EvaluationError("the engine made no decode step in the calibration's anchor")
    return seconds
