"""A truth under the simulated engine: the live scheduler in virtual time on that GPU."""

from __future__ import annotations

from typing import Any

from autotune.simulate import SimulatedEngine
from autotune.simulate.drafts import right
from autotune.simulate.executor import CostExecutor
from benchmarks.gpu_truth.truth import Truth
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import StepPlan, StepResult

_BLOCK = 16
LIMITS = KnobLimits(max_batch_size=256, token_budget=8192, chunk_size=8192)
"""Ceilings of an engine on a large GPU."""


class ChunkExecutor(CostExecutor):
    """Asks a truth with the very chunks of a step; the counts of a step say only what they come to together."""

    def __init__(self, truth: Truth, *, noise: float = 0.0, seed: int = 0) -> None:
        super().__init__(truth, noise=noise, seed=seed)
        self._truth = truth

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        if not plan.chunks and not plan.drafts:
            return super().execute(plan, now, until)
        chunks = [(chunk.start, chunk.count) for chunk in (*plan.drafts, *plan.chunks)]
        seconds = self._truth.step_seconds(plan.n_decode, plan.decode_context, chunks)
        accepted = [(draft.sequence, right(draft, self.acceptance)) for draft in plan.drafts]
        return StepResult((now + (self._noisy(seconds) if self.noise else seconds),), accepted=accepted)


def simulated_engine(
    truth: Truth,
    *,
    limits: KnobLimits = LIMITS,
    knobs: Knobs | None = None,
    noise: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> SimulatedEngine:
    """An engine with the KV pool of ``truth``; ``options`` are those of :class:`SimulatedEngine`. Raises as that does."""
    pool = truth.kv_tokens // _BLOCK * _BLOCK
    options = dict[str, Any](kv_tokens=pool, prefix_cache=False, graphs=truth.flags.graphs) | options
    knobs = knobs or limits.clamp(Knobs(limits.max_batch_size, 0, limits.token_budget, limits.chunk_size))
    engine = SimulatedEngine(truth, limits=limits, knobs=knobs, noise=noise, seed=seed, **options)
    engine.core.executor = ChunkExecutor(truth, noise=noise, seed=seed)
    return engine
