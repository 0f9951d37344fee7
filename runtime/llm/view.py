"""What step policies and controllers may see of a scheduler."""

from __future__ import annotations

from math import inf

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.scheduler import Scheduler
from runtime.llm.slack import SlackTracker
from runtime.tunable import SchedulerView


def view_of(scheduler: Scheduler, now: float, knobs: Knobs, epoch: int, limits: KnobLimits) -> SchedulerView:
    """A look at ``scheduler`` as of ``now``; costs no more with more sequences while its ``slack`` follows them."""
    waiting, decodes, slack, kv = scheduler.waiting, scheduler.decodes, scheduler.slack, scheduler.kv
    if not slack.following:  # nobody asks in every step: followed for this look alone
        slack = scheduler.followed(SlackTracker(slack.slos))
    oldest = waiting.oldest()
    in_progress = tuple([(s.computed, s.target - s.computed) for s in scheduler.prefills]) if scheduler.prefills else ()
    last_end = decodes.last_end
    token_deadlines = slack.token_deadlines(now, decodes.step, now if last_end is None else last_end)
    decode_slack = min([left for _, left in token_deadlines]) if token_deadlines else inf
    return SchedulerView(
        now, len(decodes.members), len(in_progress), waiting.count, waiting.tokens, sum([left for _, left in in_progress]),
        decodes.context, kv.free, kv.total, inf if oldest is None else oldest.request.arrival,
        min(slack.fixed(now), decode_slack), decode_slack, knobs, epoch, limits, slack.step_time_target, in_progress,
        token_deadlines,
    )  # fmt: skip
