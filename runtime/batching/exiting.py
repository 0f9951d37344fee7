"""What becomes of batchers that are never closed, when the interpreter ends."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Final, Protocol

EXIT_WAIT_S: Final = 10.0  # how long the interpreter's exit waits for calls in progress


class Stoppable(Protocol):
    def stop(self, drain: bool) -> None: ...
    def threads(self) -> list[threading.Thread]: ...


_RUNNING: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def stop_at_exit(pool: Stoppable) -> None:
    """Stop ``pool`` at the interpreter's exit, if it still runs then."""
    _RUNNING.add(pool)


def _stop_all() -> None:
    """Let no thread be inside the function when the interpreter takes itself apart, and let none hold it up for long."""
    until = time.monotonic() + EXIT_WAIT_S
    pools = list(_RUNNING)
    for pool in pools:
        pool.stop(drain=False)
    for pool in pools:
        for thread in pool.threads():
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_stop_all)
