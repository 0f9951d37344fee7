"""Backpressure of a bounded queue: who offers an item while it is full waits, a thread or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
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
        self._freed = threading.Condition(lock)
        self._threads = 0
        self._tasks: list[asyncio.Future[None]] = []

    @property
    def admits(self) -> bool:
        """Whether the queue takes an item, or nothing any more: then there is nothing to wait for."""
        state = self._core.state
        return state.closing or state.waiting < self._core.max_queue

    def wait(self, item: Item) -> None:
        """Block this thread until there is room, or ``item`` has timed out."""
        self._threads += 1
        try:
            while not self.admits and item.state is not ENDED:
                self._core.state.outside += 1
                self._nudge()  # a full queue is a reason to go, whatever a strategy holds out for
                self._freed.wait()
        finally:
            self._threads -= 1

    async def wait_in_loop(self, future: ItemFuture) -> None:
        """The same for the item of ``future`` in an event loop; takes the lock itself."""
        while True:
            waiter = asyncio.get_running_loop().create_future()
            with self._lock:
                if self.admits or future.item.state is ENDED:
                    return
                self._tasks.append(waiter)
                self._core.state.outside += 1
                self._nudge()
            if future.item.expires < inf:
                future.add_done_callback(lambda _, waiter=waiter: wake(waiter))  # type: ignore[misc]
            await waiter

    def left(self) -> None:
        """Items have left the queue."""
        outside = self._core.state.outside  # of those, some may have gone in meanwhile, or timed out
        if (self._threads or self._tasks or outside) and self._core.state.waiting <= _LOW_WATER * self._core.max_queue:
            self.release()

    def release(self) -> None:
        """Let everybody look."""
        self.look()
        self._core.state.outside = 0  # until they find it full again
        waiting, self._tasks = self._tasks, []
        for waiter in waiting:
            wake(waiter)

    def look(self) -> None:
        """Let the threads look: an item has timed out that waited for room."""
        self._freed.notify_all()
