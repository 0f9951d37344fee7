"""Measures the steps of a plan on a live engine, until a cost model fitted to them stands still or the time is over.

Everything is done in rounds, each in an order of its own, so that no kind of step meets only one mood of the machine. A small
script of reference steps runs in between, and times are divided by how slow the machine then was. What is known
of a kind of step is its median; a first time that took much longer than the others (compilation, allocation) is left out, as
is all of the warm-up. An engine gets faster in its first seconds (shapes that a library meets for the first time, memory never
touched before), so what is measured in them counts only where nothing like it was measured again.

A planned step is clean: nothing arrives, nothing leaves, nobody listens. In serving all of that costs time too, and a mean over
steps is what requests feel; so part of a calibration is a load, served as :func:`autotune.measure.evaluate.evaluate` serves it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from autotune.cost.facts import JitterFacts, StepPoint
from autotune.cost.fit import FEWEST, SERVED
from autotune.cost.model import CostModel, fit_cost_model, with_predictions
from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError, evaluate, recorded
from autotune.profile.parts import ModelFacts
from autotune.profiling.drift import Drift, ReferenceStep
from autotune.profiling.serving_overhead import jitter_of, overhead_of, served_over_predicted
from autotune.profiling.step_driver import Sample, Script, StepDriver, idle_before, samples
from autotune.profiling.step_plan import REFERENCE_DECODES, CalibrationPlan, Mix, Pilot
from autotune.profiling.warnings import unseen
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from runtime.records import StepRecord
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs, StepModel

ROUNDS = 3
"""A plan is sized so that this many rounds as the first one fit into the time. Later ones serve more, so the last is cut short; a
stable fit ends sooner."""

_MOST_ROUNDS = 16
_FIRST_ROUND = 3  # times the budget that a slow machine may take for the first one
_COLD_S, _COLD = 10.0, 0.25  # seconds in which an engine may get faster, at most; of the budget at most
_LATER = 2  # times a kind of step has to come about behind them for those before to be left out
_LONG, _LONG_SHARE = 2048, 0.01  # tokens of the pilot's long prompt; of the budget that one may take
_SETTLED = 0.01  # median relative change of the predictions by another round
_REFERENCE_EVERY = 0.15  # of a round
_REFERENCE_APART = 8  # times as long as it takes, at least: on an engine whose steps are long it would be all there is
_FIRST = 1.5  # times the median of the others: a first time above that is left out
_STALL = 2.5  # times the median: above that a served step is left out
_UNLIKE = 0.2  # spread that is assumed of served steps of which there are few
_NEAR = math.log(1.1)  # contexts within a tenth of each other are one kind of step


PATIENT = SLO(ttft_ms=20_000, tpot_ms=1000)
"""Which a drain may wait for."""
_SPREAD = 1.0, 0.7  # coefficients of variation of prompts and outputs
_RUNS = itertools.count(1)


class _Stretch(NamedTuple):
    """The steps of one script."""

    cold: bool  # whether in the engine's first seconds
    steps: list[Sample]
    served: bool  # whether they are steps as they come, no two alike


class MeasuredSteps(NamedTuple):
    """``points``: one for each kind of step, at the usual speed. ``unevenness``: the slowest reference over the fastest.

    ``seconds``: on the engine's clock. ``served``: what the steps of served loads took together, stalls and all, over what a
    model fitted to the points says; 1 where none were served. ``serving_overhead_s``: what serving adds to each, as short ones
    tell it; ``jitter``: how they scattered around that, None if there were too few. ``graphs``: the steps that the engine has
    recorded.
    """

    points: list[StepPoint]
    unevenness: float
    seconds: float
    served: float
    serving_overhead_s: float
    jitter: JitterFacts | None
    graphs: StepGraphs = NO_GRAPHS

    def cost(self, seconds: float) -> CostModel:
        """The model of all of it, which took ``seconds``. Raises :class:`EvaluationError` where no model comes of the points."""
        return _fitted(
            self.points, seconds=seconds, serving_overhead_s=self.serving_overhead_s, jitter=self.jitter,
            graphs=self.graphs,
        )  # fmt: skip


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
    machine gets more for a first round, and up to as much again for what that had no time for
    (:mod:`autotune.profiling.warnings`). ``advance``: told the share that is done, and how. The engine is left idle, its knobs
    changed. Raises :class:`EvaluationError` when a request fails, too few kinds of steps came about, or no model comes of them,
    :class:`Interrupted` on ``stop``.
    """
    clock, graphs = engine.clock, engine.facts.graphs
    begun = clock.now()
    driver = StepDriver(engine, model.vocab_size, most_tokens(engine, model), seed=seed, stop=stop or (lambda: False))
    plan = CalibrationPlan(driver, engine, seed)
    driver.run(plan.reference())  # warm-up
    driver.run(plan.pilot())
    short, decodes = driver.run(plan.pilot()), driver.run(plan.reference())
    long = driver.run(plan.pilot(_LONG)) if _LONG * _token_s(short) < _LONG_SHARE * budget_s else short
    pilot = Pilot(_token_s(short), _token_s(long), statistics.median(_decodes(decodes)))
    left = budget_s - (clock.now() - begun)
    seconds = max(left, 0.2 * budget_s) / ROUNDS
    warm = begun + min(_COLD_S, _COLD * budget_s)
    plan.scripts(seconds, pilot, left)
    rng = random.Random(seed)
    stretches: list[_Stretch] = []
    references: list[ReferenceStep] = []
    points: list[StepPoint] = []
    probes: list[StepFeatures] = []
    predicted: list[float] = []

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
            if clock.now() - begun > budget_s and plan.optional(task):
                continue
            apart = max(_REFERENCE_EVERY * seconds, _REFERENCE_APART * references[-1].seconds if references else 0.0)
            if not references or clock.now() - references[-1].at > apart:
                references.append(ReferenceStep(clock.now(), _reference_seconds(driver.run(plan.reference()))))
            measure(task)
            spent = clock.now() - begun
            advance(min(1.0, spent / budget_s), f"round {number + 1}, {len(stretches)} scripts")
            if spent > budget_s * (1 if number else _FIRST_ROUND):
                break
        references.append(ReferenceStep(clock.now(), _reference_seconds(driver.run(plan.reference()))))
        points = step_points(stretches, Drift(references), graphs)
        if number == 0 and unseen(points):  # on a slow machine
            cut = clock.now()
            for least in plan.least():
                if clock.now() - cut < budget_s:
                    measure(least)
            points = step_points(stretches, Drift(references), graphs)
        if len(points) < FEWEST:
            raise EvaluationError(f"only {len(points)} kinds of steps came about; it takes {FEWEST} to fit their cost")
        fitted = _fitted(points, graphs=graphs)
        probes = probes or [StepFeatures.of(record) for stretch in stretches for record, _ in stretch.steps]
        before, predicted = predicted, [fitted.predict(step) for step in probes]
        moved = (
            statistics.median(abs(a / b - 1) for a, b in zip(predicted, before, strict=True)) if before else math.inf
        )
        if clock.now() - begun > budget_s or moved < _SETTLED:
            break
    drift = Drift(references)
    served = _served_and_predicted(stretches, drift, fitted)
    return MeasuredSteps(
        with_predictions(points, graphs),
        drift.unevenness,
        clock.now() - begun,
        served_over_predicted(served),
        overhead_of(served),
        jitter_of(served),
        graphs,
    )


def _fitted(points: Sequence[StepPoint], **known: Any) -> CostModel:
    """As :func:`~autotune.cost.model.fit_cost_model`, whose ``ValueError`` is an :class:`EvaluationError` of one line."""
    try:
        return fit_cost_model(points, **known)
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise EvaluationError(f"no cost model comes of the {len(points)} kinds of steps measured: {why}") from None


def served_steps(
    engine: Engine, model: ModelFacts, mix: Mix, *, seed: int, stop: Callable[[], bool] | None = None
) -> list[Sample]:
    """Serve ``mix`` and return its steps, in order; the engine is left idle, its knobs changed.

    Raises as :func:`~autotune.measure.evaluate.evaluate`.
    """
    limits = engine.effective_limits
    longest = max(1, most_tokens(engine, model) // 2)
    prompts, outputs = _SPREAD
    load = parse_workload(
        f"gamma:cv={mix.cv:g},prompt={mix.prompt}~{prompts:g},output={mix.output}~{outputs:g},"
        f"cap_prompt={min(longest, 8 * mix.prompt)},cap_output={min(longest, 8 * mix.output)}"
    ).at_rate(mix.rate)
    run = next(_RUNS)  # prompts of its own: no earlier run's prefixes are found in the cache
    with recorded(engine) as log:
        evaluate(
            engine,
            limits.clamp(Knobs(limits.max_batch_size, 0, limits.max_batch_size + 2 * mix.chunk, mix.chunk)),
            load,
            PATIENT,
            vocab_size=model.vocab_size,
            seed=seed,
            prompt_seed=(seed << 20) + run,
            duration=mix.seconds,
            label=f"mix-{run}",
            stop=stop,
        )
    return serving_samples(log.steps)


def serving_samples(records: Sequence[StepRecord]) -> list[Sample]:
    """Each step with the time since the one before it, unless the engine had nothing to do then."""
    return samples(records, idle_before(records), whole=True)


def most_tokens(engine: Engine, model: ModelFacts) -> int:
    """Tokens that a request of a calibration may have in all: there is to be room for another."""
    return min(model.max_model_len, engine.facts.kv_tokens // 2)


def step_points(stretches: Sequence[_Stretch], drift: Drift, graphs: StepGraphs) -> list[StepPoint]:
    """One point for each kind of step: medians, of times as the machine usually takes.

    Served steps of about as many decodes and prompt tokens that run alike by ``graphs`` make one kind, and a point at their
    means: what now and then costs more (a sequence that leaves, or needs more room) belongs to them all.
    """
    kinds: dict[tuple[int, ...], list[tuple[bool, Sample]]] = {}
    for cold, steps, served in stretches:
        for record, seconds in steps:
            if seconds <= 0:  # a clock was set back
                continue
            if served:
                kind: tuple[int, ...] = (-1, *served_kind(StepFeatures.of(record), graphs))
            else:
                near = round(math.log(record.decode_context) / _NEAR) if record.decodes else 0
                kind = (record.decodes, record.chunks, record.prefill_tokens, record.prefill_context, near)
            kinds.setdefault(kind, []).append((cold, Sample(record, seconds / drift.at(record.end))))
    return [_served(_warm(found)) if kind[0] < 0 else _point(_warm(found)) for kind, found in kinds.items()]


def _served_and_predicted(
    stretches: Sequence[_Stretch], drift: Drift, model: StepModel
) -> list[list[tuple[float, float]]]:
    """Of each served load, but for those of a cold engine: seconds that ``model`` says and that the steps took, in order."""
    return [
        [
            (predicted, s.seconds / drift.at(s.record.end))
            for s in stretch.steps
            if s.seconds > 0 and (predicted := model.predict(StepFeatures.of(s.record))) > 0
        ]
        for stretch in stretches
        if stretch.served and not stretch.cold
    ]


def _warm(found: Sequence[tuple[bool, Sample]]) -> list[Sample]:
    """Those of an engine no longer cold, where there are some."""
    later = [sample for cold, sample in found if not cold]
    return later if len(later) >= _LATER else [sample for _, sample in found]


def served_points(records: Sequence[StepRecord], graphs: StepGraphs) -> tuple[StepPoint, ...]:
    """The steps of a measurement, in order, with the time between them where the engine was not idle: a point for each kind.

    Seconds are the mean of all of a kind, stalls included: together they are what all steps took.
    """
    kinds: dict[tuple[int, ...], list[Sample]] = {}
    for sample in serving_samples(records):
        if sample.seconds > 0 and not sample.record.failed:  # a clock was set back
            kinds.setdefault(served_kind(StepFeatures.of(sample.record), graphs), []).append(sample)
    return tuple(
        _unsure(_summed_up(SERVED, statistics.fmean(s.seconds for s in found), found)) for found in kinds.values()
    )


def _unsure(point: StepPoint) -> StepPoint:
    """A served point of few steps says little of its spread."""
    return point.model_copy(update={"spread": max(point.spread, _UNLIKE)}) if point.repeats < 4 else point


def served_kind(step: StepFeatures, graphs: StepGraphs) -> tuple[int, int, int, int]:
    """Equal for served steps of about as many decodes and prompt tokens that run as the same recording, or as none: the mean of
    such steps is padded to what each of them is."""
    return step.chunks, _rough(step.decodes), _rough(step.prefill_tokens), graphs.rows_of(step)


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
    usual = [s for s in found if s.seconds < _STALL * middle]
    return _unsure(_summed_up(SERVED, statistics.fmean(s.seconds for s in usual), usual))


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


def _token_s(prompts: Sequence[Sample]) -> float:
    """Seconds of a prompt token in the pilot. Raises :class:`EvaluationError` when it holds no prompt."""
    each = [s.seconds / s.record.prefill_tokens for s in prompts if s.record.prefill_tokens >= 8]
    if not each:
        raise EvaluationError("the engine computed no prompt in the calibration's pilot")
    return min(each)


def _reference_seconds(reference: Sequence[Sample]) -> float:
    """Seconds of a reference: its prompts, and as many typical decode steps as there should be."""
    prompts = sum(s.seconds for s in reference[1:] if s.record.prefill_tokens)
    return prompts + REFERENCE_DECODES * statistics.median(_decodes(reference))


def _decodes(reference: Sequence[Sample]) -> list[float]:
    seconds = [s.seconds for s in reference if not s.record.prefill_tokens]
    if not seconds:
        raise EvaluationError("the engine made no decode step in the calibration's reference steps")
    return seconds
