"""Simulated beside real: one metric of one workload, its tables, and the summary, for :mod:`benchmarks.fidelity`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from autotune.cost.model import CostModel
from autotune.measure.score import Score
from autotune.profiling.step_driver import idle_before, samples
from benchmarks.live.ratios import number
from runtime.records import StepRecord
from runtime.step_model import StepFeatures

CLOSE, SPREADS = 0.15, 1.5
LOADED = 0.9
"""Of capacity: up to there TTFT and E2E are held to :data:`CLOSE` in the middle. Past it a queue multiplies every error."""

TIGHT_METRICS = ("TPOT p50", "TPOT p99", "throughput")
LOOSE_METRICS = ("TTFT p50", "TTFT p99", "E2E p50", "E2E p99")
METRICS = (*TIGHT_METRICS, *LOOSE_METRICS)


class Compared(NamedTuple):
    """One metric of one workload at ``load`` times capacity: medians over the rounds, each by the calibration before it alone.

    ``real``: of the real runs; ``signed``: of simulated ÷ real − 1; ``absolute``: of its size, which luck to both sides doesn't
    cancel; ``spread``: the range of the real runs as a share of ``real``; ``within``: the share of rounds off by no more than
    is allowed.
    """

    case: str
    load: float
    metric: str
    real: float
    signed: float
    absolute: float
    spread: float
    within: float

    @classmethod
    def of(cls, case: str, load: float, metric: str, real: Sequence[float], ratios: Sequence[float]) -> Compared:
        """From a figure of each round: what was real, and simulated ÷ real − 1."""
        middle = statistics.median(real)
        spread = (max(real) - min(real)) / middle if middle else 0.0
        off = [abs(ratio) for ratio in ratios]
        within = statistics.fmean(each <= allowed(spread) for each in off)
        return cls(case, load, metric, middle, statistics.median(ratios), statistics.median(off), spread, within)

    @property
    def ok(self) -> bool:
        return self.absolute <= allowed(self.spread)


def allowed(spread: float) -> float:
    """How far off TTFT and E2E may be where real runs are within ``spread`` of each other."""
    return max(CLOSE, SPREADS * spread)


def metrics(score: Score) -> dict[str, float]:
    found = {"throughput": score.throughput}
    for name, latency in (("TPOT", score.tpot_ms), ("TTFT", score.ttft_ms), ("E2E", score.e2e_ms)):
        found[f"{name} p50"], found[f"{name} p99"] = latency.p50 or 0.0, latency.p99 or 0.0
    return found


def relative_error(predicted: float, real: float) -> float:
    """Simulated ÷ real − 1; infinite where nothing came of the real run, whatever was simulated."""
    return predicted / real - 1 if real else math.inf


def mean_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Means over several draws of one simulation."""
    each = [metrics(score) for score in scores]
    return {name: statistics.fmean(one[name] for one in each) for name in each[0]}


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


def step_pairs(records: Sequence[StepRecord], costs: Costs) -> list[StepPair]:
    """Every step, the idle time before it left out. In the middle, simulated steps take less than on average, by the median of
    the jitter."""
    jitter = costs.serving.facts.jitter
    middle = statistics.median(jitter.quantiles) if jitter else 1.0
    pairs = []
    for served in samples(records, idle_before(records)):
        step = StepFeatures.of(served.record)
        mean = costs.serving.predict(step)
        pairs.append(StepPair(costs.usual.predict(step), mean, middle * mean, served.seconds))
    return pairs


def median_error(steps: Sequence[StepPair]) -> float:
    """Of what steps usually take."""
    return statistics.median(abs(s.predicted / s.real - 1) for s in steps)


def median_signed(steps: Sequence[StepPair]) -> float:
    """The same with its sign: above 0, steps are predicted to take longer than they did."""
    return statistics.median(s.predicted / s.real - 1 for s in steps)


def median_error_simulated(steps: Sequence[StepPair]) -> float:
    return statistics.median(abs(s.median / s.real - 1) for s in steps)


def bias(steps: Sequence[StepPair]) -> float:
    """Of all steps together, as simulated."""
    return sum(s.mean for s in steps) / sum(s.real for s in steps) - 1


def report(found: Sequence[Compared], steps: dict[str, list[StepPair]]) -> dict[str, float | None]:
    """The tables, where the errors are large, and the summary: absolute errors, and those with their sign. None: infinite."""
    print(
        "\nsimulated ÷ real − 1, each round by the calibration before it: medians over the rounds, in brackets the range of the "
        "repeated real runs\n"
    )
    _table(found, steps, {"step": median_signed, "in all": bias}, "+.1%", lambda c: f"{c.signed:+.1%} [{c.spread:.0%}]")
    print("\nthe same without its sign: medians of |simulated ÷ real − 1|; ! by more than 15% and 1.5 × the range\n")
    of_steps = {"step": median_error, "in sim.": median_error_simulated}
    _table(
        found, steps, of_steps, ".1%", lambda c: f"{c.absolute:.1%}{' ' if c.metric in TIGHT_METRICS or c.ok else '!'}"
    )
    loose = [c for c in found if c.metric in LOOSE_METRICS]
    for c in loose:
        if not c.ok:
            print(
                f"outside: {c.metric} of {c.case}: {c.absolute:.1%} ({c.signed:+.1%} with its sign), "
                f"the real runs within {c.spread:.1%} of each other"
            )
    tpot = [c for c in found if c.metric.startswith("TPOT")]
    throughput = [c for c in found if c.metric == "throughput"]
    middle = [c for c in loose if c.metric.endswith("p50")]
    loaded = max((c for c in middle if c.load <= LOADED), key=lambda c: c.absolute)
    every = [step for each in steps.values() for step in each]
    print(
        f"worst: TPOT {max(c.absolute for c in tpot):.1%}, throughput {max(c.absolute for c in throughput):.1%}, "
        f"step {max(map(median_error, steps.values())):.1%}; up to {LOADED:g} of capacity {loaded.metric} {loaded.absolute:.1%} "
        f"({loaded.case})"
    )
    summary = {
        "step_error": median_error(every),
        "step_error_signed": median_signed(every),
        "step_error_simulated": median_error_simulated(every),
        "tpot_error": statistics.median(c.absolute for c in tpot),
        "tpot_error_signed": statistics.median(c.signed for c in tpot),
        "throughput_error": statistics.median(c.absolute for c in throughput),
        "throughput_error_signed": statistics.median(c.signed for c in throughput),
        "ttft_e2e_p50_worst": loaded.absolute,
        "ttft_e2e_p50_worst_signed": loaded.signed,
        "ttft_e2e_ok_share": sum(c.ok for c in loose) / len(loose),
        "ttft_e2e_ok_share_of_rounds": statistics.fmean(c.within for c in loose),
    }
    if past := [c for c in middle if c.load > LOADED]:
        summary["ttft_e2e_p50_past_capacity"] = statistics.median(c.absolute for c in past)
        summary["ttft_e2e_p50_past_capacity_signed"] = statistics.median(c.signed for c in past)
        summary["tpot_error_past_capacity"] = statistics.median(c.absolute for c in tpot if c.load > LOADED)
    return {name: number(value) for name, value in summary.items()}


def _table(
    found: Iterable[Compared],
    steps: Mapping[str, Sequence[StepPair]],
    of_steps: Mapping[str, Callable[[Sequence[StepPair]], float]],
    as_text: str,
    cell: Callable[[Compared], str],
) -> None:
    """A row for each workload: its load, figures ``of_steps``, written ``as_text``, and a cell for every metric."""
    print(f"{'':27}{'load':>5}" + "".join(f"{name:>9}" for name in of_steps) + "".join(f"{n:>15}" for n in METRICS))
    by_case: dict[str, dict[str, Compared]] = {}
    for c in found:
        by_case.setdefault(c.case, {})[c.metric] = c
    for case, row in by_case.items():
        head = f"{case:27}{row[METRICS[0]].load:5g}"
        figures = "".join(f"{format(figure(steps[case]), as_text):>9}" for figure in of_steps.values())
        print(head + figures + "".join(f"{cell(row[name]):>15}" for name in METRICS))
