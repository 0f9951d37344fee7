"""What step policies and controllers may see of a scheduler."""

from __future__ import annotations

from math import inf

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.scheduler import Scheduler
from runtime.tunable import SchedulerView


def view_of(scheduler: Scheduler, now: float, knobs: Knobs, epoch: int, limits: KnobLimits) -> SchedulerView:
    """A look at ``scheduler`` as of ``now``; costs no more with more sequences decoding."""
    oldest, decodes, slack = scheduler.waiting.oldest(), scheduler.decodes, scheduler.slack
    going_on = tuple((s.computed, s.target - s.computed) for s in scheduler.prefills)
    last_end = now if decodes.last_end is None else decodes.last_end
    dues = slack.dues(now, decodes.step, last_end)
    decode_slack = min((left for _, left in dues), default=inf)
    return SchedulerView(
        now=now,
        decoding=len(decodes),
        prefilling=len(scheduler.prefills),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.tokens,
        prefilling_tokens=sum(left for _, left in going_on),
        decode_context=decodes.context,
        kv_free_blocks=scheduler.kv.free,
        kv_total_blocks=scheduler.kv.total,
        oldest_arrival=inf if oldest is None else oldest.request.arrival,
        least_slack=min(slack.fixed(now), decode_slack),
        decode_slack=decode_slack,
        knobs=knobs,
        epoch=epoch,
        effective_limits=limits,
        pace=slack.pace,
        going_on=going_on,
        dues=dues,
    )
