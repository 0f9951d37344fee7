"""Size or window: a call goes when it is full, or when its oldest item has waited ``max_wait_ms``.

What Triton, Ray Serve and TorchServe call dynamic batching. Two numbers to choose, and right for one load only: at low load
the window is pure delay, at high load the calls fill before it ends. Kept for comparison, and for functions whose best
window is known.
"""

from __future__ import annotations

from runtime.batching.strategies.protocol import Decision, Plain, State, fit, full_call, wake_items
from runtime.records import LimitedBy


class Dynamic(Plain):
    """See the module."""

    name = "dynamic"

    def decide(self, state: State) -> Decision:
        knobs, queue = state.knobs, state.queue
        most = knobs.max_batch_size
        found = fit(queue.first(most), most, knobs.token_budget, queue.padded)
        if found.limited_by is LimitedBy.DEMAND and not state.must_go:
            until = state.oldest + knobs.max_wait_ms / 1e3
            if state.now < until:
                full = full_call(state)
                if full is not None:
                    return Decision(full.items, limited_by=full.limited_by)
                return Decision(wake_at=until, wake_items=wake_items(state), limited_by=LimitedBy.WAIT)
        return Decision(found.items, limited_by=found.limited_by)
