"""What happens to engines and batchers that were never closed when the interpreter ends."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Final, Protocol

EXIT_WAIT_S: Final = 10.0
"""How long the interpreter's exit waits for steps and calls in progress."""


class Abandoned(Protocol):
    """Something with threads of its own."""

    def abandon(self) -> None:
        """Begin to stop."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until it has stopped, so long at most."""
        ...


_RUNNING: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def stop_at_exit(running: Abandoned) -> None:
    """See to it that ``running`` has stopped before the interpreter takes itself apart."""
    _RUNNING.add(running)


def _stop() -> None:
    """Let no thread be inside a model when the interpreter takes itself apart, and let none hold it up for long."""
    until = time.monotonic() + EXIT_WAIT_S
    found = list(_RUNNING)
    for one in found:
        one.abandon()
    for one in found:
        one.join(max(0.0, until - time.monotonic()))


atexit.register(_stop)
