"""Ctrl-C: the first asks to stop and keep the best so far, the second quits at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.cli.exits import INTERRUPTED


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event set by the first SIGINT or SIGTERM. The second ends the process on the spot.

    At once means without unwinding: the engine's thread may be deep in a step. Nothing is lost by that: the journal is
    appended and synced line by line, and other files are renamed into place whole.
    """
    requested = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            os._exit(INTERRUPTED)
        requested.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
