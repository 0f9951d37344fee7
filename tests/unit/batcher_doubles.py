"""Functions and listeners that the tests of the batcher use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Gated:
    """A function that waits inside until it is let through, and remembers what it was called with."""

    def __init__(self, act: Callable[[Any], Any] = lambda x: x) -> None:
        self.calls: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self._act = act

    def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        return [self._act(item) for item in items]


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]
