"""The records of items and calls, in the terms of :mod:`runtime.records`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from runtime.batching.item import Call, Item
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord

log = logging.getLogger(__name__)


def item_record(item: Item, reason: FinishReason, finished: float, epoch: int, cause: str = "") -> RequestRecord:
    """Of an item that has ended. Its tokens are its outputs: one, at ``finished``, unless they came one by one."""
    times: Sequence[float] = item.times if item.times is not None else ()
    if item.times is None and reason is FinishReason.STOP:
        times = (finished,)
    ran = item.tries > 0
    return RequestRecord(
        id=str(item.id),
        arrival=item.arrival,
        scheduled=item.scheduled if ran else None,
        finished=finished,
        token_times=times,
        prompt_tokens=item.cost,
        output_tokens=len(times),
        cached_tokens=0,
        preemptions=max(0, item.tries - 1),
        reason=reason,
        request_class=item.request_class,
        tenant=item.tenant,
        priority=item.priority,
        epoch_first=item.epoch,
        epoch_last=epoch if ran else -1,
        cause=cause,
    )


def call_record(call: Call, running_items: int) -> StepRecord:
    """Of a call that has ended: a step in which each item is a prompt of ``cost`` tokens, computed whole."""
    return StepRecord(
        start=call.start,
        end=call.end,
        steps=1,
        decodes=0,
        decode_context=0,
        chunks=len(call.items),
        prefill_tokens=call.cost,
        prefill_context=call.cost,
        prefill_attention=sum(item.cost * (item.cost + 1) for item in call.items) // 2,
        sampled=len(call.items) - call.failed,
        running=running_items,
        waiting=call.waiting,
        waiting_tokens=call.waiting_cost,
        kv_free_blocks=0,
        preemptions=0,
        epoch=call.epoch,
        budget_used=call.cost,
        limited_by=call.limited_by or LimitedBy.DEMAND,
        failed=call.failed,
    )


class Peak:
    """Bytes that the call which has just ended held at most, as ``measure`` says; None without one, or once it has failed."""

    def __init__(self, measure: Callable[[], int] | None) -> None:
        self._measure = measure

    def bytes(self) -> int | None:
        if self._measure is None:
            return None
        try:
            return int(self._measure())
        except BaseException:  # in a worker's thread, so no Ctrl-C
            log.exception("measure_bytes failed and has been taken off; what was learned of memory until now stays")
            self._measure = None
            return None
