"""The traffic of a live server, from what its metrics counted in a while: rate, burstiness, lengths and latencies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from autotune.engines.named import ServerMetrics
from autotune.measure.evaluate import EvaluationError
from runtime.slo import SLO

if TYPE_CHECKING:  # it loads what the extra serve brings
    from runtime.serving.scrape import Scrape

FEWEST = 20
"""Requests that must have ended, or nothing is said of them."""
_BURSTY = 2.0  # variance of the arrivals in an interval over their mean; 1 of a Poisson process
_MOST_CV = 10.0
# to tell burstiness by, and arrivals in each: in shorter ones bursts are not seen whole
_INTERVALS, _EXPECTED = 10, 10.0
_GIVEN_UP = 1.05  # times as many first tokens as requests that ended, from which on clients are known to give up
_NARROW = 0.05  # a coefficient of variation below which lengths are all alike


class Share(NamedTuple):
    """Between which shares of the requests one lies, as far as a histogram's bounds tell."""

    low: float
    high: float

    def __str__(self) -> str:
        low, high = f"{self.low:.1%}", f"{self.high:.1%}"
        return low if low == high else f"{low}–{high}"


@dataclass(frozen=True)
class Histogram:
    """What one histogram counted: (upper bound, observations in the bucket that ends there), their number and their sum."""

    counts: tuple[tuple[float, float], ...]
    count: float
    total: float

    @classmethod
    def between(cls, name: str, before: Scrape, after: Scrape) -> Histogram:
        """Of the observations between two scrapes; empty where the server has no such histogram."""
        cumulated = [
            (bound, value - before.buckets.get(name, {}).get(bound, 0.0))
            for bound, value in after.buckets.get(name, {}).items()
        ]
        each = [(bound, max(0.0, value - last)) for (_, last), (bound, value) in pairwise([(0.0, 0.0), *cumulated])]
        total = after.samples.get(f"{name}_sum", 0.0) - before.samples.get(f"{name}_sum", 0.0)
        return cls(tuple(each), math.fsum(count for _, count in each), total)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variation(self) -> float:
        """Coefficient of variation, each observation taken for the middle of its bucket (geometric, so that long tails count)."""
        if not self.count:
            return math.nan
        middles = [(self._middle(i), count) for i, (_, count) in enumerate(self.counts) if count]
        mean = math.fsum(m * n for m, n in middles) / self.count
        square = math.fsum(m * m * n for m, n in middles) / self.count
        return math.sqrt(max(0.0, square - mean * mean)) / mean if mean else 0.0

    def _middle(self, index: int) -> float:
        upper = self.counts[index][0]
        lower = self.counts[index - 1][0] if index else 0.0
        if math.isinf(upper):
            return 1.5 * lower
        return math.sqrt(lower * upper) if lower > 0 else upper / 2

    def below(self, bound: float) -> Share:
        """The share of observations up to ``bound``."""
        sure = math.fsum(count for upper, count in self.counts if upper <= bound)
        begun = next((count for upper, count in self.counts if upper > bound), 0.0)
        lower = max((upper for upper, _ in self.counts if upper <= bound), default=0.0)
        within = 0.0 if lower == bound else begun
        return Share(sure / self.count, (sure + within) / self.count) if self.count else Share(0.0, 1.0)

    def bucket(self, q: float) -> tuple[float, float]:
        """The bounds between which the quantile ``q`` is; NaN where nothing was observed."""
        left, lower = q * self.count, 0.0
        for upper, count in self.counts:
            if count and left <= count:
                return lower, upper
            left, lower = left - count, upper
        return math.nan, math.nan

    def without_first(self, count: float) -> Histogram:
        """The same without ``count`` observations of the first bucket, which were about zero."""
        taken = min(count, self.counts[0][1]) if self.counts else 0.0
        counts = tuple((bound, n - taken if i == 0 else n) for i, (bound, n) in enumerate(self.counts))
        return Histogram(counts, self.count - taken, self.total)

    def quantile(self, q: float) -> float:
        """Interpolated inside its bucket; NaN where nothing was observed."""
        left, lower = q * self.count, 0.0
        for upper, count in self.counts:
            if count and left <= count:
                return lower if math.isinf(upper) else lower + (upper - lower) * left / count
            left, lower = left - count, upper
        return math.nan


@dataclass(frozen=True)
class Traffic:
    """``seconds`` of a server: ``arrived`` and ``ended`` requests, the mean numbers that ran and waited, preemptions, the share
    of prompt tokens that were in the prefix cache, and the dispersion of arrivals (None: there were too few intervals to tell).

    ``engines`` behind the server share the requests. ``tpot`` is of answers of two tokens and more.
    """

    seconds: float
    arrived: float
    ended: float
    running: float
    waiting: float
    preemptions: float
    cached: float
    engines: int
    dispersion: float | None
    prompt: Histogram
    output: Histogram
    ttft: Histogram
    tpot: Histogram
    e2e: Histogram

    @classmethod
    def of(cls, scrapes: Sequence[Scrape], names: ServerMetrics) -> Traffic:
        """What two scrapes or more say. Raises :class:`EvaluationError` where too little happened between them, or where they
        are of several models, or count no finite number of requests."""
        first, last = scrapes[0], scrapes[-1]
        replicas = {tuple(one.get(label, "") for label in names.replica) for one in last.labels.get(names.running, ())}
        if len(models := sorted({model for model, *_ in replicas})) > 1:
            raise EvaluationError(f"the server has metrics of several models, added up: {', '.join(models)}")

        def grown(name: str, a: Scrape = first, b: Scrape = last) -> float:
            return b.samples.get(name, 0.0) - a.samples.get(name, 0.0)

        def ended_or_inside(a: Scrape = first, b: Scrape = last) -> float:
            return sum(grown(name, a, b) for name in (names.ended, names.running, names.waiting))

        def begun_or_waiting(a: Scrape = first, b: Scrape = last) -> float:
            return grown(f"{names.ttft_seconds}_count", a, b) + grown(names.waiting, a, b)

        def histogram(name: str) -> Histogram:
            return Histogram.between(name, first, last)

        preemptions = grown(names.preemptions)
        given_up = begun_or_waiting() > _GIVEN_UP * ended_or_inside()
        came = begun_or_waiting if given_up else ended_or_inside
        ended, arrived, seconds = grown(names.ended), came(), last.at - first.at
        if any(grown(names.ended, a, b) < 0 for a, b in pairwise(scrapes)):
            raise EvaluationError("the server was started anew while it was watched; watch it again")
        if not math.isfinite(ended + arrived):
            counted = f"{ended:.0f} requests ended and {arrived:.0f} arrived"
            raise EvaluationError(f"by the server's metrics {counted} in {seconds:.0f} s, which cannot be")
        if ended < FEWEST or arrived < FEWEST:
            few = f"{ended:.0f} requests ended and {arrived:.0f} arrived in {seconds:.0f} s"
            raise EvaluationError(f"{few}, and it takes {FEWEST} of each to say something; --watch longer")
        prompt, output = histogram(names.prompt_tokens), histogram(names.output_tokens)
        if not (prompt.mean >= 1 and output.mean >= 1):  # NaN where there are no such metrics
            means = f"{prompt.mean:.3g} prompt and {output.mean:.3g} output tokens"
            raise EvaluationError(f"by the server's metrics its requests have {means} on average")
        rate = arrived / seconds
        single = output.counts[:1]
        answers = single[0][1] if single and single[0][0] <= 1 else 0.0
        return cls(
            seconds=seconds,
            arrived=arrived,
            ended=ended,
            running=statistics.fmean(s.samples.get(names.running, 0.0) for s in scrapes),
            waiting=statistics.fmean(s.samples.get(names.waiting, 0.0) for s in scrapes),
            preemptions=preemptions,
            cached=grown(names.cache_hits) / max(1.0, grown(names.cache_queries)),
            engines=max(1, len(replicas)),
            dispersion=None if given_up and preemptions else _dispersion(_counted(scrapes, came, rate), rate),
            prompt=prompt,
            output=output,
            ttft=histogram(names.ttft_seconds),
            tpot=histogram(names.tpot_seconds).without_first(answers),
            e2e=histogram(names.e2e_seconds),
        )

    @property
    def rate(self) -> float:
        return self.arrived / self.seconds

    def spelled(self) -> str:
        """What one engine gets, as ``--workload`` takes it: gaps are exponential, or, where arrivals are bursty, of a gamma
        distribution. Of several engines, each is taken to get any request with the same probability."""
        gaps = "poisson:"
        if self.dispersion is not None and self.dispersion >= _BURSTY:
            its = 1 + (self.dispersion - 1) / self.engines
            gaps = f"gamma:cv={min(_MOST_CV, math.sqrt(its)):.3g},"
        return f"{gaps}rate={self.rate / self.engines:.4g},prompt={_lengths(self.prompt)},output={_lengths(self.output)},length=1"

    def attainment(self, slo: SLO) -> Mapping[str, Share]:
        """Of the targets that the server's histograms tell of: the share of requests that met each, by its name."""
        known = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {
            name: known[name].below(ms / 1e3)
            for name, ms in slo.targets_ms.items()
            if ms is not None and name in known and known[name].count
        }


def _counted(
    scrapes: Sequence[Scrape], came: Callable[[Scrape, Scrape], float], rate: float
) -> Iterator[tuple[float, float]]:
    """(arrivals, seconds) of intervals in which :data:`_EXPECTED` or more are expected; what is left at the end is left out."""
    begin = scrapes[0]
    for at in scrapes[1:]:
        if rate * (at.at - begin.at) >= _EXPECTED:
            yield max(0.0, came(begin, at)), at.at - begin.at
            begin = at


def _dispersion(counted: Iterable[tuple[float, float]], rate: float) -> float | None:
    """Variance of the arrivals in an interval over their mean, where there are enough intervals."""
    each = [(count - rate * seconds) ** 2 / (rate * seconds) for count, seconds in counted]
    return statistics.fmean(each) if len(each) >= _INTERVALS else None


def _lengths(histogram: Histogram) -> str:
    mean, variation = histogram.mean, histogram.variation
    return f"{mean:.0f}" if variation < _NARROW else f"{mean:.4g}~{variation:.3g}"
