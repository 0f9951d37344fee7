"""The load and the SLO a machine is profiled under, drawn from what the calibration measured.

The length scale, the SLO when none was given, the first guess of the knobs and the rate are each a small function of step
costs and lengths; docs/concepts/profiling.md says why each rule is as it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Literal

from autotune.profile.parts import Calibration, ClassField, KnobsField, ObjectiveName, Part, SLOField
from autotune.workload import Arrival, Workload, at_length_scale
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepModel

TARGET_RATE = 12.0
"""Requests/s that lengths are scaled to at the least."""

REQUESTS = 200
"""In a window, where short lengths allow as many: an attainment of 90% is then known to within some 4 points."""
LOAD = 0.9
"""Where the search for the rate begins, in units of the full engine's."""

MOST_RATE = 300.0
"""Requests/s one Python process sends on time beside an engine in the same process."""

_FEWEST_REQUESTS = 20
_LARGEST_BUDGET = 8192  # tokens, of the first guess
_SEEDS_TRIED = 8  # for each that is taken

DEFAULT_SLO = SLO(ttft_ms=500, tpot_ms=50)
_SMALLEST_MEAN_PROMPT, _SMALLEST_MEAN_OUTPUT, _MOST_SHRUNK_OUTPUT = 16, 8, 8
_SHARED, _MANY = 6, (64, 128, 256)
_NICE = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 60, 80, 100)


class Comparison(Part):
    """What settings are compared under, whatever is profiled.

    ``rate``: mean requests/s, or items/s, that are offered; ``rate_from``, ``slo_from``: why so; ``classes``: request classes
    with an SLO of their own; ``objective``: what settings are compared by; ``window_s``, ``warmup_s``: of a measurement.
    ``validation_seeds``: those the hardware meets, in order; ``simulated_seeds``: those of the long simulated loads, the first
    that of the search. ``speed``: of the hardware while it serves, in units of the calibrated speed.
    """

    rate: float
    rate_from: Literal["user", "calibration"]
    slo: SLOField
    slo_from: str
    classes: tuple[ClassField, ...] = ()
    objective: ObjectiveName = "goodput"
    window_s: float
    warmup_s: float
    validation_seeds: tuple[int, ...] = ()
    simulated_seeds: tuple[int, ...] = ()
    speed: float = 1.0


class Setup(Comparison):
    """What the calibration of an LLM engine decided.

    ``fitted``: where the search begins; ``most_rate``: more cannot be offered, see :func:`most_rate`.
    ``simulated_requests``: in each of the long loads; ``candidates``: settings found in simulation beside the trials; that which
    meets the SLO up to ``rate``, or, where the rate was given, those that serve the most at it.
    """

    length_scale: float
    cap_prompt: int
    cap_output: int
    mean_prompt: float
    mean_output: float
    most_rate: float
    simulated_requests: int = 2000
    candidates: tuple[KnobsField, ...] = ()
    fitted: KnobsField
    calibration: Calibration

    def apply(self, workload: Workload) -> Workload:
        """``workload`` with these lengths, at this rate."""
        scaled = at_length_scale(workload, self.length_scale)
        return scaled.scaled(cap_prompt=self.cap_prompt, cap_output=self.cap_output).at_rate(self.rate)


def sample(workload: Workload, seed: int, count: int = 1000) -> list[Arrival]:
    """``count`` requests of the workload, fewer if it ends before."""
    return list(workload.arrivals(seed, limit=count))


def length_scale(
    prompt: float, output: float, per_prompt_token: float, per_output_token: float, rate: float = TARGET_RATE
) -> float:
    """The largest power of two, at most 1, at which about ``rate`` requests/s can be served.

    A decode step serves several requests at once; six is what a small batch shares without getting much slower. Outputs
    are not shrunk below 8 tokens on average (or an eighth): a TPOT over fewer says little.
    """
    service = per_prompt_token * prompt + per_output_token * output / _SHARED
    ideal = 1 / (rate * service)
    floor = max(_SMALLEST_MEAN_PROMPT / prompt, min(_SMALLEST_MEAN_OUTPUT, output / _MOST_SHRUNK_OUTPUT) / output)
    scale = 2.0 ** math.floor(math.log2(min(1.0, ideal)))
    while scale < floor and scale < 1:
        scale *= 2
    return min(scale, 1.0)


def service_times(
    cost: StepModel,
    alone_prompt_token: float,
    alone_token: float,
    prompt: float,
    output: float,
    slots: float,
    kv_tokens: int,
) -> tuple[float, float]:
    """Seconds that a prompt token and an output token take of a machine with so many ``slots`` and ``kv_tokens``: of a request
    alone, or less where ``cost`` says so.

    A lone short prompt takes a GPU little more than a step without one; and where a step of many decodes takes no more than a
    quarter of the default TPOT, they share it. A decode alone has six to share it (:func:`length_scale`).
    """
    whole = cost.predict(typical_step(0, max(1, round(prompt)), 0.0)) / max(1.0, prompt)
    context = prompt + output / 2
    held = [n for n in _MANY if n <= slots and n * context <= kv_tokens]
    steps = {n: cost.predict(typical_step(n, 0, context)) for n in held}
    shared = [_SHARED * seconds / n for n, seconds in steps.items() if seconds <= (DEFAULT_SLO.tpot_ms or 0) / 4000]
    return min(alone_prompt_token, whole), min([alone_token, *shared])


def default_slo(cost: StepModel, mean_prompt: float) -> tuple[SLO, str]:
    """TTFT 500 ms and TPOT 50 ms if the machine can, else both times the smallest round factor at which it can, and why.

    "Can": a step of 8 decodes takes at most half the TPOT target, and an average prompt beside them a quarter of the TTFT.
    """
    decode, prompt = (1000 * cost.predict(typical_step(8, n, mean_prompt)) for n in (0, round(mean_prompt)))
    need = max(2 * decode / (DEFAULT_SLO.tpot_ms or 1), 4 * prompt / (DEFAULT_SLO.ttft_ms or 1))
    factor = next((f for f in _NICE if f >= need), _NICE[-1])
    if factor == 1:
        return DEFAULT_SLO, "default"
    slo = SLO(ttft_ms=500 * factor, tpot_ms=50 * factor)
    return (
        slo,
        f"default × {factor:g}: here a step of 8 decodes takes {decode:.0f} ms, an average prompt {prompt:.0f} ms",
    )


def fitted_knobs(
    cost: StepModel, slo: SLO, rate: float, mean_output: float, mean_context: float, limits: KnobLimits
) -> Knobs:
    """The calibration's own guess: as many slots as Little's law asks for, the largest budget that leaves TPOT within the SLO.

    Concurrency = rate · residence; a request decodes for about mean_output · target. Rounded to powers of two, within ``limits``.
    """
    tpot = min((t for t in (slo.tpot_ms, slo.itl_ms) if t is not None), default=50.0) / 1000
    slots = min(limits.max_batch_size, _power_of_two(rate * mean_output * tpot * 0.8 + 2))
    low, high = 16, _LARGEST_BUDGET
    while low < high:  # the largest prompt whose step beside a full batch meets the target
        middle = (low + high + 1) // 2
        fits = cost.predict(typical_step(slots, middle, mean_context)) <= 0.9 * tpot
        low, high = (middle, high) if fits else (low, middle - 1)
    budget = min(_LARGEST_BUDGET, _power_of_two(slots + low))
    while (larger := 2 * budget) <= _LARGEST_BUDGET:  # a full tile may be faster than one begun
        if cost.predict(typical_step(slots, larger - slots, mean_context)) > 0.9 * tpot:
            break
        budget = larger
    return limits.clamp(Knobs(max_batch_size=slots, max_wait_ms=0, token_budget=budget, chunk_size=budget))


def typical_step(decodes: int, prompt_tokens: int, context: float) -> StepFeatures:
    """A step of ``decodes`` that read ``context`` tokens each, and one fresh prompt."""
    pairs = prompt_tokens * (prompt_tokens + 1) // 2
    return StepFeatures(decodes, round(decodes * context), prompt_tokens, prompt_tokens, pairs, int(prompt_tokens > 0))


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


def balanced_seeds(workload: Workload, first: int, count: int, warmup_s: float, window_s: float) -> list[int]:
    """``count`` seeds from ``first`` on whose window comes nearest to the workload's mean in requests and in tokens.

    A window of a few seconds may by luck be a third heavier or lighter than average; settings measured under seeds that
    are all average can be compared although they have not met the same ones (stratification). Equally good: the lower.
    """
    loads = {}
    for seed in range(first, first + _SEEDS_TRIED * count):
        inside = in_window(workload, seed, warmup_s, window_s)
        loads[seed] = (len(inside), sum(a.prompt_tokens + a.output_tokens for a in inside))
    requests = max(1.0, workload.rate * window_s)
    tokens = max(
        1.0,
        requests * statistics.fmean(n for _, n in loads.values()) / statistics.fmean(k for k, _ in loads.values())
        if any(k for k, _ in loads.values())
        else 1.0,
    )

    def off(seed: int) -> tuple[float, int]:
        met, brought = loads[seed]
        return round(abs(met / requests - 1) + abs(brought / tokens - 1), 3), seed

    return sorted(loads, key=off)[:count]


def spread_seeds(workload: Workload, first: int, count: int, warmup_s: float, window_s: float) -> list[int]:
    """``count`` seeds from ``first`` on whose windows are as unlike in load as the workload's are, the lightest first.

    One from each of ``count`` equal strata of the tokens that windows bring, and together they bring the mean. Goodput falls
    faster in heavy windows than it rises in light ones: under mean loads alone a bursty workload looks easier than it is.
    A workload that is the same whatever the seed (a replayed trace) has one.
    """
    seeds = range(first, first + _SEEDS_TRIED * count)
    if alike_under(workload, seeds, warmup_s, window_s):
        return [first]
    windows = {seed: in_window(workload, seed, warmup_s, window_s) for seed in seeds}
    tokens = {seed: sum(a.prompt_tokens + a.output_tokens for a in window) for seed, window in windows.items()}
    ordered = sorted(seeds, key=lambda seed: (tokens[seed], seed))
    strata = [ordered[i : i + _SEEDS_TRIED] for i in range(0, len(ordered), _SEEDS_TRIED)]
    mean = statistics.fmean(tokens.values())
    chosen = [stratum[_SEEDS_TRIED // 2] for stratum in strata]
    for _ in range(2):  # each in turn the one that brings all of them nearest to the mean
        for place, stratum in enumerate(strata):
            others = sum(tokens[seed] for i, seed in enumerate(chosen) if i != place)
            middle = stratum[_SEEDS_TRIED // 4 : -_SEEDS_TRIED // 4]
            chosen[place] = min(middle, key=lambda seed: (abs(others + tokens[seed] - count * mean), seed))
    return chosen


def alike_under(workload: Workload, seeds: Iterable[int], warmup_s: float, window_s: float) -> bool:
    """Whether windows hold the same requests whatever the seed, as those of a trace do, or of a mix of which a trace is half."""
    if workload.replayed >= 0.5:
        return True
    windows = (in_window(workload, seed, warmup_s, window_s) for seed in seeds)
    return len({tuple((a.time, a.prompt_tokens, a.output_tokens) for a in window) for window in windows}) == 1


def in_window(workload: Workload, seed: int, warmup_s: float, window_s: float) -> list[Arrival]:
    """The requests that a measurement counts."""
    return [a for a in workload.arrivals(seed, duration=warmup_s + window_s) if a.time >= warmup_s]


def rounded(rate: float) -> float:
    """Three digits, downwards: rates are printed and must not exceed a bound by rounding."""
    if rate <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - 2)
    return float(f"{math.floor(rate / unit * (1 + 1e-9)) * unit:.6g}")


def _power_of_two(value: float) -> int:
    return int(2 ** round(math.log2(max(1.0, value))))
