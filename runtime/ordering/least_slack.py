"""Least slack first: who must begin the soonest to be in time, by how fast this engine is.

Slack = deadline − now − predicted work. Now is the same for all who wait, so key = deadline − predicted work, the latest
time to begin; it stands still while they wait. With p prompt tokens, o the output expected of its class and prompt
(:mod:`~runtime.ordering.learned`), and the engine's own seconds for a prompt and an output token at present
(:class:`~runtime.ordering.learned.TokenTimes`):

- of a TTFT target, or a deadline of its own: target − p · s/prompt token;
- of an E2E target: target − p · s/prompt token − o · s/output token;
- of both the earlier; without any, 60 s after its arrival.

Until the first requests have ended an answer takes no time, until the first prompts nothing does: deadline order. So it
stays in the batcher, which tells of no steps. A rate that changes changes the keys of those that come afterwards, not of
those that wait.

Bound: nobody that comes later than own target + the longest predicted work goes before. Cost: constant for each step,
request that comes or ends, O(log n) in the queue.

Failure mode: past capacity it serves those first that are hopeless already, as deadline order does, and long ones among
them. Use it with early rejection, or :mod:`~runtime.ordering.hybrid`.

Source: least laxity first (Mok, "Fundamental Design Problems of Distributed Systems for the Hard-Real-Time Environment",
MIT 1983); without its preemptions: those that wait keep their order among each other, and begun prompts their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from runtime.ordering.deadline import NO_DEADLINE_S, Deadline
from runtime.ordering.learned import OutputLengths, TokenTimes
from runtime.ordering.protocol import Queued
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO


class LeastSlack(Deadline):
    """See the module; ``slos`` are those of :class:`~runtime.ordering.deadline.Deadline`."""

    def __init__(self, slos: Mapping[str, SLO] | None = None) -> None:
        super().__init__(slos)
        self._outputs = OutputLengths()
        self._times = TokenTimes()

    def key(self, queued: Queued) -> float:
        begin = inf if queued.deadline is None else queued.deadline
        slo = self.slo_of(queued)
        if slo is not None:
            if slo.ttft_ms is not None:
                begin = queued.arrival + slo.ttft_ms / 1e3
            if slo.e2e_ms is not None:
                answer_s = self._outputs.expected(queued.request_class, queued.size) * self._times.output_token_s
                begin = min(begin, queued.arrival + slo.e2e_ms / 1e3 - answer_s)
        if begin == inf:
            begin = queued.arrival + NO_DEADLINE_S
        return begin - queued.size * self._times.prompt_token_s

    def on_step(self, record: StepRecord) -> None:
        self._times.on_step(record)

    def on_request(self, record: RequestRecord) -> None:
        self._times.on_request(record)
        self._outputs.observe(record)
