"""Static batches: a call goes only when it is full.

The most throughput a function can give, and no bound on latency: the last items wait until others fill their call, the
queue is full, :meth:`Batcher.map` has no more to bring, or the batcher closes. For work through a data set with
:meth:`Batcher.map`, never for requests.
"""

from __future__ import annotations

from runtime.batching.strategies.protocol import Decision, Plain, State, fit, full_call, wake_items
from runtime.records import LimitedBy


class Static(Plain):
    """See the module."""

    name = "static"

    def decide(self, state: State) -> Decision:
        knobs, queue = state.knobs, state.queue
        found = None if state.urged else full_call(state)
        if found is None:
            if not state.must_go:
                return Decision(wake_items=wake_items(state), limited_by=LimitedBy.WAIT)
            found = fit(queue.first(knobs.max_batch_size), knobs.max_batch_size, knobs.token_budget, queue.padded)
        return Decision(found.items, limited_by=found.limited_by)
