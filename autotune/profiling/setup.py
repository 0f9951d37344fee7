"""The load and the promise a machine is profiled under, drawn from what the calibration measured.

The length scale, the SLO when none was given, the first guess of the knobs and the rate are each a small function of step
costs and lengths; docs/profiling.md says why each rule is as it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from autotune.profile_parts import Calibration, KnobsField, Part, SLOField
from autotune.score import Score
from autotune.workload import Arrival, Workload
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.records import StepRecord
from runtime.slo import SLO

TARGET_RATE = 12.0  # requests/s: enough of them in a few seconds of window for a share to mean something
LOAD = 1.15
"""Offered load of the search, in units of the saturated engine's. Below 1 most settings keep every promise and look alike;
far above it the queue decides and they look alike again."""

MOST_RATE = 300.0
"""Requests/s one Python process sends on time beside an engine in the same process."""

_FEWEST_REQUESTS = 20

KNEE = (0.55, 0.93)
"""Attainment of the calibration's own guess at the rate where settings are compared: there is room above and below."""

DEFAULT_SLO = SLO(ttft_ms=500, tpot_ms=50)
_SMALLEST_MEAN_PROMPT, _SMALLEST_MEAN_OUTPUT, _MOST_SHRUNK_OUTPUT = 16, 8, 8
_NICE = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 60, 80, 100)


class StepCost(Part):
    """Seconds of a step: ``base + per_prompt_token · prompt tokens + per_decode · decodes``."""

    base: float
    per_prompt_token: float
    per_decode: float

    def step(self, prompt_tokens: float, decodes: float) -> float:
        return self.base + self.per_prompt_token * prompt_tokens + self.per_decode * decodes


class Setup(Part):
    """What the calibration decided.

    ``rate``: mean requests/s offered in the search; ``offered_rate``: what comes in its window; ``fitted``: where it begins;
    ``most_rate``: more cannot be offered, see :func:`most_rate`.
    """

    length_scale: float
    cap_prompt: int
    cap_output: int
    mean_prompt: float
    mean_output: float
    rate: float
    offered_rate: float
    most_rate: float
    rate_from: Literal["user", "calibration"]
    slo: SLOField
    slo_from: str
    fitted: KnobsField
    window_s: float
    warmup_s: float
    calibration: Calibration

    def apply(self, workload: Workload) -> Workload:
        """``workload`` with these lengths, at this rate."""
        scaled = workload.scaled(
            length=self.length_scale / workload.length_scale, cap_prompt=self.cap_prompt, cap_output=self.cap_output
        )
        return scaled.at_rate(self.rate)

    def at(self, rate: float, workload: Workload, seed: int) -> Setup:
        """The same at another rate. Raises :class:`InputError` when no request falls into the search's window then."""
        moved = self.model_copy(update={"rate": rate})
        end = self.warmup_s + self.window_s
        inside = [a for a in moved.apply(workload).arrivals(seed, duration=end) if a.time >= self.warmup_s]
        if not inside:
            raise InputError(
                f"{workload.name}: at {rate:g} requests/s none falls into the window, {self.warmup_s:g} to {end:g} s after "
                "the start; give a longer --budget for longer windows, another --rate, or a longer trace"
            )
        return moved.model_copy(update={"offered_rate": round(len(inside) / self.window_s, 3)})


def sample(workload: Workload, seed: int, count: int = 1000) -> list[Arrival]:
    """``count`` requests of the workload, fewer if it ends before."""
    return list(workload.arrivals(seed, limit=count))


def fit_steps(*groups: Sequence[StepRecord]) -> StepCost:
    """Non-negative least squares over all groups; in each, steps above three medians (a hiccup of the machine) are left out.

    Small steps and full ones belong into it together: full ones alone look much the same, and their base is anyone's guess.
    """
    kept: list[StepRecord] = []
    for steps in groups:
        middle = statistics.median(s.duration for s in steps) if steps else 0.0
        kept += [s for s in steps if s.duration <= 3 * middle]
    inputs = np.array([[1.0, s.prefill_tokens, s.decodes] for s in kept])
    solution, _ = nnls(inputs, np.array([s.duration for s in kept]))
    return StepCost(base=float(solution[0]), per_prompt_token=float(solution[1]), per_decode=float(solution[2]))


def length_scale(prompt: float, output: float, per_prompt_token: float, per_output_token: float) -> float:
    """The largest power of two, at most 1, at which about ``TARGET_RATE`` requests/s can be served.

    A decode step serves several requests at once; six is what a small batch shares without getting much slower. Outputs
    are not shrunk below 8 tokens on average (or an eighth): a TPOT over fewer says little.
    """
    service = per_prompt_token * prompt + per_output_token * output / 6
    ideal = 1 / (TARGET_RATE * service)
    floor = max(_SMALLEST_MEAN_PROMPT / prompt, min(_SMALLEST_MEAN_OUTPUT, output / _MOST_SHRUNK_OUTPUT) / output)
    scale = 2.0 ** math.floor(math.log2(min(1.0, ideal)))
    while scale < floor and scale < 1:
        scale *= 2
    return min(scale, 1.0)


def default_slo(cost: StepCost, mean_prompt: float) -> tuple[SLO, str]:
    """TTFT 500 ms and TPOT 50 ms if the machine can, else both times the smallest round factor at which it can, and why.

    "Can": a step of 8 decodes takes at most half the TPOT target, and an average prompt beside them a quarter of the TTFT.
    """
    decode, prompt = 1000 * cost.step(0, 8), 1000 * cost.step(mean_prompt, 8)
    need = max(2 * decode / (DEFAULT_SLO.tpot_ms or 1), 4 * prompt / (DEFAULT_SLO.ttft_ms or 1))
    factor = next((f for f in _NICE if f >= need), _NICE[-1])
    if factor == 1:
        return DEFAULT_SLO, "default"
    slo = SLO(ttft_ms=500 * factor, tpot_ms=50 * factor)
    return (
        slo,
        f"default × {factor:g}: here a step of 8 decodes takes {decode:.0f} ms, an average prompt {prompt:.0f} ms",
    )


def fitted_knobs(cost: StepCost, slo: SLO, rate: float, mean_output: float) -> Knobs:
    """The calibration's own guess: as many slots as Little's law asks for, and the largest budget that leaves TPOT in SLO.

    Concurrency = rate · residence; a request decodes for about mean_output · target. Rounded to powers of two.
    """
    tpot = min((t for t in (slo.tpot_ms, slo.itl_ms) if t is not None), default=50.0) / 1000
    slots = _power_of_two(rate * mean_output * tpot * 0.8 + 2)
    spare = 0.9 * tpot - cost.step(0, slots)
    prompt_tokens = spare / cost.per_prompt_token if cost.per_prompt_token > 0 else 8192.0
    budget = _power_of_two(max(16.0, slots + 1.0, min(prompt_tokens + slots, 8192.0)))
    return Knobs(max_batch_size=slots, max_wait_ms=0, token_budget=budget, chunk_size=budget)


def most_rate(workload: Workload, seed: int, seconds: float) -> float:
    """The highest rate worth offering: what one sending process can keep up with, and a finite workload lasts for.

    Raises :class:`InputError` for a workload of so few requests that nothing can be compared on it.
    """
    if not workload.finite:
        return MOST_RATE
    count = sum(1 for _ in workload.arrivals(seed))
    if count < _FEWEST_REQUESTS:
        raise InputError(
            f"{workload.name}: {count} requests are too few to compare settings; it takes {_FEWEST_REQUESTS}"
        )
    return min(MOST_RATE, (count - 1) / seconds)


def comparison_rate(
    workload: Workload, tokens_per_s: float, nominal: float, seed: int, warmup_s: float, window_s: float
) -> float:
    """The rate at which the requests of the search's own window bring ``tokens_per_s``.

    A window of a few seconds holds a few dozen requests; by luck they may be a third heavier or lighter than average.
    At ``nominal`` requests/s the search would then run far from the knee.
    """
    end = warmup_s + window_s
    most = most_rate(workload, seed, end)
    low, high = min(nominal / 4, most), min(nominal * 4, most)
    for _ in range(20):
        middle = math.sqrt(low * high)
        arrivals = workload.at_rate(middle).arrivals(seed, duration=end)
        load = sum(a.prompt_tokens + a.output_tokens for a in arrivals if a.time >= warmup_s) / window_s
        low, high = (middle, high) if load < tokens_per_s else (low, middle)
    return rounded(math.sqrt(low * high))


def rounded(rate: float) -> float:
    """Three digits, downwards: rates are printed and must not exceed a bound by rounding."""
    if rate <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - 2)
    return float(f"{math.floor(rate / unit * (1 + 1e-9)) * unit:.6g}")


def next_rate(rate: float, score: Score, mean_output: float, known: Sequence[tuple[float, float]]) -> float | None:
    """Another rate to try when ``score`` lies off the knee (see ``KNEE``), None when it lies on it.

    ``known``: (rate, attainment) measured so far. Between a rate too low and one too high lies their geometric mean; from
    above, what the engine did serve is the better guide.
    """
    low, high = KNEE
    if low <= score.attainment <= high:
        return None
    over = [r for r, share in known if share < low]
    under = [r for r, share in known if share > high]
    if over and under and max(under) < min(over):
        return math.sqrt(max(under) * min(over))
    if score.attainment > high:
        return rate * 1.4
    served = max(score.goodput, 0.85 * min(rate, score.throughput / mean_output))
    return rate * min(0.85, max(0.3, served / rate))


def _power_of_two(value: float) -> int:
    return int(2 ** round(math.log2(max(1.0, value))))
