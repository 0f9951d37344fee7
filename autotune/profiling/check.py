"""Whether a profile is still true: a few steps of its engine, or calls of its callable, measured anew and held against its model.

Small scripts of the calibration (:mod:`autotune.profiling.step_plan`), or calls of a few sizes with real inputs drawn anew, are
run in rounds, each in an order of its own, so that no kind of step meets only one mood of the machine. In each round, the
median of measured over predicted time is taken for every region (decode, prefill, …; a size); the median over the rounds is the
difference. It is believed as far as its *uncertainty* goes:

- the distribution-free 99% interval of a median over the rounds (order statistics; few rounds: all of them), and
- the cost model's own cross-validated error in that region: the standard error of a median over the kinds of steps (of a
  callable the typical error of its formula),

added as squares. Steps are held against the model that was fitted to planned ones alone, as these are: serving costs more, and
the model that simulations go by says so. A profile that has no such model is off by that everywhere, so there the error is
not averaged out. With ``threshold`` as what matters:

- *stale*: the difference is above the threshold, and less its uncertainty still above half of it;
- *fits*: neither the difference nor the uncertainty is above the threshold;
- *cannot tell*: anything else; and slower steps while other processes took processors from the engine (calls: up to twice
  as slow).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from scipy.stats import binom
from scipy.stats import t as student_t

from autotune.cost.fit import SERVED
from autotune.cost.model import CostModel
from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.callable import CallableProfile
from autotune.profile.parts import CostFacts, ModelFacts
from autotune.profiling.calls import OutOfMemory, TimedCalls
from autotune.profiling.step_driver import Sample, StepDriver
from autotune.profiling.step_plan import CalibrationPlan, Pilot
from autotune.profiling.steps import most_tokens, region_of
from autotune.profiling.subject import Subject
from runtime.step_model import StepFeatures

Verdict = Literal["fits", "stale", "unclear"]
MeasuredT = TypeVar("MeasuredT")

THRESHOLD = 0.10
"""A difference that matters, as a share: settings chosen for steps of one length hold for those a tenth longer."""

_ROUNDS = 8  # of them, scripts are sized so that this many fit into the time
_FEWEST, _MOST = 6, 500  # rounds that count, whatever the time
_WARM_UP = 0.5  # of the budget, before it: an engine gets faster in its first seconds
_MOST_OVER = 4.0  # times the budget, for a machine far slower than the profile says
_LEVEL = 0.99  # of each of four regions, so that all of them are right 19 times in 20 and more
CROWDED = 0.25  # cores taken from the engine that slow it down noticeably
_OF_MEDIAN = math.sqrt(math.pi / 2) / 0.6745  # ÷ √n: standard error of a median of n, from their median error
_ORDER = ("decode", "prefill", "prefix", "mixed")
_EXCUSED = 2.0  # times as slow as a call may be because of other processes


@dataclass(frozen=True)
class RegionCheck:
    """One region. ``difference``: 0.14 is 14% slower than the profile; ``noise``: of that, by the spread of the rounds;
    ``model``: of that, by the cost model's own error. ``measured_ms``, ``predicted_ms``: of the median step."""

    region: str
    steps: int
    kinds: int
    measured_ms: float
    predicted_ms: float
    difference: float
    noise: float
    model: float
    threshold: float
    crowded: bool = False
    noun: str = "steps"

    @property
    def uncertainty(self) -> float:
        return math.hypot(self.noise, self.model)

    @property
    def verdict(self) -> Verdict:
        size = abs(self.difference)
        if size > self.threshold and size - self.uncertainty > self.threshold / 2:
            return "unclear" if self.crowded and self.difference > 0 else "stale"
        return "fits" if max(size, self.uncertainty) <= self.threshold else "unclear"

    def words(self, *, uncertainty: bool = False) -> str:
        """``decode steps 14% slower``, with ± if ``uncertainty``."""
        how = "slower" if self.difference >= 0 else "faster"
        about = f" (±{self.uncertainty:.0%})" if uncertainty else ""
        size = f"{1 + self.difference:.3g} times" if self.difference >= 1 else f"{abs(self.difference):.0%}"
        return f"{self.region} {self.noun} {size} {how}{about}"


@dataclass(frozen=True)
class Check:
    """What was found. ``rounds`` and ``seconds``: how long it took to find it; ``taken``: cores that others took from it."""

    regions: tuple[RegionCheck, ...]
    rounds: int
    seconds: float
    threshold: float
    taken: float
    kind: str = "step"

    @property
    def verdict(self) -> Verdict:
        """Stale if any region is; else unclear if any is of which the cost model knows enough, or if it does of none."""
        if any(region.verdict == "stale" for region in self.regions):
            return "stale"
        known = [region for region in self.regions if region.model <= self.threshold]
        return "fits" if known and all(region.verdict == "fits" for region in known) else "unclear"

    @property
    def sentence(self) -> str:
        verdict = self.verdict
        about = [region for region in self.regions if region.verdict == verdict]
        if verdict == "stale":
            return f"stale: {', '.join(r.words() for r in about)} than the profile; to renew it, profile this machine again"
        if verdict == "fits":
            worst = max(0.01, *(abs(r.difference) for r in about))  # what is not known cannot be "0%"
            rough = [f"{r.region} {r.noun}" for r in self.regions if r.verdict != verdict]
            but = f" (of {', '.join(rough)} its cost model knows too little)" if rough else ""
            return f"fits: no kind of {self.kind} differs from the profile by more than {worst:.0%}{but}"
        if any(r.crowded for r in about):
            why = f"other processes took {self.taken:.1f} cores meanwhile"
            then = "check again when they have ended"
        elif any(r.noise >= r.model for r in about):
            why, then = "machine too noisy", "check again when it is idle, or with a longer --budget"
        else:
            why, then = "the profile's cost model is too rough", "profile this machine again, with a longer --budget"
        return f"cannot tell: {why} ({', '.join(r.words(uncertainty=True) for r in about)}); {then}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "threshold": self.threshold,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 2),
            "cores_taken_by_others": round(self.taken, 2),
            "regions": [
                {
                    "region": r.region,
                    "verdict": r.verdict,
                    "steps": r.steps,
                    "kinds": r.kinds,
                    "measured_ms": round(r.measured_ms, 4),
                    "predicted_ms": round(r.predicted_ms, 4),
                    "difference": round(r.difference, 4),
                    "uncertainty": round(r.uncertainty, 4),
                    "noise": round(r.noise, 4),
                }
                for r in self.regions
            ],
        }


class Timing(NamedTuple):
    """One step or call: the ``region`` and the ``kind`` it is of, the seconds it took, and those it was predicted to take."""

    region: str
    kind: tuple[int, ...]
    seconds: float
    predicted: float


def check_steps(
    engine: Engine,
    model: ModelFacts,
    facts: CostFacts,
    *,
    budget_s: float,
    threshold: float = THRESHOLD,
    seed: int = 0,
    stop: Callable[[], bool] | None = None,
    advance: Callable[[float, str], None] = lambda share, note: None,
    taken: Callable[[], float] = lambda: 0.0,
) -> Check:
    """Measure steps of ``engine``, which must be idle, for ``budget_s`` seconds on its clock, and compare with ``facts``.

    Rounds that do not count come before, for half as long.

    ``taken``: asked at the end how many cores other processes took from the engine.

    Raises ``ValueError`` for facts that are no cost model, :class:`EvaluationError` when a request fails,
    :class:`Interrupted` on ``stop``. The engine is left idle, its knobs changed.
    """
    cost = CostModel(facts.planned or facts)
    driver = StepDriver(engine, model.vocab_size, most_tokens(engine, model), seed=seed, stop=stop or (lambda: False))
    plan = CalibrationPlan(driver, engine, seed)
    token = cost.predict(StepFeatures(0, 0, 256, 256, 256 * 257 // 2, 1)) / 256
    expected = Pilot(token, token, cost.predict(StepFeatures(8, 512, 0, 0, 0)))
    scripts = plan.scripts(budget_s / _ROUNDS, expected)
    rng = random.Random(seed)

    def once() -> list[Sample]:
        return [s for script in rng.sample(scripts, len(scripts)) for s in driver.run(script())]

    rounds, seconds = in_rounds(once, engine.clock.now, budget_s, advance)
    return compare(rounds, cost, threshold, seconds, taken())


def check_calls(
    profile: CallableProfile,
    subject: Subject,
    *,
    budget_s: float,
    threshold: float = THRESHOLD,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
    advance: Callable[[float, str], None] = lambda share, note: None,
    taken: Callable[[], float] = lambda: 0.0,
) -> Check:
    """Time calls of ``subject`` for ``budget_s`` seconds, and compare with ``profile``; the rest as in :func:`check_steps`.

    Raises :class:`InputError` when the function fails, :class:`EvaluationError` without memory for a size that ran,
    :class:`Interrupted` on ``stop``.
    """
    sizes, rng = sizes_of(profile), random.Random(seed)

    def once() -> list[Timing]:
        found = []
        for size in rng.sample(sizes, len(sizes)):
            try:
                cost, seconds = calls.once(size, rng)
            except OutOfMemory:
                raise EvaluationError(
                    f"{subject.name} runs out of memory with {size} items, which it did not"
                ) from None
            found.append(Timing(str(size), (size,), seconds, max(predicted_s(profile, size, cost), 1e-9)))
            if stop():
                raise Interrupted("stopped")
        return found

    with closing(TimedCalls(subject, seed, clock, stop)) as calls:
        rounds, seconds = in_rounds(once, clock, budget_s, advance)
    others = taken()
    regions = []
    for size in sizes:
        found = _region(str(size), rounds, _always(_error_at(profile, size)), threshold)
        crowded = others > CROWDED and 1 + found.difference < _EXCUSED
        noun = f"of {size} item{'s' * (size > 1)}"
        regions.append(replace(found, region="calls", noun=noun, crowded=crowded))
    return Check(tuple(regions), len(rounds), seconds, threshold, others, kind="call")


def in_rounds(
    measure: Callable[[], list[MeasuredT]],
    clock: Callable[[], float],
    budget_s: float,
    advance: Callable[[float, str], None],
) -> tuple[list[list[MeasuredT]], float]:
    """Rounds of what ``measure`` finds, for ``budget_s`` seconds behind a warm-up half as long, and the seconds they took."""
    begun, warm = clock(), 0.0  # when the warm-up was over
    rounds: list[list[MeasuredT]] = []
    while True:
        rounds.append(measure())
        spent = clock() - begun
        advance(min(1.0, spent / (1 + _WARM_UP) / budget_s), f"round {len(rounds)}" if warm else "warm-up")
        if not warm:
            if spent >= _WARM_UP * budget_s:
                warm = spent
                rounds.clear()
        elif (
            (spent - warm >= budget_s and len(rounds) >= _FEWEST)
            or spent >= _MOST_OVER * budget_s
            or len(rounds) >= _MOST
        ):
            return rounds, spent - warm


def compare(
    rounds: Sequence[Sequence[Sample]], cost: CostModel, threshold: float, seconds: float, taken: float = 0.0
) -> Check:
    """The rounds held against ``cost``, of planned steps if there is one. Raises :class:`EvaluationError` without any step."""
    timings = [[_timing(sample, cost) for sample in one] for one in rounds]
    met = {timing.region for one in timings for timing in one}
    if not met:
        raise EvaluationError("no step came about that could be compared with the profile")
    facts = cost.facts
    served = any(r.region == SERVED for r in facts.regions)  # then what it says of planned steps is off to one side

    def checked(name: str) -> RegionCheck:
        def error(kinds: int) -> float:
            return facts.region_error(name) * (1 if served else _OF_MEDIAN / math.sqrt(kinds))

        return replace(_region(name, timings, error, threshold), crowded=taken > CROWDED)

    return Check(tuple(checked(name) for name in _ORDER if name in met), len(rounds), seconds, threshold, taken)


def _timing(sample: Sample, cost: CostModel) -> Timing:
    record = sample.record
    kind = (record.decodes, record.chunks, record.prefill_tokens)
    return Timing(region_of(record), kind, sample.seconds, cost.predict(StepFeatures.of(record)))


def _region(
    name: str, rounds: Sequence[Sequence[Timing]], error: Callable[[int], float], threshold: float
) -> RegionCheck:
    """``error``: the model's own, of a median over so many kinds."""
    mine = [[timing for timing in one if timing.region == name] for one in rounds]
    medians = [statistics.median(timing.seconds / timing.predicted for timing in one) for one in mine if one]
    everything = [timing for one in mine for timing in one]
    middle = statistics.median(medians)
    noise = _uncertain(medians)
    kinds = len({timing.kind for timing in everything})
    typical = statistics.median(timing.predicted for timing in everything)
    return RegionCheck(
        region=name,
        steps=len(everything),
        kinds=kinds,
        measured_ms=typical * middle * 1000,
        predicted_ms=typical * 1000,
        difference=middle - 1,
        noise=noise,
        model=error(kinds),
        threshold=threshold,
    )


def _always(error: float) -> Callable[[int], float]:
    """``error``, of however many kinds."""
    return lambda kinds: error


def _uncertain(medians: Sequence[float]) -> float:
    """By how much the median of ``medians`` may be off: the sign test's interval, of few rounds Student's t, of one anything."""
    count = len(medians)
    if count < 2:
        return 1.0
    middle = statistics.median(medians)
    if count < _FEWEST:
        spread = max(statistics.stdev(medians), 1e-3 * middle)
        return float(student_t.ppf((1 + _LEVEL) / 2, count - 1)) * spread / math.sqrt(count)
    low, high = median_interval(medians)
    return max(middle - low, high - middle)


def sizes_of(profile: CallableProfile) -> list[int]:
    """One item, the size of the highest throughput inside the SLO, and as many as were tried."""
    tried = sorted({group.items for group in profile.service.groups})
    best = max((size for size in tried if size <= profile.service.capacity_size), default=tried[0])
    return sorted({tried[0], best, tried[-1]})


def predicted_s(profile: CallableProfile, items: int, cost: float) -> float:
    """Seconds of a call of so many items by the formula of ``profile``, corrected by what calls of that size took when it was
    made: no formula fits every function at every size."""
    off = _off(profile, items)
    return _formula_ms(profile, items, cost) * (statistics.median(off) if off else 1.0) / 1e3


def _error_at(profile: CallableProfile, items: int) -> float:
    """Median relative error of that, over the profile's own calls of this size; that of the formula where these are one, which
    tells nothing of how far it is off itself."""
    off = _off(profile, items)
    if len(off) < 2:
        return profile.service.error
    middle = statistics.median(off)
    return statistics.median(abs(one / middle - 1) for one in off)


def _off(profile: CallableProfile, items: int) -> list[float]:
    """How many times as long as by the formula the profile's calls of this size took."""
    return [g.ms / _formula_ms(profile, g.items, g.cost) for g in profile.service.groups if g.items == items]


def _formula_ms(profile: CallableProfile, items: int, cost: float) -> float:
    service = profile.service
    return max(service.fixed_ms + service.per_item_ms * items + service.per_cost_ms * cost, 1e-6)


def median_interval(values: Sequence[float], level: float = _LEVEL) -> tuple[float, float]:
    """An interval that holds the median with probability ``level`` or more, whatever the distribution.

    Between the k-th smallest and the k-th largest value, k the largest for which the sign test allows it (Thompson 1936).
    Of fewer than eight values the interval is between the smallest and the largest, and at a level of 0.99 holds it with less.
    """
    ordered = sorted(values)
    k = max(1, int(binom.ppf((1 - level) / 2, len(ordered), 0.5)))
    return ordered[k - 1], ordered[-k]
