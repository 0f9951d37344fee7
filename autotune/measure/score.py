"""What a measurement found: the :class:`Score`, and the pure arithmetic from records to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from autotune.workload.replay import ReplayReport
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord, percentile
from runtime.slo import SLO, attainment, slo_for, weighted_attainment, wilson_interval

CDF_AT = (0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 97.5, 99, 100)
"""The percentiles a latency distribution is kept at."""

_MOST_BLOCKS = 10_000  # of a second or more


class Latency(BaseModel):
    """Percentiles of one metric over the requests that have it, ms. None where none has.

    ``cdf``: the percentiles of ``CDF_AT``; empty where no request has the metric, and in scores of earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    p50: float | None
    p99: float | None
    cdf: tuple[float, ...] = ()


class StepStats(BaseModel):
    """The engine's steps inside the window. ``running``: sequences in a step. ``limited_by``: share of steps each bound
    held back."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    steps: int
    mean_ms: float
    p99_ms: float
    mean_running: float
    max_running: int
    mean_tokens: float
    preemptions: int
    limited_by: dict[str, float]


class ClassScore(BaseModel):
    """How the requests of one class fared against their own SLO.

    ``goodput``: its requests/s that met all their targets, not weighted. ``throughput``: its output tokens/s that came out during
    the window. ``relegated``: requests that waited behind all that could still be met; ``rejections``: those rejected, by cause.
    Scores of earlier versions lack these and the weight.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    slo: str
    weight: float = 1.0
    offered: int
    met: int
    attainment: float
    goodput: float
    violations: dict[str, int]
    throughput: float = 0.0
    relegated: int = 0
    rejections: dict[str, int] = {}
    ttft_ms: Latency | None = None
    tpot_ms: Latency | None = None
    e2e_ms: Latency | None = None


class Score(BaseModel):
    """What one setting did under one load.

    ``setting``: the knobs by name, in force as ``epoch``. ``seed``: of the arrivals and lengths. ``rate`` is the workload's
    mean; ``offered_rate`` what came in this window of ``window_s`` seconds, which for a few seconds of bursts or of a trace
    may be something else (both requests/s). Of the ``offered`` requests, ``met`` met every target: ``attainment`` is that
    share, ``attainment_low`` and ``attainment_high`` its 95% Wilson interval. ``violations``: how many missed each metric.
    ``unfinished``: those that were cut off after the last deadline, or timed out. ``goodput``: requests/s that met every
    target, each counted by the weight of its class; ``completed_rate``: those that completed at all; both of those due in the
    window. ``throughput``: output tokens/s that came out during the window, whoever they belong to. ``blocks``: (offered,
    met), weighted, of each second of the window (of longer parts where it has more than 10,000), for intervals that respect
    bursts. ``ttft_ms``, ``tpot_ms``, ``e2e_ms``: percentiles. ``e2e_mean_ms``: over all but the rejected; one that was
    unfinished counts with the time it had been there. ``steps``: the engine's inside the window. ``lateness_p99_ms``: how
    late the sender was; ``sender_busy``: the share of its time that it spent handing requests over. ``wall_s``: how long the
    measurement took on the engine's clock, warm-up and drain included. Each request is judged by the SLO of its class;
    ``classes`` has each class by itself, and is empty where there is one SLO for all (and in scores of earlier versions).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    setting: dict[str, int | float]
    epoch: int
    seed: int
    rate: float
    offered_rate: float
    window_s: float
    offered: int
    met: int
    attainment: float
    attainment_low: float
    attainment_high: float
    goodput: float
    completed_rate: float
    throughput: float
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency
    violations: dict[str, int]
    unfinished: int
    blocks: list[tuple[int | float, int | float]]
    lateness_p99_ms: float
    sender_busy: float
    steps: StepStats
    wall_s: float
    classes: dict[str, ClassScore] = {}
    e2e_mean_ms: float | None = None

    @property
    def weighted_attainment(self) -> float:
        """Goodput as a share of what was offered: attainment, each request counted by the weight of its class."""
        return weighted_attainment(self)


_ALL_GAPS = 100
"""Tokens of an answer whose 99th percentile gap is its longest."""


def deadline(slo: SLO, output_tokens: int) -> float:
    """Seconds after its arrival by which a request of ``output_tokens`` has met its SLO, or never will (inf: no such time)."""
    # of more, the longest gap is beyond the 99th percentile, and may be as long as it likes
    every = output_tokens <= _ALL_GAPS
    gap = min((t for t in (slo.tpot_ms, slo.itl_ms if every else None) if t is not None), default=math.inf)
    first = slo.ttft_ms if slo.ttft_ms is not None else math.inf
    by_tokens = first if output_tokens == 1 else first + gap * (output_tokens - 1)
    return min(by_tokens, slo.e2e_ms if slo.e2e_ms is not None else math.inf) / 1000


def score(
    records: Sequence[RequestRecord],
    slo: SLO | Mapping[str, SLO],
    *,
    setting: Knobs,
    epoch: int,
    seed: int,
    rate: float,
    start: float,
    duration: float,
    tokens: int,
    steps: Sequence[StepRecord],
    report: ReplayReport,
    wall_s: float,
    weights: Mapping[str, float] | None = None,
    tokens_by_class: Mapping[str, int] | None = None,
) -> Score:
    """Pure arithmetic from records (arrival = when due) to a :class:`Score`. ``slo``: one for all, or one for each class, with
    ``default`` for those not named; ``weights``: of classes, 1 for those not named."""
    weights = weights or {}
    judged = attainment(records, slo)
    low, high = wilson_interval(judged.met, judged.offered)
    blocks: list[tuple[int | float, int | float]] = [(0, 0)] * min(_MOST_BLOCKS, max(1, round(duration)))
    width = duration / len(blocks)
    goodput = 0.0
    for record in records:
        at = min(len(blocks) - 1, max(0, int((record.arrival - start) / width)))
        offered, met = blocks[at]
        good = record.offered and slo_for(slo, record.request_class).met(record)
        weight = weights.get(record.request_class, 1)
        goodput += weight * good
        blocks[at] = (offered + weight * record.offered, met + weight * good)
    lasted = [_there(r) for r in records if r.offered and r.reason is not FinishReason.REJECTED]
    return Score(
        setting=setting.as_dict(),
        epoch=epoch,
        seed=seed,
        rate=rate,
        offered_rate=judged.offered / duration,
        window_s=duration,
        offered=judged.offered,
        met=judged.met,
        attainment=judged.share,
        attainment_low=low,
        attainment_high=high,
        goodput=goodput / duration,
        completed_rate=sum(r.completed for r in records) / duration,
        throughput=tokens / duration,
        ttft_ms=_latency(r.ttft for r in records),
        tpot_ms=_latency(r.tpot for r in records),
        e2e_ms=_latency(r.e2e for r in records),
        violations=dict(judged.violations),
        unfinished=sum(r.reason is FinishReason.TIMEOUT for r in records),
        blocks=blocks,
        lateness_p99_ms=report.lateness_p99 * 1000,
        sender_busy=report.busy / max(report.end - report.start, 1e-9),
        steps=step_stats(steps),
        wall_s=wall_s,
        classes={} if isinstance(slo, SLO) else _by_class(records, slo, duration, weights, tokens_by_class or {}),
        e2e_mean_ms=1000 * math.fsum(lasted) / len(lasted) if lasted else None,
    )


def _there(record: RequestRecord) -> float:
    """Seconds from its arrival to its end."""
    e2e = record.e2e if record.completed else None
    return record.finished - record.arrival if e2e is None else e2e


def _by_class(
    records: Sequence[RequestRecord],
    slos: Mapping[str, SLO],
    duration: float,
    weights: Mapping[str, float],
    tokens: Mapping[str, int],
) -> dict[str, ClassScore]:
    """Of each class with an SLO of its own; of the others, which go by ``default``, where there are any."""
    if len(slos) < 2:
        return {}
    found = {}
    for name, slo in slos.items():
        mine = [r for r in records if (r.request_class if r.request_class in slos else "default") == name]
        if name == "default" and not mine:
            continue
        judged = attainment(mine, slo)
        rejected = Counter(r.cause or "rejected" for r in mine if r.reason is FinishReason.REJECTED)
        found[name] = ClassScore(
            slo=str(slo), weight=weights.get(name, 1.0), offered=judged.offered, met=judged.met, attainment=judged.share,
            goodput=judged.met / duration, violations=dict(judged.violations),
            throughput=sum(n for c, n in tokens.items() if (c if c in slos else "default") == name) / duration,
            relegated=sum(r.relegated for r in mine), rejections=dict(rejected), ttft_ms=_latency(r.ttft for r in mine),
            tpot_ms=_latency(r.tpot for r in mine), e2e_ms=_latency(r.e2e for r in mine),
        )  # fmt: skip
    return found


def step_stats(steps: Sequence[StepRecord]) -> StepStats:
    times = [s.duration * 1000 for s in steps]
    n = max(1, len(steps))
    bounds: Mapping[str, int] = Counter(str(s.limited_by) for s in steps)
    return StepStats(
        steps=len(steps),
        mean_ms=sum(times) / n,
        p99_ms=percentile(times, 99) or 0.0,
        mean_running=sum(s.decodes + s.chunks for s in steps) / n,
        max_running=max((s.decodes + s.chunks for s in steps), default=0),
        mean_tokens=sum(s.tokens for s in steps) / n,
        preemptions=sum(s.preemptions for s in steps),
        limited_by={name: count / n for name, count in sorted(bounds.items())},
    )


def _latency(seconds: Iterable[float | None]) -> Latency:
    known = sorted(s * 1000 for s in seconds if s is not None)
    cdf = tuple(round(percentile(known, q) or 0.0, 4) for q in CDF_AT) if known else ()
    return Latency(p50=percentile(known, 50), p99=percentile(known, 99), cdf=cdf)
