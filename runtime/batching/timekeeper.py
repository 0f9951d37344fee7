"""Sees to it that items time out in time, even if every worker is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

from runtime.batching.item import Item
from runtime.expiries import Expiries


class Timekeeper:
    """A thread, from the first item that may time out. ``tick`` ends what is due and says whether to go on; it is called
    at once whenever there may be something to do, without the lock."""

    def __init__(
        self, lock: threading.Lock, expiries: Expiries[Item], now: Callable[[], float], tick: Callable[[], bool]
    ) -> None:
        self._expiries = expiries
        self._now = now
        self._tick = tick
        self._sooner = threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._looked = 0  # how often it was asked to look; so that nothing is missed while it ticks

    def watch(self, expiry: float) -> None:
        """Something expires then. Needs the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="batcher timekeeper", daemon=True)
            self._thread.start()
        elif expiry <= self._expiries.next:
            self.look()

    def look(self) -> None:
        """Tick now. Needs the lock."""
        self._looked += 1
        self._sooner.notify_all()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        seen = -1
        while True:
            with self._sooner:
                if seen == self._looked:
                    until = self._expiries.next
                    wait = None if until == inf else min(max(0.0, until - self._now()), threading.TIMEOUT_MAX)
                    self._sooner.wait(wait)
                seen = self._looked
            if not self._tick():
                return
