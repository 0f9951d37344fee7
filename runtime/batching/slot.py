"""One thread of a batcher: a place in which one call at a time can run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

from runtime.batching.invoke import Function


class Slot:
    """A thread with nothing to do stands in ``idle`` and waits at its ``gate``, which whoever has news for it opens."""

    __slots__ = ("function", "gate", "name", "thread", "worker")

    def __init__(self, worker: int, function: Function, name: str) -> None:
        self.worker = worker
        self.function = function
        self.name = name
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: threading.Thread | None = None

    def rest(self, until: float, now: Callable[[], float], lock: threading.Lock, idle: list[Slot]) -> None:
        """Wait until the gate is opened, or until then."""
        timeout = -1.0 if until == inf else min(max(0.0, until - now()), threading.TIMEOUT_MAX)
        if self.gate.acquire(timeout=timeout):
            return
        with lock:
            if self in idle:
                idle.remove(self)
                return
        self.gate.acquire()  # it was opened in that very moment
