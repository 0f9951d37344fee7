"""A batcher in virtual time: the same core and strategies, any service time, no thread and no sleep.

For tests, for comparing strategies, and for asking what a setting would do. :class:`VirtualPool` runs calls as time is moved on,
:func:`serve` a whole load to its end; nothing depends on the wall clock, so the same input gives the same output.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from runtime.batching.accounts import item_record
from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, Call, Ended, Item
from runtime.clock import VirtualClock
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


class VirtualPool:
    """Runs the calls of ``core``, as :class:`~runtime.batching.pool.Pool` does in threads. Time passes in :meth:`advance` alone.

    ``service``: seconds of work of a call that runs alone. ``slowdown``: how many times slower each call goes while so many
    run: a device they share, felt from moment to moment as calls begin and end. ``failure``: why the function fails for an item,
    empty if it does not. ``tell`` gets each call that has ended, and the records of items that ended, with a call or without.
    """

    def __init__(
        self,
        core: BatchCore,
        service: Callable[[Call], float],
        tell: Callable[[Call | None, list[RequestRecord]], None],
        *,
        slowdown: Callable[[int], float] | None = None,
        failure: Callable[[Item], str] | None = None,
    ) -> None:
        self.core = core
        self.clock = VirtualClock()
        self._service, self._tell = service, tell
        self._slowdown, self._failure = slowdown, failure
        self._running: list[_Work] = []

    @property
    def _stretch(self) -> float:
        running = self._running
        return self._slowdown(len(running)) if self._slowdown is not None and running else 1.0

    @property
    def due(self) -> float:
        """When a call ends, an item times out or the strategy wants to be asked: what needs no arrival, s (inf: never)."""
        core, now = self.core, self.clock.now()
        first_end = now + max(0.0, min((work.left for work in self._running), default=inf)) * self._stretch
        when = min(first_end, core.expiries.next)
        return min(when, max(now, core.hold_until)) if core.state.idle else when

    def advance(self, when: float) -> None:
        """Let the calls go on up to ``when``, which is not after :attr:`due`."""
        passed = (when - self.clock.now()) / self._stretch
        for work in self._running:
            work.left -= passed
        self.clock.advance_to(when)

    def end_calls(self) -> bool:
        """Take in the calls that have ended by now; whether there were any."""
        now = self.clock.now()
        nothing = max(_EPS, 2 * math.ulp(now))  # less is lost when it is added to the time
        over = [work for work in self._running if work.left <= nothing]
        for work in over:
            call = work.call
            self._running.remove(work)
            alive = [item for item in call.items if item.state is not ENDED]
            causes = ["" if self._failure is None else self._failure(item) for item in alive]
            call.failed += sum(map(bool, causes))
            self.core.done(call, now)
            reasons = [FinishReason.ERROR if cause else FinishReason.STOP for cause in causes]
            self._tell(call, [self._record(*one) for one in zip(alive, reasons, causes, strict=True)])
        return bool(over)

    def submit(self, item: Item) -> None:
        """Queue ``item`` now. Raises :class:`RejectedError`, of which nobody is told."""
        self.core.submit(item, self.clock.now())

    def begin_calls(self, *, ask: bool) -> None:
        """Begin what is to begin now. Without ``ask`` the strategy is asked only where what waits may have changed its mind."""
        core, now = self.core, self.clock.now()
        ask = ask or core.state.waiting >= core.hold_items or core.state.waiting_cost >= core.knobs.token_budget
        ask = ask or core.state.must_go or core.expiries.next <= now
        while ask:
            step = core.next(now)
            if core.fault is not None:
                raise core.fault
            self.end(step.ended)
            if step.call is None:
                if step.wake_at <= now and step.ended:
                    continue
                break
            self._running.append(_Work(step.call, self._service(step.call)))

    def end(self, ended: Sequence[Ended]) -> None:
        """Tell of items that ended without a result."""
        for each in ended:
            self._tell(None, [self._record(each.item, each.reason, each.cause)])

    def reject(self, item: Item, error: RejectedError) -> None:
        """Tell of ``item``, which :meth:`submit` refused."""
        item.state = ENDED
        self._tell(None, [self._record(item, FinishReason.REJECTED, error.reason)])

    def _record(self, item: Item, reason: FinishReason, cause: str) -> RequestRecord:
        return item_record(item, reason, self.clock.now(), self.core.epoch, cause)


def serve(
    core: BatchCore,
    arrivals: Iterable[Item],
    service: Callable[[Call], float],
    *,
    slowdown: Callable[[int], float] | None = None,
    events: Iterable[tuple[float, Callable[[float], None]]] = (),
) -> Served:
    """Serve ``arrivals`` (ascending) to the end.

    ``service``, ``slowdown``: as of :class:`VirtualPool`. ``events``: (time, what to do then), such
    as turning a knob. Once nothing more can come the core is told that it is closing, so that strategies that wait for
    full calls come to an end.
    """
    served = Served()
    names = count()
    coming = iter(arrivals)
    following = next(coming, None)
    todo = sorted(((when, next(names), do) for when, do in events), key=lambda event: event[:2])
    heapq.heapify(todo)

    def tell(call: Call | None, records: list[RequestRecord]) -> None:
        if call is not None:
            served.calls.append(call)
        served.records += records

    pool = VirtualPool(core, service, tell, slowdown=slowdown)
    while True:
        arrival = inf if following is None else following.arrival
        event = todo[0][0] if todo else inf
        when = min(pool.due, arrival, event)
        if when == inf:
            if not core.has_work:
                return served
            if core.state.closing:
                raise RuntimeError(
                    f"the {core.strategy.name} strategy leaves {core.state.waiting} items waiting for ever"
                )
            core.state.closing = True
        else:
            pool.advance(when)
        now = pool.clock.now()
        for _, _, do in [heapq.heappop(todo) for _ in range(sum(entry[0] <= now for entry in todo))]:
            do(now)
        ask = core.hold_until <= now or bool(todo) or core.state.closing
        ask = pool.end_calls() or ask
        while following is not None and following.arrival <= now:
            item, following = following, next(coming, None)
            if item.id == "":
                item.id = next(names)
            try:
                pool.submit(item)
            except RejectedError as error:
                pool.reject(item, error)
        if following is None and not todo and not core.state.running:
            core.state.closing = True
        pool.begin_calls(ask=ask)
