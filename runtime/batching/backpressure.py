"""Backpressure of a bounded queue: who offers an item while it is full waits, a thread or a task of an event loop.

Who comes while others wait, waits behind them, even if there is room: the queue drains to its low-water mark, and then those
who have waited longest get the free places. Threads and tasks stand in one line.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from math import inf
from typing import Final

from runtime.batching.core import BatchCore
from runtime.batching.future import ItemFuture
from runtime.batching.item import ENDED, Item
from runtime.shared.wakeups import wake

_LOW_WATER: Final = 0.75  # of a full queue: where those who wait are let in again, many at a time


class Backpressure:
    """Methods need ``lock``, but for :meth:`wait_in_loop`. ``nudge`` has the workers look at the queue."""

    def __init__(self, lock: threading.Lock, core: BatchCore, nudge: Callable[[], None]) -> None:
        self._lock = lock
        self._core = core
        self._nudge = nudge
        self._line: dict[Item, Callable[[], None]] = {}  # who waits, and what wakes them; first come, first
        self._called: set[Item] = set()  # those who got a free place, and are not in yet

    def admits(self, item: Item) -> bool:
        """Whether the queue takes ``item``, or nothing any more: then there is nothing to wait for."""
        state = self._core.state
        if state.closing:
            return True
        if state.waiting >= self._core.max_queue:
            return False
        if item in self._called or not (self._line or self._called):
            return True
        return not self._core.has_work  # nobody would call those who wait

    def wait(self, item: Item) -> None:
        """Block this thread until there is room, or ``item`` has timed out."""
        freed = threading.Condition(self._lock)
        try:
            while not self.admits(item) and item.state is not ENDED:
                self._join(item, freed.notify)
                freed.wait()
        except BaseException:  # such as Ctrl-C
            self.leave(item)
            raise

    async def wait_in_loop(self, future: ItemFuture) -> None:
        """The same for the item of ``future`` in an event loop; takes the lock itself."""
        while True:
            waiter = asyncio.get_running_loop().create_future()
            with self._lock:
                if self.admits(future.item) or future.item.state is ENDED:
                    return
                self._join(future.item, partial(wake, waiter))
            if future.item.expires < inf:
                future.add_done_callback(lambda _, waiter=waiter: wake(waiter))  # type: ignore[misc]
            await waiter

    def _join(self, item: Item, call: Callable[[], None]) -> None:
        self._called.discard(item)
        self._line[item] = call
        self._core.state.outside += 1
        self._nudge()  # who waits outside is a reason to go, whatever a strategy holds out for

    def leave(self, item: Item) -> None:
        """``item`` waits for room no longer: it goes in, or has ended."""
        self._line.pop(item, None)
        self._called.discard(item)
        if self._line and not self._called:  # the others wait for the queue to drain again
            self._core.state.outside = len(self._line)
            self._nudge()

    def left(self) -> None:
        """Items have left the queue."""
        core, state = self._core, self._core.state
        # of those outside, some may have timed out
        if not (self._line or self._called or state.outside) or state.waiting > _LOW_WATER * core.max_queue:
            return
        if not core.has_work:
            self.release()
        elif (free := core.max_queue - state.waiting - len(self._called)) > 0 or not self._line:
            self._call(free)

    def release(self) -> None:
        """Let everybody look. Who was called before and has not come may never: its event loop may have stopped."""
        self._called.clear()
        self._call(len(self._line))

    def _call(self, count: int) -> None:
        """Let in the first ``count`` of those who wait."""
        for item in list(islice(self._line, max(0, count))):
            self._called.add(item)
            self._line.pop(item)()
        self._core.state.outside = 0  # until they find it full again

    def look(self, items: Iterable[Item]) -> None:
        """Let the threads look that wait with ``items``, which have timed out."""
        for item in items:
            if (call := self._line.get(item)) is not None:
                call()
