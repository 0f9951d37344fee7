"""Rivals from papers that are no products of ours: how they set the budget of a step, and in which order prompts come.

Each is written from its description; what stands in their place here is said. They start from the cold knobs and leave those
alone: what they have is a budget for each step, in whole tiles as all have them, and, of Niyama, an order and what becomes of
those that are late.
"""

from __future__ import annotations

import math

from autotune.control.controllers.rival_parts.tiles import step_of_whole_tiles
from autotune.control.controllers.static import StaticController
from runtime.knobs import Knobs
from runtime.records import StepRecord
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import TILE, SchedulerView

_POOL_SHARE, _POOL_FULL, _FEW = 32, 1000, 512


class PPas(StaticController):
    """Prefill-pressure adaptive scheduling: a step holds ``cap`` tokens while at least two prompts are pending and something
    decodes, else all that the knob allows.

    Source: Sämann, "P-PAS: Prefill-Pressure Adaptive Scheduling for Long-Context LLM Serving" (arXiv 2608.15171), proposed for
    vLLM in RFC 52906 with a cap of 2,048; its author uses 1,280 for another model, so the cap may be tuned.
    """

    name = "p-pas"

    def __init__(self, start: Knobs, *, cap: int = 2048, tile: int = TILE) -> None:
        super().__init__(start)
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise ValueError(f"cap is {cap!r}; it must be a whole number of tokens from 1 on")
        self._cap, self._tile = cap, tile

    def budget(self, view: SchedulerView) -> int:
        pressed = view.waiting + view.prefilling >= 2 and view.decoding > 0
        return (
            step_of_whole_tiles(max(self._cap, view.decoding), view, self._tile) if pressed else view.knobs.token_budget
        )


class Niyama(StaticController):
    """Dynamic chunks: a step holds as many tokens as the decode that is due first leaves time for, by a model of step times.

    The largest total from ``least`` to ``most`` tokens of which ``margin`` × the predicted time fits the least slack of the
    decodes, and no more than 512 where a 32nd of the free pool holds fewer than 1,000 tokens. Its order is
    :class:`runtime.ordering.Hybrid`; what cannot come in time any more it serves after the others (eager relegation), which
    the engine's own policy does.

    Source: Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving" (arXiv 2503.22562), later QoServe, and its
    implementation in sarathi-serve (``margin`` 1.2, ``most`` 2,552 tokens, ``least`` 128). There the model was fitted beforehand
    to the GPU; here it starts cold as everybody's does: our learner of step times, and all the knob allows while that has seen
    too little.
    """

    name = "niyama"

    def __init__(
        self,
        start: Knobs,
        *,
        block_size: int = 16,
        margin: float = 1.2,
        most: int = 2552,
        least: int = 128,
        tile: int = TILE,
    ) -> None:
        super().__init__(start)
        if not 1 <= margin < math.inf:
            raise ValueError(f"margin is {margin!r}; it must be a factor of at least 1")
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"least is {least!r}; it must be a whole number of tokens from 1 on")
        if isinstance(most, bool) or not isinstance(most, int) or most < least:
            raise ValueError(f"most is {most!r}; it must be a whole number of tokens from {least} on")
        self._block_size, self._margin, self._most, self._least, self._tile = block_size, margin, most, least, tile
        self._model = StepLearner()

    def observe_step(self, record: StepRecord) -> None:
        super().observe_step(record)
        if not record.failed:
            self._model.observe(StepFeatures.of(record), record.duration)

    def budget(self, view: SchedulerView) -> int:
        top = view.knobs.token_budget
        if not (self._model.ready and (view.waiting or view.prefilling)):
            return top
        most = self._most
        if view.kv_free_blocks * self._block_size // _POOL_SHARE < _POOL_FULL:
            most = _FEW
        total = float(most)
        if view.decode_slack < math.inf:
            seconds = view.decode_slack / self._margin
            prefill = self._model.most_prefill(view.decoding, view.decode_context, seconds, view.in_progress)
            total = min(view.decoding + prefill, total)
        return step_of_whole_tiles(max(int(total), self._least, view.decoding), view, self._tile)
