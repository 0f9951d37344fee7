"""What served steps took beyond what a cost model says: all together, and how it scatters from step to step."""

from __future__ import annotations

import math
import statistics
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from autotune.profile.parts import JitterFacts

Served = Sequence[tuple[float, float]]
"""The steps of one load, in order: seconds that the model says, and seconds that they took."""

_LEVELS = 32
_FEWEST = 4 * _LEVELS  # steps, to say how they scatter
_LAGS = 1, 3  # steps between two that are compared: what they have in common tells how long the correlation lasts
_MOST_MEMORY = 0.98


def served_over_predicted(loads: Sequence[Served]) -> float:
    """What all steps took together over what the model says; 1 without any."""
    predicted = sum(predicted for load in loads for predicted, _ in load)
    return sum(took for load in loads for _, took in load) / predicted if predicted else 1.0


def overhead_of(loads: Sequence[Served]) -> float:
    """Seconds that serving adds to a step beyond what the model says, as short steps tell it; 0 if they took less.

    A host at work beside the engine (requests that come, tokens that are sent) costs a step of any length about the same. What
    a model says is off by some share of it, so each step counts by one over the square of its length: a long one says little.
    """
    steps = [step for load in loads for step in load]
    weight = sum(predicted**-2 for predicted, _ in steps)
    return max(0.0, sum((took - predicted) / predicted**2 for predicted, took in steps) / weight) if steps else 0.0


def jitter_of(loads: Sequence[Served]) -> JitterFacts | None:
    """How steps scatter within a load, around what the model says and the overhead; None when there are too few to tell.

    How much slower a whole load was than another is the model's error, or the machine's drift, and is left out.
    """
    more = overhead_of(loads)
    expected = [[(predicted + more, took) for predicted, took in load] for load in loads if load]
    scattered = [[(each, took / each / served_over_predicted([load])) for each, took in load] for load in expected]
    every = sorted((factor, predicted) for load in scattered for predicted, factor in load)
    if len(every) < _FEWEST:
        return None
    near, far = (_in_common(scattered, lag) for lag in _LAGS)
    memory = min(_MOST_MEMORY, (far / near) ** (1 / (_LAGS[1] - _LAGS[0]))) if near > 0 and far > 0 else 0.0
    persistent = min(1.0, near / memory) if memory else 0.0
    return JitterFacts(quantiles=tuple(_levels(every)), persistent=round(persistent, 4), memory=round(memory, 4))


def _levels(every: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Means of (factor, weight) over equal shares of the weight, scaled to a mean of 1."""
    below = list(accumulate((weight for _, weight in every), initial=0.0))
    cuts = [below[-1] * i / _LEVELS for i in range(1, _LEVELS)]
    edges = [0, *(bisect(below, cut) - 1 for cut in cuts), len(every)]
    means: list[float] = []
    for first, last in pairwise(edges):
        part = every[first : max(last, first + 1)]
        means.append(sum(f * w for f, w in part) / sum(w for _, w in part))
    scale = statistics.fmean(means)
    yield from (round(mean / scale, 5) for mean in means)


def _in_common(loads: Sequence[Sequence[tuple[float, float]]], lag: int) -> float:
    """Correlation of what steps ``lag`` apart take, of the Gaussian scores behind their ranks."""
    products = squares = 0.0
    for load in loads:
        if len(load) <= lag:
            continue
        ranks = [0.0] * len(load)
        for rank, at in enumerate(sorted(range(len(load)), key=lambda i: load[i][1])):
            ranks[at] = (rank + 0.5) / len(load) - 0.5
        products += sum(a * b for a, b in zip(ranks, ranks[lag:], strict=False))
        squares += sum(rank * rank for rank in ranks) * (len(load) - lag) / len(load)
    return 2 * math.sin(math.pi / 6 * products / squares) if squares else 0.0
