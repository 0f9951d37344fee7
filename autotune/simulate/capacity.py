"""The highest rate at which a setting holds the SLO, by bisection in simulation, seed by seed; and which setting has the highest.

One seed offers the same requests at every rate (common random numbers), so its share in SLO falls with the rate but for small
steps (of up to a few hundredths where the machine's own steps scatter: a stall falls on other requests at another rate), and a
bisection finds where it crosses what was promised. The rates tried lie on a fixed grid, equal steps of at most the
precision, and each interval is halved at its roundest number, so that where the search begins changes nothing but its length
(unless the share crosses the promise twice, whole octaves apart). A capacity is the rate at which those requests came, not the
long-run mean of the workload: of a bursty one, a few thousand requests may come much faster or slower than that. Seeds differ;
their mean and its 95% interval (Student's t) are what is known of the capacity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from scipy.stats import t as student

from autotune.measure.evaluate import Interrupted
from autotune.measure.score import Score
from autotune.simulate.scenario import Scenario
from runtime.knobs import Knobs

PRECISION: Final = 0.01
_REACH: Final = 20  # octaves from where the search begins, in both directions
SEARCHED: Final = "searched here"
"""The label of a setting that nobody named."""
_STEPS: Final = 8  # uphill, at most
_ALONE: Final = 1.002  # sequences in a step, on average: requests hardly ever meet, and coming slower changes nothing

Told = Callable[[float, bool], None]
"""``told(rate, held)``: hears of each simulation."""


class SeedCapacity(NamedTuple):
    """What one seed says. ``rate``: the highest mean rate of the workload that held (0: none did), with its ``score``.

    ``failed``: the next one that did not hold, inf when all that were tried did; ``tried``: how many simulations it took;
    ``answer``: mean output tokens of its requests.
    """

    seed: int
    rate: float
    failed: float
    score: Score | None
    tried: int
    answer: float

    @property
    def offered(self) -> float:
        """The capacity: requests/s that really came, where ``rate`` is what the workload brings in the long run."""
        return self.score.offered_rate if self.score is not None else 0.0


@dataclass(frozen=True)
class SettingCapacity:
    """What all seeds together say of one setting."""

    label: str
    knobs: Knobs
    seeds: tuple[SeedCapacity, ...]

    @property
    def rates(self) -> list[float]:
        """Requests/s offered at the capacity of each seed; 0 where no rate held."""
        return [s.offered for s in self.seeds]

    @property
    def rate(self) -> float:
        """Mean over the seeds, requests/s. Where :attr:`unbounded`, a rate that held and no more."""
        return statistics.fmean(self.rates)

    @property
    def order(self) -> tuple[bool, float]:
        """The better setting has the higher one."""
        return self.unbounded, self.rate

    @property
    def unbounded(self) -> bool:
        """Whether some seed's requests keep the SLO however close together they come."""
        return any(s.failed == math.inf for s in self.seeds)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the mean; of a single seed, the bracket of its bisection: nothing is known of other seeds."""
        rates = self.rates
        if self.unbounded:
            return min(rates), math.inf
        if len(rates) < 2:
            only = self.seeds[0]
            return rates[0], rates[0] * only.failed / only.rate if only.rate else 0.0
        half = float(student.ppf(0.975, len(rates) - 1)) * statistics.stdev(rates) / math.sqrt(len(rates))
        return max(0.0, self.rate - half), self.rate + half

    @property
    def scores(self) -> list[Score]:
        """Of each seed, at its own capacity."""
        return [s.score for s in self.seeds if s.score is not None]

    @property
    def throughput(self) -> float:
        """Output tokens/s at capacity: what the requests that come ask for."""
        return statistics.fmean(s.offered * s.answer for s in self.seeds)


class Best(NamedTuple):
    """The setting with the highest capacity of so many ``tried``. ``whole``: whether all there was to try has been."""

    setting: SettingCapacity
    tried: int
    whole: bool = True


def best_so_far(known: Mapping[str, SettingCapacity]) -> Best | None:
    """Of a search that was stopped before it was through with what it is to begin from; None when nothing is known."""
    if not known:
        return None
    return Best(max(known.values(), key=lambda one: one.order), len(known), whole=False)


@dataclass(frozen=True)
class Search:
    """How to look: over which seeds, with how many requests each time, to which relative precision."""

    scenario: Scenario
    seeds: tuple[int, ...]
    requests: int
    precision: float = PRECISION
    controller: str | None = None
    stop: Callable[[], bool] | None = None

    def capacity(self, label: str, knobs: Knobs, start: float, told: Told = lambda rate, held: None) -> SettingCapacity:
        """The capacity of ``knobs``, looked for around ``start`` requests/s."""
        found: list[SeedCapacity] = []
        for seed in self.seeds:
            found.append(self._of_seed(knobs, seed, start, told))
            if found[-1].rate and found[-1].failed < math.inf:
                start = found[-1].rate
        return SettingCapacity(label, knobs, tuple(found))

    def best(
        self,
        known: Mapping[str, SettingCapacity],
        others: Mapping[str, Knobs],
        told: Told = lambda rate, held: None,
        around: Callable[[Knobs], Iterable[Knobs]] = lambda knobs: (),
    ) -> Best:
        """The setting with the highest capacity among ``known``, ``others``, and those ``around`` the best of them.

        All but the known are first asked for a little more than the best so far; only those that hold it are looked at closely.
        What lies around a setting is tried as long as that leads to a better one, as on a machine nobody searched on. When
        ``stop`` says so, the best so far is the answer.
        """
        best = max(known.values(), key=lambda one: one.order)
        tried = {one.knobs for one in known.values()}

        def ask(label: str, knobs: Knobs) -> None:
            nonlocal best
            if knobs in tried or best.unbounded:
                return
            bar = best.seeds[0].rate * (1 + self.precision)  # the same requests, only a little closer together
            if not bar or self._holds(knobs, bar, self.seeds[0], told)[0]:
                best = max(best, self.capacity(label, knobs, bar or 1.0, told), key=lambda found: found.order)
            tried.add(knobs)

        try:
            for label, knobs in others.items():
                ask(label, knobs)
            for _ in range(_STEPS if best.rate else 0):
                before = best
                for knobs in around(before.knobs):
                    ask(SEARCHED, knobs)
                if best is before:
                    break
        except Interrupted:
            return Best(best, len(tried), whole=False)
        return Best(best, len(tried))

    def _holds(self, knobs: Knobs, rate: float, seed: int, told: Told) -> tuple[bool, Score]:
        score = self.scenario.measure(
            knobs, rate, seed, requests=self.requests, controller=self.controller, stop=self.stop
        )
        held = score.attainment >= self.scenario.slo.attainment
        told(rate, held)
        return held, score

    def _of_seed(self, knobs: Knobs, seed: int, start: float, told: Told) -> SeedCapacity:
        octave = 2 ** math.ceil(math.log2(math.log(2) / math.log1p(self.precision)))  # steps of the grid in an octave
        number = begin = octave * round(math.log2(start))  # of the rate 2 ** (number / octave)
        low, high, best = -math.inf, math.inf, None
        step, tried = octave, 0
        answer = self.scenario.mean_answer(seed, self.requests)
        while high - low > 1:
            held, score = self._holds(knobs, 2 ** (number / octave), seed, told)
            tried += 1
            if held:
                low, best = number, score
            else:
                high = number
            if low == -math.inf:
                if score.steps.mean_running < _ALONE or high < begin - _REACH * octave:
                    return SeedCapacity(seed, 0.0, 2 ** (high / octave), None, tried, answer)
                number, step = number - step, min(2 * step, 4 * octave)
            elif high == math.inf:
                if low >= begin + _REACH * octave:
                    break
                number, step = number + step, min(2 * step, 2 * octave)
            elif high - low > 1:
                number = _roundest(int(low), int(high))
        return SeedCapacity(seed, 2 ** (low / octave), 2 ** (high / octave), best, tried, answer)


def _roundest(low: int, high: int) -> int:
    """The number between the two (``high - low > 1``) that most powers of two divide: the middle, if both are round."""
    unit = 1 << (high - low).bit_length()
    while (found := (low // unit + 1) * unit) >= high:
        unit >>= 1
    return found
