"""The finalists: settings worth measuring, simulated under seeds that the search has not seen.

Whoever was best among hundreds was also lucky. And the cost model is a few percent wrong, for some settings more than for
others: of two that keep all promises at the speed it says, that is better which keeps them at less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.profile.parts import KnobsField, Part, Point
from autotune.profiling.choice import alike, latency
from autotune.profiling.points import Run, pareto, point, points
from autotune.profiling.setup import Setup
from autotune.profiling.simulator import Simulator
from autotune.profiling.space import VLLM_LABEL, is_yardstick
from autotune.profiling.stages.context import Context
from autotune.profiling.timing import FINALISTS
from runtime.knobs import Knobs
from runtime.slo import SLO

MOST = 16
_FEWEST = 4
_NEARLY = 0.95  # of the best goodput: where what else a setting is good at decides
_SPEEDS = (0.95, 1.0, 1.05)  # in units of the speed that is taken for true
CANDIDATE = "near the best"


class Finalist(Part):
    """A setting worth measuring. ``point``: its simulation under fresh seeds, all runs together; ``tokens``, ``running``:
    in a step, on average."""

    label: str
    knobs: KnobsField
    point: Point
    tokens: float
    running: float


def finalists(context: Context, setup: Setup) -> list[Finalist]:
    """The best of several kinds, no two alike, and the yardsticks; from the study if they were chosen before."""

    def choose() -> dict[str, Any]:
        with context.meter.simulating():
            return {"finalists": [final.model_dump(mode="json") for final in _chosen(context, setup)]}

    key = f"finalists/{len(context.found.simulated)}/{setup.rate:g}/{setup.speed:.6f}"
    stored = context.study.measured(key, choose, stop=context.stop)
    context.keep_time()
    made = [Finalist.model_validate(final) for final in stored["finalists"]]
    if not context.found.expected:  # or those of the last comparison stand until there is another
        context.found.finalists = [final.point for final in made]
    return made


def _chosen(context: Context, setup: Setup) -> list[Finalist]:
    """At least a few and vLLM's defaults, however late it is."""
    late = context.within(FINALISTS)
    trials = context.found.simulated
    labels = {run.knobs: run.label for run in reversed(trials)}
    chosen = shortlist(points(trials), setup, MOST)
    for place, knobs in enumerate(setup.candidates):
        if not any(alike(knobs, known) for known in chosen):
            chosen.insert(1 + place, knobs)
    yardsticks = [knobs for knobs, label in labels.items() if is_yardstick(label)]
    yardsticks.sort(key=lambda knobs: labels[knobs] != VLLM_LABEL)
    order = dict.fromkeys([*chosen[:_FEWEST], *yardsticks[:1], *chosen[_FEWEST:], *yardsticks])
    simulators = around(context, setup)
    made: list[Finalist] = []
    for knobs in order:
        context.check()
        if len(made) > _FEWEST and late():
            break
        final = finalist(labels.get(knobs, CANDIDATE), knobs, simulators, setup)
        if is_yardstick(final.label) or all(_figures(final.point) != _figures(known.point) for known in made):
            made.append(final)
    return made


def shortlist(trials: Sequence[Point], setup: Setup, count: int) -> list[Knobs]:
    """Up to ``count`` settings that are not alike: by goodput, the Pareto set first, by throughput and by headroom in turn."""
    best = max((p.goodput.mean for p in trials), default=0.0)
    good = [p for p in trials if p.goodput.mean >= 0.85 * best]
    front = {p.knobs for p in pareto([p for p in good if p.goodput.mean >= _NEARLY * best])}
    rankings = (
        sorted(trials, key=lambda p: (p.knobs not in front, -p.goodput.mean, latency(p, setup.slo))),
        sorted(trials, key=lambda p: (-p.throughput.mean, -p.goodput.mean)),
        sorted(good, key=lambda p: latency(p, setup.slo)),
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


def best_of(finals: Sequence[Finalist], slo: SLO) -> Finalist:
    """By simulation: most in SLO, of equals the quicker."""
    return max(finals, key=lambda f: (f.point.attainment, -latency(f.point, slo)))


def baseline_of(finals: Sequence[Finalist]) -> Finalist | None:
    return next((f for f in finals if f.label == VLLM_LABEL), None)


def around(context: Context, setup: Setup) -> list[Simulator]:
    """At the speeds the hardware may have."""
    return [context.simulator(setup.model_copy(update={"speed": factor * setup.speed})) for factor in _SPEEDS]


def finalist(label: str, knobs: Knobs, simulators: Sequence[Simulator], setup: Setup) -> Finalist:
    """One setting under the fresh seeds, each at one of the speeds; under all of them where there is but one seed."""
    runs = [
        Run(stage="simulation", label=label, trial=-1, score=simulators[speed].long(knobs, setup.rate, seed))
        for seed, speed in pairs(setup.simulated_seeds[1:])
    ]
    return Finalist(
        label=label,
        knobs=knobs,
        point=point(runs),
        tokens=sum(run.score.steps.mean_tokens for run in runs) / len(runs),
        running=sum(run.score.steps.mean_running for run in runs) / len(runs),
    )
