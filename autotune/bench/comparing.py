"""From turns to a comparison: estimates with intervals, and paired differences.

Intervals are 95% percentile bootstraps on two levels: rounds are drawn with replacement, and within each drawn round blocks
of a few seconds, since requests of a burst are late together (Künsch 1989; Davison and Hinkley 1997, 3.8 for the levels).
All contenders of a round are resampled with the *same* draws, so a difference is that of what met the same arrivals at the
same time of the workload. Where rounds repeat requests (a trace), all rounds of a resample take the *same* blocks, too, since a
request met ten times is no ten requests (rounds and blocks are crossed: the pigeonhole bootstrap, Owen 2007). With two or three
rounds an interval is rather too narrow than too wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.bench.contenders import Contender
from autotune.bench.running import Outcome, Result

BLOCK_S = 4.0
_MOST_BLOCKS = 500  # of a round; those of longer rounds last longer
_RESAMPLES = 2000
_AT_ONCE = 1 << 22  # numbers of resamples, lest those of many rounds fill the memory
_SHARES = (0.5, 0.99)
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its 95% interval; NaN where nothing was measured, or too little to say how sure it is."""

    value: float
    low: float
    high: float


class ContenderSummary(NamedTuple):
    """What one contender did over its rounds. Percentiles are over all its requests that have the metric, by nearest rank.

    In ``weighted_attainment``, which contenders are compared by, and ``goodput`` each request counts by the weight of its class;
    ``classes`` has (met, offered) of each.
    """

    contender: Contender
    rounds: int
    offered: int
    attainment: Estimate
    weighted_attainment: Estimate
    goodput: Estimate
    throughput: float
    unfinished: int
    latencies: dict[str, tuple[Estimate, Estimate]]
    """metric -> (p50, p99), ms"""
    classes: dict[str, tuple[int, int]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.contender.name,
            "control": self.contender.control,
            "knobs": self.contender.knobs.as_dict(),
            "rounds": self.rounds,
            "offered": self.offered,
            "unfinished": self.unfinished,
            "attainment": _json(self.attainment),
            "weighted_attainment": _json(self.weighted_attainment),
            "goodput": _json(self.goodput),
            "throughput": round(self.throughput, 2),
            "classes": {name: {"met": met, "offered": offered} for name, (met, offered) in self.classes.items()},
            **{metric: {"p50": _json(p50), "p99": _json(p99)} for metric, (p50, p99) in self.latencies.items()},
        }


class Difference(NamedTuple):
    """One contender against another over the rounds both have: weighted attainment minus the other's, and divided by it."""

    name: str
    against: str
    rounds: int
    difference: Estimate
    ratio: Estimate

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "against": self.against,
            "rounds": self.rounds,
            "difference": _json(self.difference),
            "ratio": _json(self.ratio),
        }


class PairedComparison:
    """All that was measured, by contender in order of first appearance.

    ``repeated``: whether rounds hold the same requests, all or some of them. Without ``intervals`` values alone are found, at
    once.
    """

    def __init__(
        self, results: Sequence[Result], duration: float, *, repeated: bool = False, intervals: bool = True
    ) -> None:
        if not results:
            raise ValueError("nothing was measured, so there is nothing to compare")
        self.results = tuple(results)
        self.duration = duration
        self.repeated = repeated
        self.contenders = tuple(dict.fromkeys(result.turn.contender for result in results))
        self.intervals = intervals
        self._blocks = min(_MOST_BLOCKS, max(1, round(duration / BLOCK_S)))
        rounds = sorted({result.turn.round for result in results})
        rng = np.random.default_rng(0)  # the same turns give the same intervals
        # which rounds, and which of their blocks, each resample takes; drawn once, for all contenders alike
        self._rounds = rounds
        self._drawn = rng.random(size=(_RESAMPLES, len(rounds)))
        self._summaries: dict[Contender, ContenderSummary] = {}
        self._differences: dict[tuple[Contender, Contender], Difference | None] = {}
        self._picked = rng.integers(0, self._blocks, size=(_RESAMPLES, 1 if repeated else len(rounds), self._blocks))

    @property
    def has_intervals(self) -> bool:
        """Whether there is more than one block to draw from, and so anything to say of how sure a value is."""
        return self._has_intervals(len(self._rounds))

    def of(self, contender: Contender) -> list[Result]:
        return [result for result in self.results if result.turn.contender == contender]

    def summary(self, contender: Contender) -> ContenderSummary:
        if contender not in self._summaries:
            self._summaries[contender] = self._summary(contender)
        return self._summaries[contender]

    def _summary(self, contender: Contender) -> ContenderSummary:
        results = self.of(contender)
        outcomes = [outcome for result in results for outcome in result.outcomes]
        met, offered = self._sums(results)
        seconds = self.duration * len(results)
        met_here, offered_here = _weighed(outcomes)
        weighted = self._estimate(len(results), _ratio(met_here, offered_here), _over(met, offered))
        single = weighted
        if any(one.weight != 1 for one in outcomes):
            share = _ratio(sum(one.met for one in outcomes), len(outcomes))
            single = self._estimate(len(results), share, _over(*self._sums(results, weighed=False)))
        classes: dict[str, tuple[int, int]] = {}
        for one in outcomes:
            good, count = classes.get(one.request_class, (0, 0))
            classes[one.request_class] = (good + one.met, count + 1)
        return ContenderSummary(
            contender,
            rounds=len(results),
            offered=len(outcomes),
            attainment=single,
            weighted_attainment=weighted,
            goodput=self._estimate(len(results), met_here / seconds, met / seconds),
            throughput=sum(r.score.throughput for r in results) / len(results),
            unfinished=sum(r.score.unfinished for r in results),
            latencies={metric: self._percentiles(results, metric) for metric in METRICS},
            classes=classes,
        )

    def difference(self, one: Contender, other: Contender) -> Difference | None:
        """None when no round has both."""
        if (one, other) not in self._differences:
            self._differences[one, other] = self._difference(one, other)
        return self._differences[one, other]

    def _difference(self, one: Contender, other: Contender) -> Difference | None:
        mine, theirs = ({r.turn.round: r for r in self.of(c)} for c in (one, other))
        both = [r for r in self._rounds if r in mine and r in theirs]
        if not both:
            return None
        shares, samples = [], []
        for found in (mine, theirs):
            results = [found[r] for r in both]
            outcomes = [o for result in results for o in result.outcomes]
            shares.append(_ratio(*_weighed(outcomes)))
            samples.append(_over(*self._sums(results)))
        return Difference(
            one.name,
            other.name,
            len(both),
            self._estimate(len(both), shares[0] - shares[1], samples[0] - samples[1]),
            self._estimate(len(both), _ratio(shares[0], shares[1]), _over(samples[0], samples[1]), method="nearest"),
        )

    def _has_intervals(self, rounds: int) -> bool:
        return self.intervals and (1 if self.repeated else rounds) * self._blocks > 1

    def _draws(self, rounds: int, some: slice = slice(None)) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices into a table [round, block], of ``some`` resamples of that many rounds; they broadcast."""
        return (self._drawn[some, :rounds, None] * rounds).astype(np.int64), self._picked[some, :rounds]

    def _sums(self, results: Sequence[Result], *, weighed: bool = True) -> tuple[Floats, Floats]:
        """(met, offered) of each resample, each request by its weight or all alike."""
        if not self._has_intervals(len(results)):
            return np.full(_RESAMPLES, np.nan), np.full(_RESAMPLES, np.nan)
        table = np.zeros((len(results), self._blocks, 2))
        for row, result in enumerate(results):
            for outcome in result.outcomes:
                weight = outcome.weight if weighed else 1.0
                table[row, self._block(outcome)] += (weight * outcome.met, weight)
        sums = table[self._draws(len(results))].sum(axis=(1, 2))
        return sums[:, 0], sums[:, 1]

    def _percentiles(self, results: Sequence[Result], metric: str) -> tuple[Estimate, Estimate]:
        found = [
            (value, row * self._blocks + self._block(outcome))
            for row, result in enumerate(results)
            for outcome in result.outcomes
            if (value := getattr(outcome, metric)) is not None
        ]
        if not found:
            nothing = Estimate(math.nan, math.nan, math.nan)
            return nothing, nothing
        found.sort()
        values, cells = (np.array(column) for column in zip(*found, strict=True))
        median, tail = (
            self._estimate(len(results), float(values[max(0, math.ceil(q * len(values)) - 1)]), samples)
            for q, samples in zip(_SHARES, self._quantiles(len(results), values, cells), strict=True)
        )
        return median, tail

    def _quantiles(self, rounds: int, values: Floats, cells: NDArray[np.int64]) -> Floats:
        """Each of :data:`_SHARES` of every resample, by nearest rank. ``values`` ascend; ``cells``: round · blocks + block.

        A resample draws a cell so many ``times``. Values are counted by stretches of some hundred first, and one by one only in
        the stretch that holds the quantile.
        """
        samples = np.full((len(_SHARES), _RESAMPLES), np.nan)
        if not self._has_intervals(rounds):
            return samples
        width, count = math.isqrt(len(values)) + 1, rounds * self._blocks
        stretches = np.arange(len(values)) // width
        held = np.zeros((count, stretches[-1] + 1))  # values of each cell in each stretch
        np.add.at(held, (cells, stretches), 1.0)
        together = max(1, _AT_ONCE // count)
        for begin in range(0, _RESAMPLES, together):
            some = slice(begin, min(begin + together, _RESAMPLES))
            round_of, block = self._draws(rounds, some)
            drawn = np.arange(len(block))[:, None, None] * count + round_of * self._blocks + block
            times = np.bincount(drawn.ravel(), minlength=len(block) * count).reshape(len(block), count)
            reached = np.cumsum(times @ held, axis=1)
            for q, found in zip(_SHARES, samples, strict=True):
                wanted = np.maximum(1, np.ceil(q * reached[:, -1]))
                stretch = (reached >= wanted[:, None]).argmax(axis=1)
                before = np.where(stretch > 0, reached[np.arange(len(block)), stretch - 1], 0)
                places = np.minimum(stretch[:, None] * width + np.arange(width), len(values) - 1)
                within = before[:, None] + np.cumsum(np.take_along_axis(times, cells[places], axis=1), axis=1)
                at = places[np.arange(len(block)), (within >= wanted[:, None]).argmax(axis=1)]
                found[some] = np.where(reached[:, -1] > 0, values[at], np.nan)
        return samples

    def _estimate(
        self, rounds: int, value: float, samples: Floats, *, method: Literal["linear", "nearest"] = "linear"
    ) -> Estimate:
        """``value`` with the interval of its resamples; with none where all of them are the same block. ``nearest``: of what may
        be infinite."""
        known = samples[~np.isnan(samples)]
        if not len(known) or not self._has_intervals(rounds):
            return Estimate(value, math.nan, math.nan)
        low, high = np.percentile(known, [2.5, 97.5], method=method)
        return Estimate(value, float(low), float(high))

    def _block(self, outcome: Outcome) -> int:
        return min(self._blocks - 1, max(0, int(outcome.due / self.duration * self._blocks)))


def _weighed(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Weight of the requests that met their SLO, and of all."""
    return math.fsum(o.weight * o.met for o in outcomes), math.fsum(o.weight for o in outcomes)


def _over(above: Floats, below: Floats) -> Floats:
    """Infinite where ``below`` alone is 0, NaN where both are."""
    quotient: Floats = np.divide(above, below, out=np.where(above > 0, math.inf, math.nan), where=below > 0)
    return quotient


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.inf if above else math.nan


def _json(estimate: Estimate) -> dict[str, float | None]:
    return {name: round(v, 4) if math.isfinite(v) else None for name, v in estimate._asdict().items()}
