"""Running one call, handing out what comes of it, and telling the core and the listeners."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from runtime.batching.accounts import Peak, call_record
from runtime.batching.core import BatchCore
from runtime.batching.invoke import Function, Ran, WorkerDied, run_call
from runtime.batching.item import ENDED, Call, Item
from runtime.batching.outcomes import (
    any_failed,
    count_failed,
    deliver,
    fail_lost,
    fail_undelivered,
    hand_out,
    outcome_records,
)
from runtime.shared.listeners import Listeners

log = logging.getLogger(__name__)


class Calls:
    """``lock`` guards the core; ``wake`` has idle workers ask it again."""

    def __init__(
        self,
        core: BatchCore,
        lock: threading.RLock,
        listeners: Listeners,
        now: Callable[[], float],
        wake: Callable[[], None],
        *,
        isolate: bool,
        measure: Callable[[], int] | None,
    ) -> None:
        self._core = core
        self._lock = lock
        self._listeners = listeners
        self._now = now
        self._wake = wake
        self._isolate = isolate
        self._peak = Peak(measure)

    def run(self, function: Function, call: Call) -> bool:
        """False if the thread that runs it is to die of it: the caller starts another in its place."""
        payloads = [item.payload for item in call.items]
        try:
            ran = run_call(function, payloads, partial(self._emit, call), isolate=self._isolate)
        except WorkerDied as error:  # the function's process; the thread is well
            self._lost(call, error)
            return True
        except BaseException as error:
            log.error("a worker of %s died: %r; it is replaced", function.name, error)
            self._lost(call, error)
            return False
        live: list[bool] = []
        try:
            self._finish(call, ran, live)
        except BaseException as error:
            self._fail(call, live, error)
            raise
        return True

    def _emit(self, call: Call, at: int, outputs: Sequence[Any]) -> bool:
        """Outputs of a function that streams, from the item ``at`` on. False if nobody waits for more."""
        items = call.items[at : at + len(outputs)]
        records = hand_out(call, items, outputs, self._now(), self._core.epoch, self._leave)
        if records and self._listeners.known:
            self._listeners.tell(None, records)
        wanted = any(item.state is not ENDED for item in items)
        call.stretched |= not wanted  # cut short: no time to learn from
        return wanted

    def _leave(self, item: Item) -> bool:
        with self._lock:
            return self._core.leave(item)

    def _finish(self, call: Call, ran: Ran, live: list[bool]) -> None:
        """``live`` is given the items that end with the call; the rest ended while they ran: timed out, say."""
        core, items, outcomes = self._core, call.items, ran.outcomes
        some_failed = any_failed(outcomes)
        call.stretched |= ran.runs > 1 or not ran.fitted  # cut short as well, where it raised
        call.peak_bytes = self._peak.bytes()
        with self._lock:
            live += [item.state is not ENDED for item in items]
            call.failed += count_failed(outcomes, live) if some_failed else 0
            core.done(call, self._now())
            core.learn_memory(call, ran.oom, ran.fitted)
            running = sum(len(other.items) for other in core.state.running)
            if core.state.waiting or core.state.closing:
                self._wake()  # whoever held back because of this call
        deliver(items, outcomes, live)
        if self._listeners.known:
            records = outcome_records(call, outcomes, live, core.epoch)
            self._listeners.tell(call_record(call, running), records)

    def _fail(self, call: Call, live: list[bool], error: BaseException) -> None:
        """Handing out what came of ``call`` went wrong: items that have no outcome by now end with ``error``."""
        core = self._core
        with self._lock:
            live += [item.state is not ENDED for item in call.items] if not live else []
            left = [item for item, alive in zip(call.items, live, strict=True) if alive and item.handle is not None]
            if call in core.state.running:
                call.failed = len(left)
                core.done(call, self._now())
        records = fail_undelivered(left, error, call.end, core.epoch)
        if records and self._listeners.known:
            self._listeners.tell(None, records)

    def _lost(self, call: Call, error: BaseException) -> None:
        with self._lock:
            spent = self._core.lost(call, self._now(), apart=self._isolate)
            self._wake()
        records = fail_lost(spent, error, call.end, self._core.epoch)
        if records and self._listeners.known:
            self._listeners.tell(None, records)
