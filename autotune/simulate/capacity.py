"""The one search for a rate: the highest that a setting serves within the SLO, and which setting has the highest.

:class:`RateSearch` brackets the rate and bisects. ``autotune capacity`` and the price search look for the capacity with it
(:class:`Search`), a profiling run for the rate at which settings are compared and for the capacity of its choice, in simulation
and then on the hardware. :func:`uphill` is the one local search from settings to better ones around them.

One seed offers the same requests at every rate (common random numbers), so its attainment falls with the rate but for small
steps (of up to a few hundredths where the machine's own steps scatter: a stall falls on other requests at another rate), and a
bisection finds where it crosses the target. The rates tried lie on a fixed grid, equal steps of at most the
precision, and each interval is halved at its roundest number, so that where the search begins changes nothing but its length
(unless the share crosses the target twice, whole octaves apart). A capacity is the rate at which those requests came, not the
long-run mean of the workload: of a bursty one, a few thousand requests may come much faster or slower than that. Seeds differ;
their mean and its 95% interval (Student's t) are what is known of the capacity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from scipy.stats import t as student

from autotune.measure.evaluate import Interrupted
from autotune.measure.score import Score
from autotune.simulate.scenario import Scenario
from runtime.knobs import Knobs
from runtime.slo import attained

PRECISION: Final = 0.01
_REACH: Final = 2.0**20  # times the rate where the search begins, in both directions
SEARCHED: Final = "searched here"
"""The label of a setting that nobody named."""
_STEPS: Final = 8  # uphill, at most
_ALONE: Final = 1.002  # sequences in a step, on average, and
_IDLE: Final = 0.01  # share of time in steps: requests hardly ever meet, and coming slower changes nothing

Progress = Callable[[float, bool], None]
"""``progress(rate, held)``: called with the outcome of each simulation."""


class SeedCapacity(NamedTuple):
    """What one seed says. ``rate``: the highest mean rate of the workload that held (0: none did), with its ``score``.

    ``failed``: the next one that did not hold, inf when all that were tried did; ``tried``: how many simulations it took;
    ``answer``: mean output tokens of the requests at ``rate`` (0: none held).
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
    def worth(self) -> float:
        """Higher for the better setting."""
        return math.inf if self.unbounded else self.rate

    @property
    def unbounded(self) -> bool:
        """Whether some seed's requests meet the SLO however close together they come."""
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
    return Best(max(known.values(), key=lambda one: one.worth), len(known), whole=False)


class RateSearch:
    """Brackets the highest rate that holds, then halves the bracket until it is within ``precision``: ask and tell in turn.

    Begins near ``start`` and stays between ``lowest`` and ``highest``. The first step up or down is by the factor ``step``, each
    one after it by the square of that before (up to two octaves up, four down).
    """

    def __init__(
        self, start: float, *, precision: float, lowest: float = 0.0, highest: float = math.inf, step: float = 2.0
    ) -> None:
        # steps of the grid in an octave
        self._octave: int = 2 ** math.ceil(math.log2(math.log(2) / math.log1p(precision)))
        self._step = max(1, round(self._octave * math.log2(step)))
        self._lowest, self._highest = max(lowest, start / _REACH), min(highest, start * _REACH)
        self._start = start
        self._held: list[float] = []
        self._missed: list[float] = []

    @property
    def held(self) -> float:
        """The highest rate that held below every one that did not; 0: none."""
        return max((rate for rate in self._held if rate < self.failed), default=0.0)

    @property
    def failed(self) -> float:
        """The lowest rate that did not hold; inf: all did."""
        return min(self._missed, default=math.inf)

    def tell(self, rate: float, held: bool) -> None:
        """What came of ``rate``, which need not be the one requested."""
        (self._held if held else self._missed).append(rate)

    def ask(self) -> float | None:
        """The next rate to try; None once the bracket is close enough, or there is nowhere left to go."""
        held, failed = self.held, self.failed
        if not held and failed == math.inf:
            return self._rate(round(self._number(self._start)))
        if failed == math.inf:
            if held >= self._highest:
                return None
            step, self._step = self._step, min(2 * self._step, 2 * self._octave)
            return self._rate(math.floor(self._number(held)) + step)
        if not held:
            if failed <= self._lowest:
                return None
            step, self._step = self._step, min(2 * self._step, 4 * self._octave)
            return self._rate(math.ceil(self._number(failed)) - step)
        low, high = math.floor(self._number(held)), math.ceil(self._number(failed))
        return self._rate(_roundest(low, high)) if high - low > 1 else None

    def _number(self, rate: float) -> float:
        """On the grid a whole one."""
        return round(float(self._octave * math.log2(rate)), 6)

    def _rate(self, number: int) -> float:
        return min(max(math.exp2(number / self._octave), self._lowest), self._highest)


def uphill(
    settings: Iterable[Knobs],
    worth: Callable[[Knobs, float], float],
    around: Callable[[Knobs], Iterable[Knobs]],
    *,
    steps: int,
    late: Callable[[], bool] = lambda: False,
) -> dict[Knobs, float]:
    """What ``settings`` are worth, and those ``around`` the best of them, for ``steps`` steps or until none is better.

    ``worth(knobs, best)``: ``best`` is the worth of the best so far (-inf: none), below it any lower answer will do.
    What is worth nothing is no place to search from. At least one setting is asked for; once it is ``late``, no more.
    """
    known: dict[Knobs, float] = {}

    def ask(few: Iterable[Knobs]) -> Knobs | None:
        for knobs in few:
            if known and late():
                break
            if knobs not in known:
                known[knobs] = worth(knobs, max(known.values(), default=-math.inf))
        return max(known, key=known.__getitem__, default=None)

    best = ask(settings)
    for _ in range(steps):
        before = best
        if before is None or known[before] <= 0 or late():
            break
        best = ask(around(before))
        if best == before:
            break
    return known


@dataclass(frozen=True)
class Search:
    """How to look for capacities: what a setting does at a rate under a seed, over which seeds, to which relative precision.

    ``simulate`` None: the setting cannot be simulated there, which counts as missed. ``holds``: whether a score meets what is
    aimed at; ``answer``: mean output tokens of the requests at a rate under a seed; ``lowest``, ``highest``: rates worth
    trying; ``step``: the first one from where a search begins; ``late``: no further simulation of a setting, and no further
    setting, then.
    """

    simulate: Callable[[Knobs, float, int], Score | None]
    holds: Callable[[Score], bool]
    seeds: tuple[int, ...]
    precision: float = PRECISION
    answer: Callable[[float, int], float] = lambda rate, seed: 0.0
    lowest: float = 0.0
    highest: float = math.inf
    step: float = 2.0
    late: Callable[[], bool] = lambda: False

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        seeds: tuple[int, ...],
        requests: int,
        *,
        controller: str | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Search:
        """For the SLO of ``scenario``, by so many ``requests`` each time."""
        return cls(
            lambda knobs, rate, seed: scenario.measure(
                knobs, rate, seed, requests=requests, controller=controller, stop=stop
            ),
            lambda score: attained(score, scenario.slo, scenario.classes),
            seeds,
            answer=partial(scenario.mean_answer, requests=requests),
        )

    def capacity(
        self, label: str, knobs: Knobs, start: float, progress: Progress = lambda rate, held: None
    ) -> SettingCapacity:
        """The capacity of ``knobs``, looked for around ``start`` requests/s."""
        found: list[SeedCapacity] = []
        for seed in self.seeds:
            found.append(self._of_seed(knobs, seed, start, progress))
            if found[-1].rate and found[-1].failed < math.inf:
                start = found[-1].rate
        return SettingCapacity(label, knobs, tuple(found))

    def best(
        self,
        known: Mapping[str, SettingCapacity],
        others: Mapping[str, Knobs],
        progress: Progress = lambda rate, held: None,
        around: Callable[[Knobs], Iterable[Knobs]] = lambda knobs: (),
        *,
        start: float = 1.0,
        steps: int = _STEPS,
    ) -> Best:
        """The setting with the highest capacity among ``known``, ``others``, and those ``around`` the best of them.

        All but the known are first asked for a little more than the best so far; only those that hold it are looked at closely.
        What lies around a setting is tried as long as that leads to a better one, as on a machine nobody searched on. When
        the simulation is interrupted, the best so far is the answer. ``start``: where to begin if nothing is known.
        """
        found = {one.knobs: one for one in known.values()}
        labels = {knobs: label for label, knobs in others.items()}

        def worth(knobs: Knobs, best: float) -> float:
            if knobs in found:
                return found[knobs].worth
            if best == math.inf:
                return -math.inf
            top = max(found.values(), key=lambda one: one.worth, default=None)
            bar = start
            if top is not None:
                # the same requests, only a little closer together
                bar = top.seeds[0].rate * (1 + self.precision) or start
                if top.rate and (bar > self.highest or not self._holds(knobs, bar, self.seeds[0], progress)[0]):
                    tried.add(knobs)
                    return -math.inf
            found[knobs] = self.capacity(labels.get(knobs, SEARCHED), knobs, bar, progress)
            return found[knobs].worth

        tried: set[Knobs] = set()
        whole = True
        try:
            uphill([*found, *others.values()], worth, around, steps=steps, late=self.late)
        except Interrupted:
            if not found:
                raise
            whole = False
        return Best(max(found.values(), key=lambda one: one.worth), len(tried | found.keys()), whole)

    def _holds(self, knobs: Knobs, rate: float, seed: int, progress: Progress) -> tuple[bool, Score | None]:
        score = self.simulate(knobs, rate, seed)
        held = score is not None and self.holds(score)
        progress(rate, held)
        return held, score

    def _of_seed(self, knobs: Knobs, seed: int, start: float, progress: Progress) -> SeedCapacity:
        search = RateSearch(start, precision=self.precision, lowest=self.lowest, highest=self.highest, step=self.step)
        best, tried = None, 0
        while (rate := search.ask()) is not None and not (tried and self.late()):
            held, score = self._holds(knobs, rate, seed, progress)
            search.tell(rate, held)
            tried += 1
            best = score if held else best
            if not search.held and (score is None or _hardly_meet(score)):
                break
        answer = self.answer(search.held, seed) if search.held else 0.0
        return SeedCapacity(seed, search.held, search.failed, best, tried, answer)


def _hardly_meet(score: Score) -> bool:
    """Whether requests neither share steps nor wait for one another. A step of one sequence alone says nothing where the
    knobs allow no more."""
    busy_s = score.steps.steps * score.steps.mean_ms / 1e3
    return score.steps.mean_running < _ALONE and busy_s < _IDLE * score.window_s


def _roundest(low: int, high: int) -> int:
    """The number between the two (``high - low > 1``) that most powers of two divide: the middle, if both are round."""
    unit = 1 << (high - low).bit_length()
    while (found := (low // unit + 1) * unit) >= high:
        unit >>= 1
    return found
