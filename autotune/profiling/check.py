"""Whether a profile is still true: a few steps of its engine, measured again and held against its cost model.

Small scripts of the calibration (:mod:`autotune.profiling.step_plan`) are run in rounds, each in an order of its own, so that
no kind of step meets only one mood of the machine. In each round, the median of measured over predicted time is taken for every
region (decode, prefill, …); the median over the rounds is the difference. It is believed as far as its *doubt* goes:

- the distribution-free 99% interval of a median over the rounds (order statistics; few rounds: all of them), and
- the cost model's own cross-validated error in that region: the standard error of a median over the kinds of steps,

added as squares. Steps are held against the model that was fitted to planned ones alone, as these are: serving costs more, and
the model that simulations go by says so. A profile that has no such model is off by that everywhere, so there the error is
not averaged out. With ``threshold`` as what matters:

- *stale*: the difference is above the threshold, and less its doubt still above half of it;
- *fits*: neither the difference nor the doubt is above the threshold;
- *cannot tell*: anything else; and slower steps while other processes took processors from the engine.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import binom

from autotune.cost.fit import SERVED
from autotune.cost.model import CostModel
from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError
from autotune.profile.parts import CostFacts, ModelFacts
from autotune.profiling.step_driver import Sample, StepDriver
from autotune.profiling.step_plan import Pilot, StepPlan
from autotune.profiling.steps import region_of, room_of
from runtime.step_model import StepFeatures

Verdict = Literal["fits", "stale", "unclear"]

THRESHOLD = 0.10
"""A difference that matters, as a share: settings chosen for steps of one length hold for those a tenth longer."""

_ROUNDS = 8  # of them, scripts are sized so that this many fit into the time
_FEWEST = 6  # rounds that count, whatever the time
_WARM_UP = 0.5  # of the budget, before it: an engine gets faster in its first seconds
_MOST_OVER = 4.0  # times the budget, for a machine far slower than the profile says
_LEVEL = 0.99  # of each of four regions, so that all of them are right 19 times in 20 and more
CROWDED = 0.25  # cores taken from the engine that slow it down noticeably
_OF_MEDIAN = math.sqrt(math.pi / 2) / 0.6745  # ÷ √n: standard error of a median of n, from their median error
_ORDER = ("decode", "prefill", "prefix", "mixed")


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
    def doubt(self) -> float:
        return math.hypot(self.noise, self.model)

    @property
    def verdict(self) -> Verdict:
        size = abs(self.difference)
        if size > self.threshold and size - self.doubt > self.threshold / 2:
            return "unclear" if self.crowded and self.difference > 0 else "stale"
        return "fits" if max(size, self.doubt) <= self.threshold else "unclear"

    def words(self, *, doubt: bool = False) -> str:
        """``decode steps 14% slower``, with ± if ``doubt``."""
        how = "slower" if self.difference >= 0 else "faster"
        about = f" (±{self.doubt:.0%})" if doubt else ""
        return f"{self.region} {self.noun} {abs(self.difference):.0%} {how}{about}"


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
            return f"stale: {', '.join(r.words() for r in about)} than the profile"
        if verdict == "fits":
            worst = max(abs(r.difference) for r in about)
            rough = [r.region for r in self.regions if r.verdict != verdict]
            but = f" (of {', '.join(rough)} steps its cost model knows too little)" if rough else ""
            return f"fits: no kind of {self.kind} differs from the profile by more than {worst:.0%}{but}"
        if any(r.crowded for r in about):
            why = f"other processes took {self.taken:.1f} cores meanwhile"
        elif any(r.noise >= r.model for r in about):
            why = "machine too noisy"
        else:
            why = "the profile's cost model is too rough"
        return f"cannot tell: {why} ({', '.join(r.words(doubt=True) for r in about)})"

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
                    "doubt": round(r.doubt, 4),
                    "noise": round(r.noise, 4),
                }
                for r in self.regions
            ],
        }


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
    cost = CostModel.from_facts(facts.planned or facts)
    clock = engine.clock
    begun = clock.now()
    driver = StepDriver(engine, model.vocab_size, room_of(engine, model), seed=seed, stop=stop or (lambda: False))
    plan = StepPlan(driver, engine, seed)
    expected = Pilot(
        cost.predict(StepFeatures(0, 0, 256, 256, 256 * 257 // 2, 1)) / 256, cost.predict(StepFeatures(8, 512, 0, 0, 0))
    )
    scripts = plan.scripts(budget_s / _ROUNDS, expected)
    rng = random.Random(seed)
    rounds: list[list[Sample]] = []
    warm = 0.0  # when the warm-up was over
    while True:
        rounds.append([s for script in rng.sample(scripts, len(scripts)) for s in driver.run(script())])
        spent = clock.now() - begun
        advance(min(1.0, spent / (1 + _WARM_UP) / budget_s), f"round {len(rounds)}" if warm else "warm-up")
        if not warm:
            if spent >= _WARM_UP * budget_s:
                warm = spent
                rounds.clear()
        elif (spent - warm >= budget_s and len(rounds) >= _FEWEST) or spent >= _MOST_OVER * budget_s:
            break
    return compare(rounds, cost, threshold, clock.now() - begun - warm, taken())


def compare(
    rounds: Sequence[Sequence[Sample]], cost: CostModel, threshold: float, seconds: float, taken: float = 0.0
) -> Check:
    """The rounds held against ``cost``, of planned steps if there is one. Raises :class:`EvaluationError` without any step."""
    regions: dict[str, list[list[tuple[float, float, Sample]]]] = {}
    for number, samples in enumerate(rounds):
        for sample in samples:
            predicted = cost.predict(StepFeatures.of(sample.record))
            found = regions.setdefault(region_of(sample.record), [[] for _ in rounds])
            found[number].append((sample.seconds / predicted, predicted, sample))
    if not regions:
        raise EvaluationError("no step came about that could be compared with the profile")
    return Check(
        tuple(
            _region(name, regions[name], cost.facts, threshold, taken > CROWDED) for name in _ORDER if name in regions
        ),
        len(rounds),
        seconds,
        threshold,
        taken,
    )


def _region(
    name: str,
    rounds: Sequence[Sequence[tuple[float, float, Sample]]],
    facts: CostFacts,
    threshold: float,
    crowded: bool,
) -> RegionCheck:
    served = any(r.region == SERVED for r in facts.regions)  # then what it says of planned steps is off to one side
    medians = [statistics.median(ratio for ratio, _, _ in one) for one in rounds if one]
    everything = [entry for one in rounds for entry in one]
    middle = statistics.median(medians)
    low, high = median_interval(medians)
    kinds = {(s.record.decodes, s.record.chunks, s.record.prefill_tokens) for _, _, s in everything}
    typical = statistics.median(predicted for _, predicted, _ in everything)
    return RegionCheck(
        region=name,
        steps=len(everything),
        kinds=len(kinds),
        measured_ms=typical * middle * 1000,
        predicted_ms=typical * 1000,
        difference=middle - 1,
        noise=max(middle - low, high - middle),
        model=facts.region_error(name) * (1 if served else _OF_MEDIAN / math.sqrt(len(kinds))),
        threshold=threshold,
        crowded=crowded,
    )


def median_interval(values: Sequence[float], level: float = _LEVEL) -> tuple[float, float]:
    """An interval that holds the median with probability ``level`` or more, whatever the distribution.

    Between the k-th smallest and the k-th largest value, k the largest for which the sign test allows it (Thompson 1936).
    Fewer than six values hold it with less, between the smallest and the largest.
    """
    ordered = sorted(values)
    k = max(1, int(binom.ppf((1 - level) / 2, len(ordered), 0.5)))
    return ordered[k - 1], ordered[-k]
