"""How much more goodput one contender has than another: ratios over the rounds both have, and geometric means over cases.

All contenders of a round are offered the same requests for as long, so goodputs are to each other as the numbers of requests
that met every target. Intervals are 95% percentile bootstraps as in :mod:`autotune.bench.comparing`: rounds are drawn
with replacement and, within each, blocks of a few seconds, the same draws for both sides; each case is drawn by itself, and
the mean of the logarithms is taken of every draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.bench import Contender, Estimate, Result
from autotune.bench.comparing import BLOCK_S

DRAWS = 4000

Floats = NDArray[np.float64]


class Ratio(NamedTuple):
    """``value``, and the logarithms of the draws. No draws: nothing could be compared, or of one alone nothing drawn."""

    value: float
    draws: Floats

    def estimate(self) -> Estimate:
        known = self.draws[~np.isnan(self.draws)]
        if not len(known):
            return Estimate(self.value, math.nan, math.nan)
        low, high = np.percentile(known, [2.5, 97.5], method="nearest")
        return Estimate(self.value, float(np.exp(low)), float(np.exp(high)))


def ratio(results: Sequence[Result], one: Contender, other: Contender, duration: float, seed: int) -> Ratio:
    """Requests of ``one`` within the SLO over those of ``other``, in the rounds that both have."""
    mine, theirs = ({r.turn.round: r for r in results if r.turn.contender == c} for c in (one, other))
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return Ratio(math.nan, np.empty(0))
    blocks = max(1, round(duration / BLOCK_S))
    tables = [np.array([_by_block(found[r], duration, blocks) for r in both]) for found in (mine, theirs)]
    if len(both) * blocks < 2:  # every draw is the same
        return Ratio(_value(tables), np.empty(0))
    rng = np.random.default_rng(seed)
    rounds = rng.integers(0, len(both), size=(DRAWS, len(both), 1))
    picked = rng.integers(0, blocks, size=(DRAWS, len(both), blocks))
    above, below = (table[rounds, picked].sum(axis=(1, 2)) for table in tables)
    with np.errstate(divide="ignore", invalid="ignore"):  # nothing within the SLO on a side: infinite, or unknown
        draws = np.log(above) - np.log(below)
    return Ratio(_value(tables), draws)


def _value(tables: Sequence[Floats]) -> float:
    """The first sum over the second; infinite, or NaN, where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(tables[0].sum() / tables[1].sum())


def ratio_of_sums(above: Sequence[float], below: Sequence[float], seed: int) -> Estimate:
    """The sum of ``above`` over that of ``below``, of which each round has one; rounds are drawn with replacement.

    A single round has no interval, and none no value.
    """
    if not above:
        return Estimate(math.nan, math.nan, math.nan)
    value = math.fsum(above) / math.fsum(below)
    if len(above) < 2:
        return Estimate(value, math.nan, math.nan)
    drawn = np.random.default_rng(seed).integers(0, len(above), size=(DRAWS, len(above)))
    draws = np.array(above)[drawn].sum(axis=1) / np.array(below)[drawn].sum(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def geometric_mean(ratios: Sequence[Ratio]) -> Estimate:
    """Of those that are known; NaN of none. No interval where one of them has none."""
    known = [r for r in ratios if not math.isnan(r.value)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.exp(np.mean([np.log(r.value) for r in known])))
        draws = np.mean([r.draws for r in known], axis=0) if all(len(r.draws) for r in known) else np.empty(0)
    return Ratio(value, draws).estimate()


def _by_block(result: Result, duration: float, blocks: int) -> Floats:
    """Requests within the SLO, by when they were due."""
    due = [outcome.due for outcome in result.outcomes if outcome.met]
    return np.histogram(np.clip(due, 0, duration), bins=blocks, range=(0, duration))[0].astype(float)


def words(estimate: Estimate) -> str:
    """``1.07 [0.96–1.29]``; ``1.07`` without an interval."""
    if math.isnan(estimate.value):
        return "–"
    if math.isnan(estimate.low):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.2f}–{estimate.high:.2f}]"


def number(value: float) -> float | None:
    """For JSON: None where it is not known."""
    return round(value, 4) if math.isfinite(value) else None


def interval(estimate: Estimate) -> list[float | None]:
    return [number(estimate.low), number(estimate.high)]
