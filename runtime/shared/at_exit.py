"""What happens to engines and batchers that were never closed when the interpreter ends, and an end without its own."""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401  # its own handler, which ends child processes, is to run after the one here
import os
import sys
import time
import weakref
from contextlib import suppress
from typing import Final, NoReturn, Protocol

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


def end_process(code: int) -> NoReturn:
    """End the process with ``code`` once its output is written, without taking the interpreter apart.

    For a process that has lost its device: there PyTorch's tensors in pinned memory call the device, which aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


atexit.register(_stop)
os.register_at_fork(after_in_child=_RUNNING.clear)  # their threads stayed with the parent
