"""A batcher in virtual time: the same core and strategies, any service time, no thread and no sleep.

For tests, for comparing strategies, and for asking what a setting would do. ``serve`` runs to the end; nothing depends on
the wall clock, so the same input gives the same output.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from runtime.batching.accounts import item_record
from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, Call, Item
from runtime.errors import RejectedError
from runtime.records import FinishReason, RequestRecord

_EPS = 1e-12


@dataclass
class Served:
    """What came of it: one record an item, in the order in which they ended, and every call."""

    records: list[RequestRecord] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class _Work:
    """A call under way, and the seconds of work that it has left."""

    __slots__ = ("call", "left")

    def __init__(self, call: Call, left: float) -> None:
        self.call = call
        self.left = left


def serve(
    core: BatchCore,
    arrivals: Iterable[Item],
    service: Callable[[Call], float],
    *,
    slowdown: Callable[[int], float] | None = None,
    events: Iterable[tuple[float, Callable[[float], None]]] = (),
) -> Served:
    """Serve ``arrivals`` (ascending) to the end.

    ``service``: seconds of work of a call that runs alone. ``slowdown``: how many times slower each call goes while so many
    run: a device they share, felt from moment to moment as calls begin and end. ``events``: (time, what to do then), such
    as turning a knob. Once nothing more can come the core is told that it is closing, so that strategies that wait for
    full calls come to an end.
    """
    served = Served()
    names = count()
    coming = iter(arrivals)
    following = next(coming, None)
    todo = sorted(((when, next(names), do) for when, do in events), key=lambda event: event[:2])
    heapq.heapify(todo)
    running: list[_Work] = []
    now = 0.0

    def end(item: Item, reason: FinishReason, cause: str = "") -> None:
        served.records.append(item_record(item, reason, now, core.epoch, cause))

    while True:
        factor = slowdown(len(running)) if slowdown is not None and running else 1.0
        first_end = now + max(0.0, min((work.left for work in running), default=inf)) * factor
        arrival = inf if following is None else following.arrival
        event = todo[0][0] if todo else inf
        when = min(first_end, arrival, event, core.expiries.next)
        if core.state.idle:
            when = min(when, max(now, core.hold_until))
        if when == inf:
            if not core.has_work:
                return served
            if core.state.closing:
                raise RuntimeError(
                    f"the {core.strategy.name} strategy leaves {core.state.waiting} items waiting for ever"
                )
            core.state.closing = True
        else:
            for work in running:
                work.left -= (when - now) / factor
            now = when
        for _, _, do in [heapq.heappop(todo) for _ in range(sum(entry[0] <= now for entry in todo))]:
            do(now)
        ask = core.hold_until <= now or bool(todo) or core.state.closing
        for work in [work for work in running if work.left <= _EPS]:
            ask = True
            running.remove(work)
            alive = [item for item in work.call.items if item.state is not ENDED]
            core.done(work.call, now)
            served.calls.append(work.call)
            for item in alive:
                end(item, FinishReason.STOP)
        while following is not None and following.arrival <= now:
            item, following = following, next(coming, None)
            if item.id == "":
                item.id = next(names)
            try:
                core.submit(item, now)
            except RejectedError as error:
                end(item, FinishReason.REJECTED, error.reason)
        if following is None and not todo and not running:
            core.state.closing = True
        ask = ask or core.state.waiting >= core.hold_items or core.state.waiting_cost >= core.knobs.token_budget
        ask = ask or core.state.must_go or core.expiries.next <= now
        while ask:
            step = core.next(now)
            if core.fault is not None:
                raise core.fault
            for ended in step.ended:
                end(ended.item, ended.reason, ended.cause)
            if step.call is None:
                if step.wake_at <= now and step.ended:
                    continue
                break
            running.append(_Work(step.call, service(step.call)))
