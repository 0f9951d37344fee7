"""Waking those who wait in event loops: each loop is called once, however many wait there."""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeups(Generic[T]):
    """Futures to resolve in their event loops, gathered. Each is ``whose``."""

    __slots__ = ("_loops",)

    def __init__(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], T]]] = {}

    def add(self, future: asyncio.Future[None], whose: T) -> None:
        self._loops.setdefault(future.get_loop(), []).append((future, whose))

    def send(self) -> list[T]:
        """Resolve them. Returns those whose event loop has been closed: nobody waits there any more."""
        lost: list[T] = []
        if self._loops:
            loops, self._loops = self._loops, {}
            for loop, waiting in loops.items():
                try:
                    loop.call_soon_threadsafe(_resolve, [future for future, _ in waiting])
                except RuntimeError:  # the loop is closed
                    lost += [whose for _, whose in waiting]
        return lost


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class _Gathered(threading.local):
    wakeups: Wakeups[None] | None = None


_GATHERED = _Gathered()


def wake(future: asyncio.Future[None]) -> None:
    """Resolve ``future`` in its event loop: now, or at the end of the delivery that this thread is in."""
    gathered = _GATHERED.wakeups
    if gathered is not None:
        gathered.add(future, None)
        return
    now: Wakeups[None] = Wakeups()
    now.add(future, None)
    now.send()


class Delivery:
    """Use as a context manager around many calls of :func:`wake`."""

    def __enter__(self) -> None:
        self._outer, _GATHERED.wakeups = _GATHERED.wakeups, Wakeups()  # a callback may deliver for another batcher

    def __exit__(self, *exc: object) -> None:
        gathered, _GATHERED.wakeups = _GATHERED.wakeups, self._outer
        if gathered is not None:
            gathered.send()
