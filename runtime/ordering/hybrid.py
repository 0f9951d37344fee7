"""Deadline + α · remaining tokens: by deadline while there is time, shortest first when there is not enough for all.

Key = deadline + ``alpha`` · tokens, with deadlines as :mod:`~runtime.ordering.deadline` has them. Tokens are those of the
prompt; where a class has an E2E target and no TTFT target, its answer too, by
:class:`~runtime.ordering.learned.OutputLengths`. At ``alpha`` 0 that is earliest deadline first. With a large one, or a
queue that is short beside ``alpha`` · tokens, it is nearly shortest first: past capacity, deadline order alone spends its
time on those that are about to be late.

Bound: nobody that comes later than own target + ``alpha`` · own tokens goes before; without SLO and deadline the target is
60 s. Cost: constant for each request that comes or ends, O(log n) in the queue.

Source: hybrid prioritization of Niyama (Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", arXiv
2503.22562), later QoServe, whose implementation has an ``alpha`` of 8 ms a token. What is different: there tokens are
counted again in every step, so that a prompt moves up while it is computed; here they are counted once, when it is queued,
so that a queue of thousands is not sorted in each step. There an answer's length is estimated from its application's
history; here it is the mean of its class. Niyama's chunks and relegation are no part of an order: relegation is
``AdmissionPolicy(late="relegate")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from runtime.ordering.deadline import Deadline
from runtime.ordering.learned import OutputLengths
from runtime.ordering.protocol import Queued
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO

ALPHA_S = 0.008
"""Seconds of deadline that a token outweighs."""


class Hybrid(Deadline):
    """See the module. Raises ``ValueError`` unless ``alpha`` (s a token) is a number of at least 0."""

    def __init__(self, slos: Mapping[str, SLO] | None = None, *, alpha: float = ALPHA_S) -> None:
        super().__init__(slos)
        if not 0 <= alpha < inf:
            raise ValueError(f"alpha is {alpha!r}; it must be a number of seconds of at least 0")
        self._alpha = alpha
        self._outputs = OutputLengths()

    def key(self, queued: Queued) -> float:
        tokens = float(queued.size)
        slo = self.slo_of(queued)
        if slo is not None and slo.ttft_ms is None and slo.e2e_ms is not None:
            tokens += self._outputs.expected(queued.request_class, queued.size)
        return super().key(queued) + self._alpha * tokens

    def on_step(self, record: StepRecord) -> None:
        """Requests are enough."""

    def on_request(self, record: RequestRecord) -> None:
        self._outputs.observe(record)
