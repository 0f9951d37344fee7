"""The calibration: a few seconds that say how big the load must be for this machine, and what may be promised.

1. *One request alone* gives the engine's best TTFT and TPOT.
2. *A saturated engine* (a closed loop of the workload's own requests) gives its capacity in tokens/s, and by non-negative
   least squares over its steps the time of a step: ``base + per_prompt_token · n + per_decode · b``.

From those follow the length scale, the SLO when none was given, a first rate, and where the search begins. Serving that
start at a few rates then finds the knee, where settings differ most (:func:`next_rate`). All of it is stored with the
study, so a resumed run compares like with like.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from autotune.evaluate import EvaluationError, Handle, Interrupted, Recorder, Served, settle, waiting
from autotune.profile_parts import Calibration, ModelFacts
from autotune.profiling.setup import (
    LOAD,
    Setup,
    comparison_rate,
    default_slo,
    fit_steps,
    fitted_knobs,
    length_scale,
    most_rate,
    sample,
)
from autotune.workload import Arrival, Workload, prompt_ids
from runtime.clock import Clock
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO

_SATURATING = Knobs(max_batch_size=32, max_wait_ms=0, token_budget=512, chunk_size=512)
_FEWEST_STEPS, _SATURATE_AT_MOST_S = 12, 60.0
_PROBE_PROMPT, _PROBE_OUTPUT, _PROBES = 128, 12, 3


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
            else comparison_rate(scaled, tokens_per_s * LOAD, saturated * LOAD, self._seed, warmup_s, window_s)
        )
        return Setup(
            length_scale=scale,
            cap_prompt=room - cap_output,
            cap_output=cap_output,
            mean_prompt=round(mean_prompt, 1),
            mean_output=round(mean_output, 1),
            rate=asked,
            offered_rate=asked,
            most_rate=most_rate(scaled, self._seed, warmup_s + window_s),
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
                self._until(lambda r=recorder: bool(r.requests), 60.0, [handle])  # type: ignore[misc]  # a default binds it
            finally:
                unsubscribe()
            found += recorder.requests.values()
            self._small += recorder.steps if probe else []
            check(recorder)
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
        pause = waiting(self._engine)
        begun = self._clock.now()
        try:
            source = iter(lengths)
            while self._wants_more(spent := self._clock.now() - begun, seconds, recorder):
                while len(handles) - len(recorder.requests) < 2 * knobs.max_batch_size:
                    arrival = next(source, None)
                    if arrival is None:
                        source = iter(lengths)
                        continue
                    handles.append(self._send(arrival))
                self._advance(min(1.0, 0.25 + 0.75 * spent / seconds), "saturated")
                pause(0.05)
        finally:
            unsubscribe()
            for handle in handles:
                handle.cancel()
        if self._stop():
            raise Interrupted("interrupted")
        settle(self._engine, self._clock)
        check(recorder)
        steps = [s for s in recorder.steps if s.start >= begun + seconds / 4]
        steps = steps if len(steps) >= 4 else recorder.steps  # a machine so slow that a quarter holds hardly a step
        if not steps:
            raise EvaluationError("the engine made no step while it was saturated")
        return steps, steps[-1].end - steps[0].start

    def _wants_more(self, spent: float, seconds: float, recorder: Recorder) -> bool:
        """Until the time is over, and for longer on a machine so slow or busy that it has hardly begun."""
        few = len(recorder.steps) < _FEWEST_STEPS and spent < _SATURATE_AT_MOST_S
        return (spent < seconds or few) and not self._stop()

    def _send(self, arrival: Arrival) -> Handle:
        self._count += 1
        ids = prompt_ids(arrival, self._model.vocab_size, self._seed + self._count)
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        return self._engine.submit(ids, params, request_id=f"calibrate-{self._count}")

    def _until(self, done: Callable[[], bool], seconds: float, handles: Sequence[Handle]) -> None:
        give_up = self._clock.now() + seconds
        pause = waiting(self._engine)
        while not done():
            if self._stop() or self._clock.now() > give_up:
                for handle in handles:
                    handle.cancel()
                if self._stop():
                    raise Interrupted("interrupted")
                raise EvaluationError(f"a request alone was not answered within {seconds:g} s")
            pause(0.005)


def check(recorder: Recorder) -> None:
    """Raise :class:`EvaluationError` with the cause if a request failed: costs fitted to that would mean nothing."""
    for record in recorder.requests.values():
        if record.reason is FinishReason.ERROR:
            raise EvaluationError(f"request {record.id} failed: {record.cause or 'no cause given'}")
