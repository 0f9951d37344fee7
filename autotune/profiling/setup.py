"""The calibration: a few seconds that say how big the load must be for this machine, and what may be promised.

1. *One request alone* gives the engine's best TTFT and TPOT.
2. *A saturated engine* (a closed loop of the workload's own requests) gives its capacity in tokens/s, and by non-negative
   least squares over its steps the time of a step: ``base + per_prompt_token · n + per_decode · b``.

From those follow the length scale, the SLO when none was given, a first rate, and where the search begins. Serving that
start at a few rates then finds the knee, where settings differ most (:func:`next_rate`). All of it is stored with the
study, so a resumed run compares like with like.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from autotune.evaluate import Handle, Interrupted, Recorder, Served, settle
from autotune.profile import Calibration, KnobsField, ModelFacts, Part, SLOField
from autotune.score import Score
from autotune.workload import Arrival, Workload, prompt_ids
from runtime.clock import Clock
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO

TARGET_RATE = 12.0  # requests/s: enough of them in a few seconds of window for a share to mean something
LOAD = 1.15
"""Offered load of the search, in units of the saturated engine's. Below 1 most settings keep every promise and look alike;
far above it the queue decides and they look alike again."""

KNEE = (0.55, 0.93)
"""Attainment of the calibration's own guess at the rate where settings are compared: there is room above and below."""

DEFAULT_SLO = SLO(ttft_ms=500, tpot_ms=50)
_SMALLEST_MEAN_PROMPT, _SMALLEST_MEAN_OUTPUT, _MOST_SHRUNK_OUTPUT = 16, 8, 8
_SATURATING = Knobs(max_batch_size=32, max_wait_ms=0, token_budget=512, chunk_size=512)
_NICE = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50, 60, 80, 100)
_PROBE_PROMPT, _PROBE_OUTPUT, _PROBES = 128, 12, 3


class StepCost(Part):
    """Seconds of a step: ``base + per_prompt_token · prompt tokens + per_decode · decodes``."""

    base: float
    per_prompt_token: float
    per_decode: float

    def step(self, prompt_tokens: float, decodes: float) -> float:
        return self.base + self.per_prompt_token * prompt_tokens + self.per_decode * decodes


class Setup(Part):
    """What the calibration decided.

    ``rate``: mean requests/s offered in the search; ``offered_rate``: what comes in its window; ``fitted``: where it begins.
    """

    length_scale: float
    cap_prompt: int
    cap_output: int
    mean_prompt: float
    mean_output: float
    rate: float
    offered_rate: float
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
        """The same at another rate."""
        moved = self.model_copy(update={"rate": rate})
        end = self.warmup_s + self.window_s
        inside = [a for a in moved.apply(workload).arrivals(seed, duration=end) if a.time >= self.warmup_s]
        return moved.model_copy(update={"offered_rate": round(len(inside) / self.window_s, 3)})


class Calibrator:
    """Runs the two measurements on a live engine and draws the conclusions."""

    def __init__(
        self,
        engine: Served,
        model: ModelFacts,
        workload: Workload,
        *,
        seed: int,
        clock: Clock,
        stop: Callable[[], bool] | None = None,
        advance: Callable[[float, str], None] = lambda share, note: None,
    ) -> None:
        self._engine, self._model, self._workload = engine, model, workload
        self._seed, self._clock = seed, clock
        self._stop = stop or (lambda: False)
        self._advance = advance
        self._count = 0
        self._small: list[StepRecord] = []  # steps of the requests alone, the warm-up's left out

    def run(self, *, slo: SLO | None, rate: float | None, saturate_s: float, window_s: float, warmup_s: float) -> Setup:
        alone_ttft, alone_tpot, prompt = self._alone()
        self._advance(0.25, f"alone: {alone_tpot * 1000:.1f} ms a token")
        scale = self._length_scale(alone_ttft / prompt, alone_tpot)
        room = min(self._model.max_model_len, self._engine.kv_tokens)
        cap_output = max(1, room // 4)
        scaled = self._workload.scaled(
            length=scale / self._workload.length_scale, cap_prompt=room - cap_output, cap_output=cap_output
        )
        lengths = sample(scaled, self._seed)
        mean_prompt = statistics.fmean(a.prompt_tokens for a in lengths)
        mean_output = statistics.fmean(a.output_tokens for a in lengths)
        steps, seconds = self._saturate(lengths, saturate_s)
        cost = fit_steps(self._small, steps)
        tokens_per_s = sum(s.tokens for s in steps) / seconds
        saturated = tokens_per_s / (mean_prompt + mean_output)
        chosen, why = (slo, "given") if slo is not None else default_slo(cost, mean_prompt)
        asked = (
            rate
            if rate is not None
            else comparison_rate(scaled, tokens_per_s * LOAD, saturated * LOAD, self._seed, warmup_s + window_s)
        )
        return Setup(
            length_scale=scale,
            cap_prompt=room - cap_output,
            cap_output=cap_output,
            mean_prompt=round(mean_prompt, 1),
            mean_output=round(mean_output, 1),
            rate=asked,
            offered_rate=asked,
            rate_from="calibration" if rate is None else "user",
            slo=chosen,
            slo_from=why,
            fitted=self._engine.limits.clamp(fitted_knobs(cost, chosen, saturated, mean_output)),
            window_s=window_s,
            warmup_s=warmup_s,
            calibration=Calibration(
                alone_ttft_ms=round(alone_ttft * 1000, 2),
                alone_tpot_ms=round(alone_tpot * 1000, 2),
                saturated_rate=round(saturated, 3),
                saturated_tokens_per_s=round(tokens_per_s, 1),
                step_base_ms=round(cost.base * 1000, 3),
                step_per_prompt_token_ms=round(cost.per_prompt_token * 1000, 4),
                step_per_decode_ms=round(cost.per_decode * 1000, 4),
            ),
        )

    def _alone(self) -> tuple[float, float, int]:
        """(TTFT s, TPOT s, prompt tokens) of a request that has the engine to itself: medians after one warm-up."""
        prompt = max(1, min(_PROBE_PROMPT, self._model.max_model_len - _PROBE_OUTPUT))
        self._engine.set_knobs(self._engine.limits.clamp(_SATURATING))
        found: list[RequestRecord] = []
        for probe in range(_PROBES + 1):
            recorder = Recorder()
            unsubscribe = self._engine.subscribe(recorder)
            try:
                handle = self._send(Arrival(0.0, prompt, _PROBE_OUTPUT, ((self._count, prompt),)))
                self._until(lambda r=recorder: bool(r.requests), 60.0, [handle])  # type: ignore[misc]
            finally:
                unsubscribe()
            found += recorder.requests.values()
            self._small += recorder.steps if probe else []
        kept = found[1:]
        ttft = statistics.median(r.ttft or 0.0 for r in kept)
        return ttft, statistics.median(r.tpot or r.ttft or 0.0 for r in kept), prompt

    def _length_scale(self, per_prompt_token: float, per_output_token: float) -> float:
        """The workload's own scale if it has one; else the power of two that brings about ``TARGET_RATE`` requests/s."""
        if self._workload.length_scale != 1.0:
            return self._workload.length_scale
        natural = sample(self._workload, self._seed)
        prompt = statistics.fmean(a.prompt_tokens for a in natural)
        output = statistics.fmean(a.output_tokens for a in natural)
        return length_scale(prompt, output, per_prompt_token, per_output_token)

    def _saturate(self, lengths: Sequence[Arrival], seconds: float) -> tuple[list[StepRecord], float]:
        """Steps of a closed loop that keeps the engine full, its first quarter left out, and the time they span."""
        knobs = self._engine.limits.clamp(_SATURATING)
        self._engine.set_knobs(knobs)
        recorder = Recorder()
        unsubscribe = self._engine.subscribe(recorder)
        handles: list[Handle] = []
        begun = self._clock.now()
        try:
            source = iter(lengths)
            while (spent := self._clock.now() - begun) < seconds and not self._stop():
                while len(handles) - len(recorder.requests) < 2 * knobs.max_batch_size:
                    arrival = next(source, None)
                    if arrival is None:
                        source = iter(lengths)
                        continue
                    handles.append(self._send(arrival))
                self._advance(0.25 + 0.75 * spent / seconds, "saturated")
                recorder.changed.wait(0.05)
                recorder.changed.clear()
        finally:
            unsubscribe()
            for handle in handles:
                handle.cancel()
        if self._stop():
            raise Interrupted("interrupted")
        settle(self._engine, self._clock)
        steps = [s for s in recorder.steps if s.start >= begun + seconds / 4]
        steps = steps if len(steps) >= 4 else recorder.steps  # a machine so slow that a quarter holds hardly a step
        if not steps:
            raise Interrupted("the engine made no step while it was saturated")
        return steps, steps[-1].end - steps[0].start

    def _send(self, arrival: Arrival) -> Handle:
        self._count += 1
        ids = prompt_ids(arrival, self._model.vocab_size, self._seed + self._count)
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        return self._engine.submit(ids, params, request_id=f"calibrate-{self._count}")

    def _until(self, done: Callable[[], bool], seconds: float, handles: Sequence[Handle]) -> None:
        give_up = self._clock.now() + seconds
        pause = threading.Event()
        while not done():
            if self._stop() or self._clock.now() > give_up:
                for handle in handles:
                    handle.cancel()
                raise Interrupted("interrupted" if self._stop() else f"a request alone took more than {seconds:g} s")
            pause.wait(0.005)


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


def comparison_rate(workload: Workload, tokens_per_s: float, nominal: float, seed: int, seconds: float) -> float:
    """The rate at which the requests of the search's own window bring ``tokens_per_s``.

    A window of a few seconds holds a few dozen requests; by luck they may be a third heavier or lighter than average.
    At ``nominal`` requests/s the search would then run far from the knee.
    """
    low, high = nominal / 4, nominal * 4
    for _ in range(20):
        middle = math.sqrt(low * high)
        arrivals = workload.at_rate(middle).arrivals(seed, duration=seconds)
        load = sum(a.prompt_tokens + a.output_tokens for a in arrivals) / seconds
        low, high = (middle, high) if load < tokens_per_s else (low, middle)
    return float(f"{math.sqrt(low * high):.3g}")


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
