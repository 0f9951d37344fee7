"""The steps of an engine that serves: requests come when they come, from another thread, and end when they end.

A planned step is clean: nothing arrives, nothing leaves, nobody listens. In serving all of that costs time too, and a mean over
steps is what requests feel; so part of a calibration is a load, served as :func:`autotune.measure.evaluate.evaluate` serves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise

from autotune.engines import Engine
from autotune.measure.evaluate import Recorder, evaluate
from autotune.profile.parts import ModelFacts
from autotune.profiling.step_driver import Sample, samples
from autotune.profiling.step_plan import Mix
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from runtime.slo import SLO

PATIENT = SLO(ttft_ms=20_000, tpot_ms=1000)
"""Which a drain may wait for."""
_IDLE_S = 1e-3  # between two steps: longer than that, the engine had nothing to do
_SPREAD = 1.0, 0.7  # coefficients of variation of prompts and outputs
_RUNS = itertools.count(1)


def served_steps(
    engine: Engine, model: ModelFacts, mix: Mix, *, seed: int, stop: Callable[[], bool] | None = None
) -> list[Sample]:
    """Serve ``mix`` and return its steps, in order; the engine is left idle, its knobs changed.

    Raises as :func:`~autotune.measure.evaluate.evaluate`.
    """
    limits = engine.effective_limits
    longest = max(1, min(model.max_model_len, engine.facts.kv_tokens // 2) // 2)
    prompts, outputs = _SPREAD
    load = parse_workload(
        f"gamma:cv={mix.cv:g},prompt={mix.prompt}~{prompts:g},output={mix.output}~{outputs:g},"
        f"cap_prompt={min(longest, 8 * mix.prompt)},cap_output={min(longest, 8 * mix.output)}"
    ).at_rate(mix.rate)
    run = next(_RUNS)  # prompts of its own: no earlier run's prefixes are found in the cache
    log = Recorder()
    unsubscribe = engine.subscribe(log)
    try:
        evaluate(
            engine,
            limits.clamp(Knobs(limits.max_batch_size, 0, limits.max_batch_size + 2 * mix.chunk, mix.chunk)),
            load,
            PATIENT,
            vocab_size=model.vocab_size,
            seed=seed,
            prompt_seed=(seed << 20) + run,
            duration=mix.seconds,
            label=f"mix-{run}",
            stop=stop,
        )
    finally:
        unsubscribe()
    idle = {i for i, (a, b) in enumerate(pairwise(log.steps), start=1) if b.start - a.end > _IDLE_S}
    return samples(log.steps, idle, whole=True)
