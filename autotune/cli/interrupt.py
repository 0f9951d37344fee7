"""Ctrl-C: the first asks to stop and keep the best so far, the second quits at once."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from autotune.cli.exits import INTERRUPTED


class _Requested(threading.Event):
    """Set from the moment the signal came; whoever waits is woken right after."""

    received = False

    def is_set(self) -> bool:
        return self.received or super().is_set()


@contextmanager
def end_on_interrupt() -> Iterator[None]:
    """SIGINT ends the process on the spot: for imports and the loading of a model, with nothing to save yet.

    An exception could be lost there: in a finalizer, or in a library that catches it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"stopped\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_on_interrupt(*, at_once: bool = False) -> Iterator[threading.Event]:
    """An event set by the first SIGINT or SIGTERM, which is acknowledged on stderr. The second ends the process on the spot.

    ``at_once``: the block ends as soon as the event is set, so there is nothing to acknowledge.

    At once means without unwinding: the engine's thread may be deep in a step. Nothing is lost by that: the journal is
    appended and synced line by line, and other files are renamed into place whole.
    """
    requested = _Requested()
    received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(INTERRUPTED)
        requested.received = True
        received.put(number)

    def forward() -> None:
        if received.get() is not None:
            requested.set()
            if not at_once:
                with suppress(OSError, ValueError):  # nobody reads stderr
                    print("stopping; once more to end at once", file=sys.stderr, flush=True)

    # The handler runs in the midst of whatever the main thread does. In Event.wait it would wait for ever for the lock that
    # Event.set needs; SimpleQueue.put is reentrant.
    forwarder = threading.Thread(target=forward, name="interrupt", daemon=True)
    forwarder.start()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received.put(None)
        forwarder.join()
