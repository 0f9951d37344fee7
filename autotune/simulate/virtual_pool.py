"""A batcher's pool in virtual time: the same core and strategies, any service time, no thread and no sleep.

Nothing depends on the wall clock, so the same input gives the same output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import inf

from runtime.batching.accounts import item_record
from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, Call, Ended, Item
from runtime.clock import VirtualClock
from runtime.errors import RejectedError
from runtime.records import FinishReason, RequestRecord

_EPS = 1e-12


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
