"""What happens to engines that were never closed when the interpreter ends."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Final, Protocol

EXIT_WAIT_S: Final = 10.0
"""How long the interpreter's exit waits for steps in progress."""


class Abandoned(Protocol):
    """A loop on a thread of its own."""

    def abandon(self) -> None:
        """Begin to stop."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until it has stopped, so long at most."""
        ...


_LOOPS: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def stop_at_exit(loop: Abandoned) -> None:
    """See to it that ``loop`` has ended before the interpreter takes itself apart."""
    _LOOPS.add(loop)


def _stop() -> None:
    """Let no thread be inside the model when the interpreter takes itself apart, and let none hold it up for long."""
    until = time.monotonic() + EXIT_WAIT_S
    loops = list(_LOOPS)
    for loop in loops:
        loop.abandon()
    for loop in loops:
        loop.join(max(0.0, until - time.monotonic()))


atexit.register(_stop)
