"""Static batches: a call goes only when it is full.

The most throughput a function can give, and no bound on latency: the last items wait until others fill their call, the
queue is full, or the batcher closes. For work through a data set with :meth:`Batcher.map`, never for requests.
"""

from __future__ import annotations

from runtime.batching.strategies.protocol import Decision, Plain, State, fit
from runtime.records import LimitedBy


class Static(Plain):
    """See the module."""

    name = "static"

    def decide(self, state: State) -> Decision:
        knobs, queue = state.knobs, state.queue
        found = fit(queue.first(knobs.max_batch_size), knobs.max_batch_size, knobs.token_budget, queue.padded)
        if found.limited_by is LimitedBy.DEMAND and not state.must_go:
            lacking = knobs.max_batch_size if queue.in_order else 1
            return Decision(wake_items=lacking, limited_by=LimitedBy.WAIT)
        return Decision(found.items, limited_by=found.limited_by)
