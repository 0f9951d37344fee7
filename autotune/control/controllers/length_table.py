"""Knobs from average lengths by a table, as TensorRT-LLM's DynamicBatchTuner does. It uses neither step times nor an SLO.

Formula. With p and o the mean prompt and output length of the last 128 requests and c = KV tokens / (p + o) the sequences the
pool holds: ``max_batch_size`` is the entry of the first row of the table whose bound lies above c; beyond the table c itself,
rounded down to a multiple of 512 where it lies less than 128 above one. ``token_budget`` is the power of two at or above n·p/o
+ n, n being that batch size (tokens of a step in which prompts come in as fast as sequences finish), and no less than 8192 for
p/o > 2, 4096 for p/o > ½, 2048 otherwise. ``chunk_size`` is the whole budget, ``max_wait_ms`` 0.

Units: sequences, tokens. Regimes: ``context-heavy``, ``balanced``, ``generation-heavy``; ``learning`` before the first request.

Failure mode: by design, it fills the machine; a TPOT target is met only where full steps happen to meet it.

Source: TensorRT-LLM, ``DynamicBatchConfig`` and the tuner behind it: the means, the window, the table and its bounds are facts
of its documentation and defaults. On that project's newer backend the tuner does nothing.
"""

from __future__ import annotations

import math

from autotune.control.controllers.parts.running_statistics import Recent
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView

_WINDOW = 128
_BATCH = ((144, 128), (336, 256), (672, 512), (832, 768), (1280, 1024), (1664, 1536))
"""Sequences that the pool holds fewer of → sequences at once."""
_COARSE, _NEAR = 512, 128
_TOKENS = ((2.0, "context-heavy", 8192), (0.5, "balanced", 4096), (0.0, "generation-heavy", 2048))
"""Prompt tokens for each output token above → name → tokens of a step, at least."""


@register
class LengthTableController:
    """See the module."""

    name = "length_table"

    def __init__(self, start: Knobs, *, kv_tokens: int) -> None:
        self.start = start
        self._kv_tokens = kv_tokens
        self._prompts = Recent(_WINDOW)
        self._outputs = Recent(_WINDOW)

    def observe_step(self, record: StepRecord) -> None:
        pass

    def observe_request(self, record: RequestRecord) -> None:
        if record.completed:
            self._prompts.add(record.prompt_tokens)
            self._outputs.add(record.output_tokens)

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now
        prompt, output = self._prompts.mean, max(1.0, self._outputs.mean)
        evidence: dict[str, float] = {
            "requests": len(self._prompts),
            "prompt": round(prompt, 1),
            "output": round(self._outputs.mean, 1),
        }
        if not len(self._prompts):
            return Proposal(
                limits.clamp(self.start), "learning", "no request has ended yet: holding the starting knobs", evidence
            )
        holds = int(self._kv_tokens / max(1.0, prompt + output))
        batch = max(1, _batch_for(holds))
        flow = batch * prompt / output + batch
        regime, least = next((name, tokens) for above, name, tokens in _TOKENS if prompt / output > above or not above)
        budget = max(1 << math.ceil(math.log2(flow)), least)
        cause = (
            f"prompts of {prompt:.0f} and outputs of {output:.0f} tokens: the pool holds {holds} such sequences, and "
            f"{batch} at once take in {flow:.0f} tokens a step"
        )
        top = limits.token_budget
        wanted = knobs.with_(
            max_batch_size=min(batch, limits.max_batch_size), max_wait_ms=0.0, token_budget=min(budget, top),
            chunk_size=min(budget, top, limits.chunk_size),
        )  # fmt: skip
        return Proposal(wanted, regime, cause, evidence | {"holds": holds})

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget


def _batch_for(holds: int) -> int:
    for below, batch in _BATCH:
        if holds < below:
            return batch
    coarse = holds // _COARSE * _COARSE
    return coarse if holds < coarse + _NEAR else holds
