"""Simulated beside real: one metric of one workload, its table, and the summary, for :mod:`benchmarks.fidelity`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from autotune.cost.model import CostModel
from autotune.measure.score import Score
from autotune.profiling.step_driver import samples
from runtime.records import StepRecord
from runtime.step_model import StepFeatures

CLOSE, SPREADS = 0.15, 1.5
TIGHT_METRICS = ("TPOT p50", "TPOT p99", "throughput")
LOOSE_METRICS = ("TTFT p50", "TTFT p99", "E2E p50", "E2E p99")


class Compared(NamedTuple):
    """One metric of one workload: medians over the rounds of the real runs, of simulated ÷ real − 1, and the real range.

    ``single``: the median of what one simulation is off by from one run; ``single_ok``: the share of them that is off by no
    more than is allowed.
    """

    case: str
    metric: str
    real: float
    error: float
    spread: float
    single: float
    single_ok: float

    @classmethod
    def of(cls, case: str, metric: str, real: Sequence[float], ratios: Sequence[Sequence[float]]) -> Compared:
        """From a figure of each round: what was real, and simulated ÷ real − 1 by each of its calibrations."""
        middle = statistics.median(real)
        spread = (max(real) - min(real)) / middle if middle else 0.0
        off = [abs(ratio) for each in ratios for ratio in each]
        fits = [each <= allowed(spread) for each in off]
        return cls(
            case,
            metric,
            middle,
            statistics.median(statistics.fmean(each) for each in ratios),
            spread,
            statistics.median(off),
            statistics.fmean(fits),
        )

    @property
    def ok(self) -> bool:
        return abs(self.error) <= allowed(self.spread)


def allowed(spread: float) -> float:
    """How far off TTFT and E2E may be where real runs are within ``spread`` of each other."""
    return max(CLOSE, SPREADS * spread)


def metrics(score: Score) -> dict[str, float]:
    found = {"throughput": score.throughput}
    for name, latency in (("TPOT", score.tpot_ms), ("TTFT", score.ttft_ms), ("E2E", score.e2e_ms)):
        found[f"{name} p50"], found[f"{name} p99"] = latency.p50 or 0.0, latency.p99 or 0.0
    return found


class Costs(NamedTuple):
    """What a calibration gave: what steps usually take, and what they take on average in a simulation."""

    usual: CostModel
    serving: CostModel


class StepPair(NamedTuple):
    """A served step: the seconds that the cost model says such a step usually takes, those it takes in simulations, on average
    and in the middle, and those it took."""

    predicted: float
    mean: float
    median: float
    real: float


def step_pairs(records: Sequence[StepRecord], around: Sequence[Costs]) -> list[StepPair]:
    """Every step, the idle time before it left out; ``predicted`` is the mean over the calibrations ``around``. In the middle,
    simulated steps take less than on average, by the median of the jitter."""
    jitters = [costs.serving.facts.jitter for costs in around]
    middles = [statistics.median(jitter.quantiles) if jitter else 1.0 for jitter in jitters]
    idle = {i for i, (a, b) in enumerate(pairwise(records), start=1) if b.start - a.end > 1e-3}
    pairs = []
    for served in samples(records, idle):
        step = StepFeatures.of(served.record)
        means = [costs.serving.predict(step) for costs in around]
        pairs.append(
            StepPair(
                statistics.fmean(costs.usual.predict(step) for costs in around),
                statistics.fmean(means),
                statistics.fmean(middle * mean for middle, mean in zip(middles, means, strict=True)),
                served.seconds,
            )
        )
    return pairs


def median_error(steps: Sequence[StepPair]) -> float:
    """Of what steps usually take."""
    return statistics.median(abs(s.predicted / s.real - 1) for s in steps)


def median_error_simulated(steps: Sequence[StepPair]) -> float:
    return statistics.median(abs(s.median / s.real - 1) for s in steps)


def bias(steps: Sequence[StepPair]) -> float:
    """Of all steps together, as simulated."""
    return sum(s.mean for s in steps) / sum(s.real for s in steps) - 1


def report(found: Sequence[Compared], steps: dict[str, list[StepPair]]) -> dict[str, float]:
    """The table, where the errors are large, and the summary."""
    names = (*TIGHT_METRICS, *LOOSE_METRICS)
    print(
        "\nsimulated ÷ real − 1, with the range of the repeated real runs in brackets; ! outside\n"
        f"{'':21}{'step':>7}{'in all':>8}",
        end="",
    )
    print("".join(f"{name:>17}" for name in names))
    for case, errors in steps.items():
        row = {c.metric: c for c in found if c.case == case}
        cells = [
            f"{row[n].error:+8.1%} [{row[n].spread:.0%}]{' ' if n in TIGHT_METRICS or row[n].ok else '!'}"
            for n in names
        ]
        print(f"{case:21}{median_error(errors):7.1%}{bias(errors):+8.1%}" + "".join(f"{cell:>17}" for cell in cells))
    loose = [c for c in found if c.metric in LOOSE_METRICS]
    for c in loose:
        if not c.ok:
            print(f"outside: {c.metric} of {c.case}: {c.error:+.1%}, the real runs within {c.spread:.1%} of each other")
    tpot = [abs(c.error) for c in found if c.metric.startswith("TPOT")]
    throughput = [abs(c.error) for c in found if c.metric == "throughput"]
    every = [step for each in steps.values() for step in each]
    print(
        f"worst: TPOT {max(tpot):.1%}, throughput {max(throughput):.1%}, step {max(map(median_error, steps.values())):.1%}"
    )
    return {
        "step_error": round(median_error(every), 4),
        "tpot_error": round(statistics.median(tpot), 4),
        "throughput_error": round(statistics.median(throughput), 4),
        "ttft_e2e_ok_share": round(sum(c.ok for c in loose) / len(loose), 4),
        "tpot_error_of_single_calibrations": round(
            statistics.median(c.single for c in found if c.metric.startswith("TPOT")), 4
        ),
        "ttft_e2e_ok_share_of_single_calibrations": round(statistics.fmean(c.single_ok for c in loose), 4),
        "step_error_simulated": round(median_error_simulated(every), 4),
    }
