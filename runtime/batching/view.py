"""What step policies and controllers may see of a batcher."""

from __future__ import annotations

from math import inf

from runtime.batching.strategies.protocol import State
from runtime.settings import Settings
from runtime.tunable import SchedulerView


def view_of(state: State, settings: Settings, now: float, again: int) -> SchedulerView:
    """A look as of ``now``: items are prompts of ``cost`` tokens, and there is no KV pool. ``again``: items to be retried."""
    head = state.queue.first(1)
    due = min((item.deadline for call in state.running for item in call.items), default=inf)
    epoch, knobs = settings.current
    return SchedulerView(
        now=now,
        decoding=0,
        prefilling=sum(len(call.items) for call in state.running),
        waiting=state.waiting + again,
        waiting_tokens=state.waiting_cost,
        prefilling_tokens=sum(call.cost for call in state.running),
        decode_context=0,
        kv_free_blocks=0,
        kv_total_blocks=0,
        oldest_arrival=state.oldest,
        least_slack=min([due, *(item.deadline for item in head)]) - now,
        decode_slack=inf,
        knobs=knobs,
        epoch=epoch,
        effective_limits=settings.effective_limits,
    )
