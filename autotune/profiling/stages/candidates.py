"""The candidates: settings worth measuring, simulated under seeds that the search has not seen.

Whoever was best among hundreds was also lucky. And the cost model is a few percent wrong, for some settings more than for
others: of two that meet the SLO with every request at the speed it says, that is better which still does at less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from autotune.engines.defaults import VLLM_LABEL
from autotune.profile.callable import StrategyName, setting_of
from autotune.profile.parts import KnobsField, Part, Point
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, pareto, point, points
from autotune.profiling.setup import Comparison, Setup
from autotune.profiling.space import NEAR_BEST, alike, is_baseline
from autotune.profiling.stages.context import Context
from autotune.profiling.target import Simulates
from autotune.profiling.timing import CANDIDATES
from runtime.knobs import Knobs

MOST = 16
_FEWEST = 4
_NEARLY = 0.95  # of the best goodput: where what else a setting is good at decides
SLOWEST, FASTEST = 0.95, 1.05  # in units of the speed that is taken for true
_SPEEDS = (SLOWEST, 1.0, FASTEST)


class Candidate(Part):
    """A setting worth measuring. ``point``: its simulation under fresh seeds, all runs together; ``tokens``, ``running``:
    in a step or a call, on average. ``strategy``: of a batcher."""

    label: str
    knobs: KnobsField
    point: Point
    tokens: float
    running: float
    strategy: StrategyName | None = None

    @property
    def setting(self) -> Any:
        """What is measured: the knobs, of a batcher with their strategy."""
        return setting_of(self.knobs, self.strategy)


def candidates(context: Context, setup: Setup) -> list[Candidate]:
    """Of an engine: the best of several kinds, no two alike, and the baselines; from the study if they were chosen before."""
    key = f"candidates/{trials_name(context)}/{setup.rate:g}/{setup.speed:.6f}/{context.cost_name}"
    return stored_candidates(context, key, lambda: _chosen(context, setup))


def trials_name(context: Context[SettingT, SetupT, CostT, SpaceT]) -> str:
    """Names the trials that candidates come from: others are made when the machine turns out to be another."""
    trials = context.found.simulated
    said = "|".join(f"{run.setting} {run.score.met}" for run in trials)
    return f"{len(trials)}-{crc32(said.encode()):08x}"


def stored_candidates(
    context: Context[SettingT, SetupT, CostT, SpaceT], key: str, choose: Callable[[], Sequence[Candidate]]
) -> list[Candidate]:
    """Those that ``choose`` simulates, kept in the study under ``key`` from then on."""

    def simulated() -> dict[str, Any]:
        with context.meter.simulating():
            return {"candidates": [one.model_dump(mode="json") for one in choose()]}

    stored = context.study.measured(key, simulated, stop=context.stop)
    context.keep_time()
    made = [Candidate.model_validate(one) for one in stored["candidates"]]
    if not context.found.expected:  # or those of the last comparison stand until there is another
        context.found.candidates = [one.point for one in made]
    return made


def _chosen(context: Context, setup: Setup) -> list[Candidate]:
    """At least a few and vLLM's defaults, however late it is."""
    late = context.within(CANDIDATES)
    trials = context.found.simulated
    labels = {run.knobs: run.label for run in reversed(trials)}
    chosen = shortlist(points(trials), setup, MOST)
    for place, knobs in enumerate(setup.candidates):
        if not any(alike(knobs, known) for known in chosen):
            chosen.insert(1 + place, knobs)
    baselines = [knobs for knobs, label in labels.items() if is_baseline(label)]
    baselines.sort(key=lambda knobs: labels[knobs] != VLLM_LABEL)
    order = dict.fromkeys([*chosen[:_FEWEST], *baselines[:1], *chosen[_FEWEST:], *baselines])
    simulators = around(context, setup)
    made: list[Candidate] = []
    for knobs in order:
        context.check()
        if len(made) > _FEWEST and late():
            break
        one = candidate(labels.get(knobs, NEAR_BEST), knobs, simulators, setup)
        if is_baseline(one.label) or all(_figures(one.point) != _figures(known.point) for known in made):
            made.append(one)
    return made


def shortlist(trials: Sequence[Point], setup: Setup, count: int) -> list[Knobs]:
    """Up to ``count`` settings that are not alike: by goodput, the Pareto set first, by throughput and by headroom in turn."""
    objective = Objective.under(setup)
    merit = objective.value
    best = max(map(merit, trials), default=0.0)
    good = [p for p in trials if merit(p) >= 0.85 * best]
    front = {p.knobs for p in pareto([p for p in good if merit(p) >= _NEARLY * best])}
    if objective.name != "goodput":
        front = set()  # of goodput, and of no use
    rankings = (
        sorted(trials, key=lambda p: (p.knobs not in front, -merit(p), objective.latency(p))),
        sorted(trials, key=lambda p: (-p.throughput.mean, -merit(p))),
        sorted(good, key=lambda p: objective.latency(p)),
    )
    chosen: list[Knobs] = []
    seen: set[tuple[object, ...]] = set()  # a limit that never binds makes many settings of one behaviour
    for place in range(len(trials)):
        for ranking, every in zip(rankings, (1, 6, 6), strict=True):  # mostly by goodput: the choice is by that
            if place % every:
                continue
            found = ranking[place // every] if place // every < len(ranking) else None
            if found is None or _figures(found) in seen or any(alike(found.knobs, known) for known in chosen):
                continue
            seen.add(_figures(found))
            chosen.append(found.knobs)
            if len(chosen) == count:
                return chosen
    return chosen


def pairs(seeds: Sequence[int]) -> list[tuple[int, int]]:
    """(seed, number of a speed), for seeds from the lightest load to the heaviest.

    Of six loads speed is not correlated with load, and neither extreme meets the slowest machine: that would be a rare day.
    """
    if len(seeds) == 1:
        return [(seeds[0], speed) for speed in range(len(_SPEEDS))]
    order = {2: (1, 1), 3: (1, 0, 2)}.get(len(seeds), (1, 0, 2, 2, 0, 1))
    return list(zip(seeds, order, strict=True))


def _figures(point: Point) -> tuple[object, ...]:
    """What a simulation came to: equal for settings that behave the same from the first step to the last."""
    return (point.met, point.offered, point.throughput.mean, point.ttft_p50_ms, point.ttft_p99_ms, point.tpot_p99_ms)


def best_of(found: Sequence[Candidate], objective: Objective) -> Candidate:
    """By simulation."""
    return max(found, key=lambda one: objective.order(one.point))


def baseline_of(context: Context[SettingT, SetupT, CostT, SpaceT], found: Sequence[Candidate]) -> Candidate | None:
    """What every setting is compared with: vLLM's defaults, the batcher as it comes."""
    return next((one for one in found if one.label == context.target.baseline), None)


def around(context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT) -> list[Simulates[SettingT]]:
    """At the speeds the hardware may have."""
    return [context.simulator(setup.model_copy(update={"speed": factor * setup.speed})) for factor in _SPEEDS]


def candidate(label: str, setting: SettingT, simulators: Sequence[Simulates[SettingT]], setup: Comparison) -> Candidate:
    """One setting under the fresh seeds, each at one of the speeds; under all of them where there is but one seed."""
    runs = [
        Run.of(setting, "simulation", label, simulators[speed].long(setting, setup.rate, seed))
        for seed, speed in pairs(setup.simulated_seeds[1:])
    ]
    return Candidate(
        label=label,
        knobs=runs[0].knobs,
        strategy=runs[0].strategy,
        point=point(runs),
        tokens=sum(run.score.steps.mean_tokens for run in runs) / len(runs),
        running=sum(run.score.steps.mean_running for run in runs) / len(runs),
    )
