"""From runs to points: repeated measurements of one setting put together, with intervals that respect bursts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import SerializerFunctionWrapHandler, model_serializer
from scipy.special import stdtrit

from autotune.measure.score import Latency, Score
from autotune.profile import RECOMMENDED, Profile
from autotune.profile.callable import BatcherSetting, CallablePoint, StrategyName, setting_of
from autotune.profile.parts import UNBOUNDED_GAIN, ClassPoint, Gain, Part, Point, Spread, StepPoint
from runtime.knobs import Knobs
from runtime.slo import in_percent, wilson_interval

Stage = Literal["simulation", "search", "validation", "capacity"]
_LIKELY = 0.975  # of the draws
_RESAMPLES, _DRAWS = 2000, 5_000_000  # of a bootstrap, and numbers in memory at a time
_LEAST_RATIO = 1e-4  # above 0, as a profile has it
_TWO_SIDED = 1.96  # deviations, of 95% of a normal distribution
_BLOCK_S = 4.0  # what lasts as long is nearly independent of the rest, unless a backlog outlasts it
_FEWEST_BLOCKS, _MOST_BLOCKS = 5, 30  # of an interval, where there are so many seconds

Floats = NDArray[np.float64]


class Run(Part):
    """One measurement: a line of the sidecar file. ``trial``: its number in the study, -1 outside the search.

    ``steps``: those of the hardware, a point for each kind; empty in simulation. ``strategy``: of a batcher.
    """

    stage: Stage
    label: str
    trial: int
    score: Score
    steps: tuple[StepPoint, ...] = ()
    strategy: StrategyName | None = None

    @classmethod
    def of(
        cls,
        setting: object,
        stage: Stage,
        label: str,
        score: Score,
        *,
        trial: int = -1,
        steps: Sequence[StepPoint] = (),
    ) -> Run:
        """The run of ``setting`` that has this score."""
        strategy = setting.strategy if isinstance(setting, BatcherSetting) else None
        return cls(stage=stage, label=label, trial=trial, score=score, steps=tuple(steps), strategy=strategy)

    @property
    def knobs(self) -> Knobs:
        return Knobs.from_mapping(self.score.setting)

    @property
    def setting(self) -> Knobs | BatcherSetting:
        """What was tried: the knobs, of a batcher with their strategy."""
        return setting_of(self.knobs, self.strategy)

    @property
    def batcher_setting(self) -> BatcherSetting:
        """The same of a batcher's run. Raises ``ValueError`` for that of an LLM engine."""
        if isinstance(setting := self.setting, BatcherSetting):
            return setting
        raise ValueError(f"{self.label}: is no run of a batcher")

    @model_serializer(mode="wrap")
    def _without_strategy(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run of an LLM engine has none, and its line says nothing of one."""
        data: dict[str, Any] = dump(self)
        if self.strategy is None:
            data.pop("strategy", None)
        return data


def points(runs: Iterable[Run]) -> list[Point]:
    """One point for each (stage, setting, rate), in order of first appearance."""
    return [point(group) for group in _grouped(runs)]


def callable_points(runs: Iterable[Run]) -> list[CallablePoint]:
    """The same of the runs of a batcher."""
    return [callable_point(group) for group in _grouped(runs)]


def by_setting(runs: Iterable[Run]) -> dict[Any, Point]:
    """The point of each setting, of an engine or a batcher; ``runs`` are of one stage and one rate."""
    return {group[0].setting: point(group) for group in _grouped(runs)}


def _grouped(runs: Iterable[Run]) -> Iterable[list[Run]]:
    groups: dict[tuple[Stage, object, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.stage, run.setting, run.score.rate), []).append(run)
    return groups.values()


def _pooled(runs: Sequence[Run], *, once: bool = False) -> tuple[list[list[Score]], float, dict[str, Any]]:
    """Of runs of one setting at one rate the scores by seed, the seconds of all their windows, and what every point says.

    Shares are pooled; percentiles are the median of each run's own. Runs of one seed, and all where they are to count ``once``,
    met the same requests: together they count once, by their mean, as 55 requests met twice are not 110 requests met.
    """
    scores = [run.score for run in runs]
    seeds: dict[int, list[Score]] = {}
    for score in scores:
        seeds.setdefault(0 if once else score.seed, []).append(score)
    by_seed = list(seeds.values())
    offered = round(sum(_mean(same, lambda s: s.offered) for same in by_seed))
    met = min(offered, round(sum(_mean(same, lambda s: s.met) for same in by_seed)))
    low, high = attainment_interval(met, offered, _clusters(runs, by_seed))
    known = {
        "knobs": runs[0].knobs,
        "seeds": tuple(s.seed for s in scores),
        "offered": offered,
        "met": met,
        "attainment": met / offered if offered else 0.0,
        "attainment_low": _round(low),
        "attainment_high": _round(high),
        "e2e_p99_ms": _median(scores, lambda s: s.e2e_ms.p99),
        "lateness_p99_ms": _round(max(s.lateness_p99_ms for s in scores)),
    }
    return by_seed, sum(_mean(same, lambda s: s.window_s) for same in by_seed), known


def point(runs: Sequence[Run], *, once: bool = False) -> Point:
    """Runs of one setting of an engine at one rate. ``once``: whatever their seeds, their requests are the same or some are."""
    scores, (by_seed, window, known) = [run.score for run in runs], _pooled(runs, once=once)
    return Point(
        **known,
        stage=runs[0].stage,
        label=runs[0].label,
        rate=scores[0].rate,
        offered_rate=_round(sum(_mean(same, lambda s: s.offered) for same in by_seed) / window),
        goodput=goodput_spread(_in_blocks(by_seed), window, tuple(s.goodput for s in scores)),
        throughput=mean_spread(tuple(s.throughput for s in scores)),
        ttft_p50_ms=_median(scores, lambda s: s.ttft_ms.p50),
        ttft_p99_ms=_median(scores, lambda s: s.ttft_ms.p99),
        tpot_p50_ms=_median(scores, lambda s: s.tpot_ms.p50),
        tpot_p99_ms=_median(scores, lambda s: s.tpot_ms.p99),
        preemptions=sum(s.steps.preemptions for s in scores),
        e2e_mean_ms=_average(s.e2e_mean_ms for s in scores),
        classes=_by_class(by_seed),
    )


def callable_point(runs: Sequence[Run]) -> CallablePoint:
    """Runs of one setting of a batcher at one rate."""
    by_seed, window, known = _pooled(runs)
    calls = sum(_mean(same, lambda s: s.steps.steps) for same in by_seed)
    called = sum(_mean(same, lambda s: s.steps.steps * s.steps.mean_running) for same in by_seed)
    return CallablePoint(
        **known,
        source="simulated" if runs[0].stage == "simulation" else "measured",
        strategy=runs[0].batcher_setting.strategy,
        goodput=_round(known["met"] / window),
        e2e_p50_ms=_median([run.score for run in runs], lambda s: s.e2e_ms.p50),
        items_per_call=_round(called / max(1, calls)),
        calls_per_s=_round(calls / window),
    )


def _by_class(seeds: Sequence[Sequence[Score]]) -> dict[str, ClassPoint]:
    """Scores by seed, those of one seed together once, as in :func:`point`."""
    found = {}
    for name in dict.fromkeys(name for same in seeds for score in same for name in score.classes):
        known = [[c for s in same if (c := s.classes.get(name)) is not None] for same in seeds]
        known = [same for same in known if same]
        every = [one for same in known for one in same]
        offered = round(sum(statistics.fmean(c.offered for c in same) for same in known))
        met = min(offered, round(sum(statistics.fmean(c.met for c in same) for same in known)))
        found[name] = ClassPoint(
            weight=every[0].weight, offered=offered, met=met, attainment=met / offered if offered else 0.0,
            throughput=_round(statistics.fmean(c.throughput for c in every)),
            ttft_p99_ms=_middle(c.ttft_ms for c in every), tpot_p99_ms=_middle(c.tpot_ms for c in every),
            e2e_p99_ms=_middle(c.e2e_ms for c in every),
        )  # fmt: skip
    return found


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _round(statistics.fmean(known)) if known else None


def _middle(latencies: Iterable[Latency | None]) -> float | None:
    known = [one.p99 for one in latencies if one is not None and one.p99 is not None]
    return _round(statistics.median(known)) if known else None


def goodput_spread(blocks: Floats, window_s: float, runs: tuple[float, ...]) -> Spread:
    """The mean goodput over ``window_s`` seconds and its 95% interval: Student's t over ``blocks`` (offered and met in each).

    Requests of a burst are late together, so single requests are no independent sample, nor are single seconds; blocks of
    four seconds nearly are. Short windows allow only shorter blocks (:func:`_in_blocks`). Where a backlog outlasts a block, as
    near capacity, the interval is too narrow. One block has no interval: both ends are the mean.
    """
    met = blocks[:, 1]
    mean = float(met.sum()) / window_s
    half = _student(len(met)) * float(met.std(ddof=1)) * math.sqrt(len(met)) / window_s if len(met) > 1 else 0.0
    return Spread(
        mean=_round(mean), low=_round(max(0.0, mean - half)), high=_round(mean + half), runs=tuple(map(_round, runs))
    )


def attainment_interval(met: int, offered: int, clusters: Floats) -> tuple[float, float]:
    """A 95% interval of the share ``met`` of ``offered`` requests that do not fail one by one.

    Wilson's, of as many requests as would be worth as much if they were independent (Korn and Graubard 1998): ``offered``
    over the design effect, which ``clusters`` (offered and met in each) show, with Student's t for the normal quantile.
    Never narrower than Wilson's; the same where nothing, or everything, was met, and of a single cluster.
    """
    if not 0 < met < offered or len(clusters) < 2:
        return wilson_interval(met, offered)
    came, good = clusters[:, 0], clusters[:, 1]
    share, count = good.sum() / came.sum(), len(clusters)
    variance = count / (count - 1) * float(((good - share * came) ** 2).sum()) / float(came.sum()) ** 2
    if not 0 < share < 1 or variance <= 0:
        return wilson_interval(met, offered)
    worth = share * (1 - share) / variance * (_TWO_SIDED / _student(count)) ** 2
    independent = min(1.0, float(worth) / offered)
    return wilson_interval(met * independent, offered * independent)


def _clusters(runs: Sequence[Run], by_seed: Sequence[Sequence[Score]]) -> Floats:
    """What varies by itself: in simulation each seed, of several, whose runs are long; else blocks of seconds."""
    if runs[0].stage == "simulation" and len(by_seed) > 1:
        return np.array([[_mean(same, lambda s: s.offered), _mean(same, lambda s: s.met)] for same in by_seed])
    return _in_blocks(by_seed)


def _in_blocks(by_seed: Sequence[Sequence[Score]]) -> Floats:
    """Requests offered and met in each of some blocks of equal length, in order; means over runs of one seed.

    Of at most 4 s, or of a thirtieth of all windows where that is longer; shorter where it makes fewer than 5: 1 s where the
    windows last less than 10 s together. No block holds parts of two seeds.
    """
    windows = [np.array(_mean_blocks(same), dtype=float).reshape(-1, 2) for same in by_seed]
    second = sum(_mean(same, lambda s: s.window_s) for same in by_seed) / max(1, sum(map(len, windows)))
    total = sum(map(len, windows))
    length = max(1, min(total // _FEWEST_BLOCKS, max(round(_BLOCK_S / second), math.ceil(total / _MOST_BLOCKS))))
    parts = (part for w in windows if len(w) for part in np.array_split(w, -(-len(w) // length)))
    return np.array([part.sum(axis=0) for part in parts]).reshape(-1, 2)


def gain(mine: Sequence[Run], base: Sequence[Run], noise: float = 0.0) -> Gain | None:
    """Requests/s within the SLO of ``mine`` over those of ``base``: the ratio and its 95% interval. None where one met none.

    Where both have runs under the same seeds those alone are compared: they met the same requests, so each block of seconds
    (:func:`_in_blocks`) of one is compared with the same block of the other, and the luck of the arrivals cancels out. The
    interval is Fieller's over the blocks (:func:`_fieller`); and at the least what runs of one setting differ by in 95 of 100
    cases, whose coefficient of variation is ``noise`` (:func:`beyond_noise`): a slow minute of the machine outlasts the blocks.
    """
    common = {run.score.seed for run in mine} & {run.score.seed for run in base}
    sides = [[run for run in runs if not common or run.score.seed in common] for runs in (mine, base)]
    (mine_s, mine_blocks), (base_s, base_blocks) = map(_by_block, sides)
    mine_met, base_met = mine_blocks[:, 1], base_blocks[:, 1]
    if not (base_met.sum() and mine_met.sum()):
        return None
    ratio = float((mine_met.sum() / mine_s) / (base_met.sum() / base_s))
    low, high = _fieller(mine_met / mine_met.mean(), base_met / base_met.mean(), paired=bool(common))
    found = Gain(
        ratio=max(_LEAST_RATIO, _round(ratio)),
        low=_round(ratio * low),
        high=_capped(ratio * high, ratio),
        requests=round(float(mine_blocks[:, 0].sum())),
        paired=bool(common),
        block_s=_round(mine_s / len(mine_met)),
    )
    return beyond_noise(found, noise, len(sides[0]), len(sides[1]))


def _fieller(above: Floats, below: Floats, *, paired: bool) -> tuple[float, float]:
    """A 95% interval of the ratio of the means of two series, each of mean 1: Fieller's (1954), no lower than 0.

    It holds each ratio r for which Student's t-test does not tell the mean of ``above`` − r · ``below`` from 0. Both ends are
    roots of a·r² − 2b·r + c; where the mean of ``below`` is not clearly above 0, a ≤ 0, and there is no upper end (``inf``).
    ``paired``: values of one index belong together, if there are equally many. A single value has no interval: 0 to ``inf``.
    """
    count = min(len(above), len(below))
    if count < 2:
        return 0.0, math.inf
    together = paired and len(above) == len(below)
    squared = _student(count) ** 2
    b = 1 - squared * (float(np.cov(above, below)[0, 1]) / count if together else 0.0)
    a, c = (1 - squared * float(values.var(ddof=1)) / len(values) for values in (below, above))
    root = math.sqrt(max(0.0, b * b - a * c))
    return (c / (b + root) if c > 0 else 0.0), ((b + root) / a if a > 0 else math.inf)


def _capped(high: float, ratio: float) -> float:
    """The upper end of a gain's interval as a profile has it: finite, and not below the ratio."""
    return max(_LEAST_RATIO, _round(min(high, max(ratio, UNBOUNDED_GAIN))))


def beyond_noise(found: Gain, noise: float, mine: int, base: int) -> Gain:
    """``found`` with an interval that holds what chance makes of the ratio of so many runs of ``mine`` to so many of ``base``:
    of one setting they differ by a coefficient of variation of ``noise``."""
    apart = 1 + _TWO_SIDED * noise * math.sqrt(1 / mine + 1 / base)
    low, high = min(found.low, _round(found.ratio / apart)), max(found.high, _capped(found.ratio * apart, found.ratio))
    return found.model_copy(update={"low": low, "high": high})


def known_gain(profile: Profile) -> Gain | None:
    """The profile's ``gain``, no more certain than its ``noise`` allows: versions before ``block_s`` did not count that in."""
    found, base = profile.gain, profile.baseline
    if found is None or base is None or profile.confidence is None or profile.objective != "goodput":
        return found
    setting = profile.settings.get(RECOMMENDED, next(iter(profile.settings.values())))
    mine, theirs = setting.point.seeds, base.seeds
    common = {*mine} & {*theirs}
    runs = [sum(not common or seed in common for seed in seeds) for seeds in (mine, theirs)]
    return beyond_noise(found, profile.confidence.noise, runs[0], runs[1]) if all(runs) else found


def likely_better(mine: Sequence[Run], base: Sequence[Run], noise: float) -> bool:
    """Whether ``mine`` measured so much more goodput than ``base`` under the same requests that it counts, whatever is expected.

    A choice takes less certainty than a claim (:attr:`Gain.clear`, which misses most gains in short windows): the ratio is
    above 1 in 97.5% of bootstrap draws of single seconds, and farther from it than runs of one setting are in 95 of 100 cases,
    whose coefficient of variation is ``noise``. Of settings that do not differ it says so of 4 to 10%.
    """
    common = {run.score.seed for run in mine} & {run.score.seed for run in base}
    sides = [[run for run in runs if not common or run.score.seed in common] for runs in (mine, base)]
    (mine_s, mine_met), (base_s, base_met) = map(_by_second, sides)
    if not (mine_met.sum() and base_met.sum()):
        return point(mine).attainment_low > point(base).attainment_high
    ratio = (mine_met.sum() / mine_s) / (base_met.sum() / base_s)
    if not common or ratio - 1 <= _TWO_SIDED * noise * math.sqrt(1 / len(sides[0]) + 1 / len(sides[1])):
        return False
    rng = np.random.default_rng(0)  # the same runs give the same choice
    draws, at_once = [], max(1, _DRAWS // len(mine_met))
    for made in range(0, _RESAMPLES, at_once):
        at = rng.integers(len(mine_met), size=(min(at_once, _RESAMPLES - made), len(mine_met)))
        draws.append(mine_met[at].sum(axis=1) / mine_s > base_met[at].sum(axis=1) / base_s)
    return float(np.concatenate(draws).mean()) > _LIKELY


def share_interval(low: float, high: float) -> str:
    """An interval of a share in percent, without the sign: ``97–98``, and ``99.6–100`` where a digit more can matter."""
    return "–".join(f"{100 * end:.{_digits(low)}f}".removesuffix(".0") for end in (low, high))


def share_beside(share: float, low: float, target: float | None = None) -> str:
    """A share as it stands beside its interval, which begins at ``low``: ``98%``, and ``99.6%`` where that has a digit more, or
    :func:`in_percent` asks for it."""
    return in_percent(share, _digits(low) if share < 1 else 0, target=target)


def _digits(low: float) -> int:
    return 1 if low > 0.99 else 0


def _by_block(runs: Sequence[Run]) -> tuple[float, Floats]:
    """Seconds, and requests offered and met in each block (means over runs of one seed), in the order of the seeds."""
    window_s, by_seed = _by_seed(runs)
    return window_s, _in_blocks(by_seed)


def _by_second(runs: Sequence[Run]) -> tuple[float, Floats]:
    """The same of requests met in each second."""
    window_s, by_seed = _by_seed(runs)
    return window_s, np.array([met for same in by_seed for _, met in _mean_blocks(same)], dtype=float)


def _by_seed(runs: Sequence[Run]) -> tuple[float, list[list[Score]]]:
    """Seconds, of each seed once, and the scores under each, in the order of the seeds."""
    seeds: dict[int, list[Score]] = {}
    for run in sorted(runs, key=lambda run: run.score.seed):
        seeds.setdefault(run.score.seed, []).append(run.score)
    return sum(_mean(same, lambda s: s.window_s) for same in seeds.values()), list(seeds.values())


def _student(count: int) -> float:
    """Standard errors to either side of a mean of ``count`` values that hold 95%."""
    return float(stdtrit(count - 1, 0.975))


def mean_spread(runs: tuple[float, ...]) -> Spread:
    """The mean and range of a few runs: too few for an interval of their own."""
    return Spread(
        mean=_round(statistics.fmean(runs)),
        low=_round(min(runs)),
        high=_round(max(runs)),
        runs=tuple(map(_round, runs)),
    )


def pareto(candidates: Sequence[Point]) -> list[Point]:
    """Those no other beats in goodput, throughput, TTFT p99 and TPOT p99 at once (at least equal in all, better in one)."""
    return [p for p in candidates if not any(_dominates(q, p) for q in candidates)]


def _dominates(a: Point, b: Point) -> bool:
    mine, other = _merits(a), _merits(b)
    return all(x >= y for x, y in zip(mine, other, strict=True)) and mine != other


def _merits(p: Point) -> tuple[float, ...]:
    worst = float("inf")
    latencies = (worst if value is None else value for value in (p.ttft_p99_ms, p.tpot_p99_ms))
    return (p.goodput.mean, p.throughput.mean, *(-value for value in latencies))


def _mean(scores: Sequence[Score], get: Callable[[Score], float]) -> float:
    return statistics.fmean(get(score) for score in scores)


def _mean_blocks(same: Sequence[Score]) -> list[tuple[float, float]]:
    """Requests offered and met of each block, means over runs of the same requests; a run that ended before has none in it."""
    seconds = zip_longest(*(score.blocks for score in same), fillvalue=(0, 0))
    return [(statistics.fmean(o for o, _ in runs), statistics.fmean(m for _, m in runs)) for runs in seconds]


def _median(scores: Sequence[Score], get: Callable[[Score], float | None]) -> float | None:
    known = [value for score in scores if (value := get(score)) is not None]
    return _round(statistics.median(known)) if known else None


def _round(value: float) -> float:
    return round(float(value), 4)
