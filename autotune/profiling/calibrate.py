"""From what a machine's steps cost to the load it is profiled under, and to the SLO.

One request alone is measured; how the engine does when it is full is simulated, by the cost model fitted to its steps. From
those follow the length scale, the SLO when none was given, a first rate, and where the search begins. All of it is stored
with the study, so a resumed run compares like with like.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autotune.engines import Engine, Handle, waiting
from autotune.measure.evaluate import EvaluationError, Interrupted, Recorder, recorded
from autotune.profile.parts import Calibration, ModelFacts, ObjectiveName
from autotune.profiling.setup import (
    LOAD,
    REQUESTS,
    TARGET_RATE,
    Setup,
    default_slo,
    fitted_knobs,
    length_scale,
    most_rate,
    rounded,
    sample,
    service_times,
    typical_step,
)
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, Workload, at_length_scale, brings_lengths, named_rate, prompt_ids
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, RequestRecord
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepModel
from runtime.tunable import Facts

_FULL = Knobs(max_batch_size=32, max_wait_ms=0, token_budget=512, chunk_size=512)
_FILLING = 400  # requests of the simulated full engine
_PROBE_PROMPT, _PROBE_OUTPUT, _PROBES = 128, 12, 3
_PATIENCE_S, _POLL_S = 60.0, 0.005


class Alone(NamedTuple):
    """A request that has the engine to itself: TTFT and TPOT in seconds, and its prompt."""

    ttft: float
    tpot: float
    prompt_tokens: int


def request_alone(engine: Engine, model: ModelFacts, *, seed: int, stop: Callable[[], bool] | None = None) -> Alone:
    """Medians of a few requests, one after the other, behind a warm-up.

    Raises :class:`EvaluationError` when one fails or is not answered, :class:`Interrupted` on ``stop``.
    """
    longest = min(model.max_model_len, engine.facts.kv_tokens)
    prompt = max(1, min(_PROBE_PROMPT, longest - _PROBE_OUTPUT))
    engine.set_knobs(engine.limits.clamp(_FULL))
    found: list[RequestRecord] = []
    for probe in range(_PROBES + 1):
        with recorded(engine) as recorder:
            ids = prompt_ids(Arrival(0.0, prompt, _PROBE_OUTPUT, ((probe, prompt),)), model.vocab_size, seed + 7919)
            params = SamplingParams(max_tokens=_PROBE_OUTPUT, ignore_eos=True)
            handle = engine.submit(ids, params, request_id=f"alone-{probe}")
            _await(engine, recorder, handle, stop or (lambda: False))
        found += recorder.requests.values()
        for record in recorder.requests.values():
            if record.reason is FinishReason.ERROR:
                raise EvaluationError(f"request {record.id} failed: {record.cause or 'no cause given'}")
    counted = found[1:]
    return Alone(
        ttft=statistics.median(r.ttft or 0.0 for r in counted),
        tpot=statistics.median(r.tpot or r.ttft or 0.0 for r in counted),
        prompt_tokens=prompt,
    )


def draw_setup(
    engine: Engine,
    model: ModelFacts,
    workload: Workload,
    cost: StepModel,
    alone: Alone,
    *,
    seed: int,
    slo: SLO | None,
    rate: float | None,
    window_s: float,
    warmup_s: float,
    classes: Sequence[RequestClass] = (),
    objective: ObjectiveName = "goodput",
) -> Setup:
    """The load and the SLO for this engine; ``rate``, ``slo``, ``classes`` and ``objective`` as they were given.

    Without an ``slo`` where every request is of a class that has one, it is that of the class that weighs the most.
    """
    scale = workload.length_scale
    if not brings_lengths(workload):
        natural = sample(workload, seed)
        prompt, output = _means(natural)
        wanted = max(TARGET_RATE, REQUESTS / window_s)
        times = service_times(
            cost, alone.ttft / alone.prompt_tokens, alone.tpot, prompt, output, engine.limits.max_batch_size,
            engine.facts.kv_tokens,
        )  # fmt: skip
        scale = length_scale(prompt, output, *times, wanted)
    longest = min(model.max_model_len, engine.facts.kv_tokens)
    cap_output = max(1, longest // 4)
    cap_prompt = longest - cap_output
    scaled = at_length_scale(workload, scale).scaled(cap_prompt=cap_prompt, cap_output=cap_output)
    lengths = sample(scaled, seed)
    mean_prompt, mean_output = _means(lengths)
    context = mean_prompt + mean_output / 2
    saturated = full_rate(cost, lengths, engine.limits, engine.facts)
    tokens_per_s = saturated * (mean_prompt + mean_output)
    names = {one.name for one in classes}
    if slo is not None:
        chosen, why = slo, "given"
    elif classes and all(arrival.request_class in names for arrival in lengths):
        heaviest = max(classes, key=lambda one: one.weight)
        chosen, why = heaviest.slo, f"that of class {heaviest.name}"
    else:
        chosen, why = default_slo(cost, mean_prompt)
    most = most_rate(scaled, seed, warmup_s + window_s)
    if rate is not None and rate > most and scaled.finite:
        option = "--workload: rate" if rate == named_rate(workload) else "--rate"
        raise InputError(
            f"{option} is {rate:g}, but {workload.name} lasts for at most {most:.4g} requests/s: a measurement takes "
            f"{warmup_s + window_s:.3g} s"
        )
    return Setup(
        length_scale=scale,
        cap_prompt=cap_prompt,
        cap_output=cap_output,
        mean_prompt=round(mean_prompt, 1),
        mean_output=round(mean_output, 1),
        rate=rounded(min(saturated * LOAD, most)) if rate is None else rate,
        most_rate=most,
        rate_from="calibration" if rate is None else "user",
        slo=chosen,
        slo_from=why,
        classes=tuple(classes),
        objective=objective,
        fitted=fitted_knobs(cost, chosen, saturated, mean_output, context, engine.limits),
        window_s=window_s,
        warmup_s=warmup_s,
        calibration=_calibration(cost, alone, saturated, tokens_per_s, context),
    )


def full_rate(cost: StepModel, lengths: Sequence[Arrival], limits: KnobLimits, facts: Facts) -> float:
    """Requests/s of an engine of such ``facts`` that always has enough to do, simulated."""
    some = [arrival._replace(time=0.0) for arrival in lengths[:_FILLING]]
    full = SimulatedEngine(
        cost, kv_tokens=facts.kv_tokens, block_size=facts.block_size, growth_reserve=facts.growth_reserve,
        kv_allocation=facts.kv_allocation, limits=limits, knobs=limits.clamp(_FULL), max_queue=len(some) + 1, prefix_cache=False,
    )  # fmt: skip
    full.serve(some, shared=False)
    full.run()
    return len(some) / full.clock.now()


def _calibration(cost: StepModel, alone: Alone, saturated: float, tokens_per_s: float, context: float) -> Calibration:
    one, some, many = (cost.predict(typical_step(n, 0, context)) for n in (1, 8, 32))
    beside = cost.predict(typical_step(8, 256, context))
    return Calibration(
        alone_ttft_ms=round(alone.ttft * 1000, 2),
        alone_tpot_ms=round(alone.tpot * 1000, 2),
        saturated_rate=round(saturated, 3),
        saturated_tokens_per_s=round(tokens_per_s, 1),
        step_base_ms=round(max(0.0, one - (many - one) / 31) * 1000, 3),
        step_per_prompt_token_ms=round(max(0.0, beside - some) / 256 * 1000, 5),
        step_per_decode_ms=round(max(0.0, many - one) / 31 * 1000, 5),
    )


def _means(lengths: Sequence[Arrival]) -> tuple[float, float]:
    return statistics.fmean(a.prompt_tokens for a in lengths), statistics.fmean(a.output_tokens for a in lengths)


def _await(engine: Engine, recorder: Recorder, handle: Handle, stop: Callable[[], bool]) -> None:
    clock, pause = engine.clock, waiting(engine)
    give_up = clock.now() + _PATIENCE_S
    while not recorder.requests:
        if stop() or clock.now() > give_up:
            handle.cancel()
            if stop():
                raise Interrupted("interrupted")
            raise EvaluationError(f"a request alone was not answered within {_PATIENCE_S:g} s")
        pause(_POLL_S)
