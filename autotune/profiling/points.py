"""From runs to points: repeated measurements of one setting put together, with intervals that respect bursts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from pydantic import SerializerFunctionWrapHandler, model_serializer

from autotune.measure.score import Latency, Score
from autotune.profile.callable import BatcherSetting, CallablePoint, StrategyName, setting_of
from autotune.profile.parts import ClassPoint, Gain, Part, Point, Spread, StepPoint
from runtime.knobs import Knobs
from runtime.slo import wilson_interval

Stage = Literal["simulation", "search", "validation", "capacity"]
_RESAMPLES = 2000
_MOST_GAIN = 1000.0  # a ratio beyond it says no more
_TWO_SIDED = 1.96  # deviations, of 95% of a normal distribution
_DRAWS = 5_000_000  # in memory at a time


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
    low, high = wilson_interval(met, offered)
    known = {
        "knobs": runs[0].knobs,
        "seeds": tuple(s.seed for s in scores),
        "offered": offered,
        "met": met,
        "attainment": _round(met / offered if offered else 0.0),
        "attainment_low": _round(low),
        "attainment_high": _round(high),
        "e2e_p99_ms": _median(scores, lambda s: s.e2e_ms.p99),
        "lateness_p99_ms": _round(max(s.lateness_p99_ms for s in scores)),
    }
    return by_seed, sum(_mean(same, lambda s: s.window_s) for same in by_seed), known


def point(runs: Sequence[Run], *, once: bool = False) -> Point:
    """Runs of one setting of an engine at one rate. ``once``: whatever their seeds, their requests are the same or some are."""
    scores, (by_seed, window, known) = [run.score for run in runs], _pooled(runs, once=once)
    blocks = [(_mean(same, lambda s: s.window_s), _mean_blocks(same)) for same in by_seed]
    return Point(
        **known,
        stage=runs[0].stage,
        label=runs[0].label,
        rate=scores[0].rate,
        offered_rate=_round(sum(_mean(same, lambda s: s.offered) for same in by_seed) / window),
        goodput=goodput_spread(blocks, tuple(s.goodput for s in scores)),
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
            weight=every[0].weight, offered=offered, met=met, attainment=_round(met / offered if offered else 0.0),
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


def goodput_spread(blocks: Sequence[tuple[float, Sequence[tuple[float, float]]]], runs: tuple[float, ...]) -> Spread:
    """The mean goodput and its 95% percentile-bootstrap interval over blocks of a second or more.

    Requests of a burst are late together, so single requests are no independent sample; seconds nearly are (a block
    bootstrap: Künsch 1989). With few blocks the interval is rather too narrow than too wide.
    """
    met = np.array([m for _, seconds in blocks for _, m in seconds], dtype=float)
    window = sum(seconds for seconds, _ in blocks)
    rng = np.random.default_rng(0)  # the same runs give the same interval
    at_once = max(1, _DRAWS // max(1, len(met)))  # of so many blocks that memory does not grow with the window
    counts = [min(at_once, _RESAMPLES - made) for made in range(0, _RESAMPLES, at_once)]
    sums = np.concatenate([rng.choice(met, size=(count, len(met))).sum(axis=1) for count in counts]) / window
    low, high = np.percentile(sums, [2.5, 97.5])
    return Spread(mean=_round(met.sum() / window), low=_round(low), high=_round(high), runs=tuple(map(_round, runs)))


def gain(mine: Sequence[Run], base: Sequence[Run]) -> Gain | None:
    """Requests/s within the SLO of ``mine`` over those of ``base``: the ratio and its 95% percentile-bootstrap interval.

    Where both have runs under the same seeds those alone are compared: they met the same requests, so each second of one is
    drawn together with the same second of the other, and the luck of the arrivals cancels out. None where ``base`` met none.
    """
    common = {run.score.seed for run in mine} & {run.score.seed for run in base}
    sides = [[run for run in runs if not common or run.score.seed in common] for runs in (mine, base)]
    (mine_s, mine_met, offered), (base_s, base_met, _) = map(_met_by_second, sides)
    if not (base_met.sum() and mine_met.sum()):
        return None
    rng = np.random.default_rng(0)  # the same runs give the same interval
    at_once = max(1, _DRAWS // max(len(mine_met), len(base_met)))
    ratios: list[float] = []
    for made in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - made)
        at = rng.integers(len(mine_met), size=(count, len(mine_met)))
        of = at if common else rng.integers(len(base_met), size=(count, len(base_met)))
        sums = zip(mine_met[at].sum(axis=1) / mine_s, base_met[of].sum(axis=1) / base_s, strict=True)
        ratios += [a / b if b else math.inf for a, b in sums]
    low, high = np.percentile(ratios, [2.5, 97.5], method="nearest")
    return Gain(
        ratio=_round((mine_met.sum() / mine_s) / (base_met.sum() / base_s)),
        low=_round(low),
        high=_round(min(high, _MOST_GAIN)),
        requests=round(offered),
        paired=bool(common),
    )


def clearly_better(mine: Sequence[Run], base: Sequence[Run], noise: float) -> bool:
    """Whether ``mine`` measured more goodput than ``base`` under the same requests, beyond chance.

    The 95% interval of the ratio lies above 1, and attainments differ by more than runs of one setting do in 95 of 100 cases,
    whose coefficient of variation is ``noise``: a slow minute of the machine outlasts the seconds that are drawn.
    """
    found = gain(mine, base)
    if found is None:
        return point(mine).attainment_low > point(base).attainment_high
    if not found.paired or found.low <= 1:
        return False
    return found.ratio - 1 > _TWO_SIDED * noise * math.sqrt(1 / len(mine) + 1 / len(base))


def _met_by_second(runs: Sequence[Run]) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.float64]], float]:
    """Seconds, requests met in each second (means over runs of one seed), and requests offered, in the order of the seeds."""
    seeds: dict[int, list[Score]] = {}
    for run in sorted(runs, key=lambda run: run.score.seed):
        seeds.setdefault(run.score.seed, []).append(run.score)
    seconds = [pair for same in seeds.values() for pair in _mean_blocks(same)]
    window = sum(_mean(same, lambda s: s.window_s) for same in seeds.values())
    return window, np.array([met for _, met in seconds]), sum(offered for offered, _ in seconds)


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
