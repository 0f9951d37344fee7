"""Where the ``autotune`` command begins: nothing slow is imported before Ctrl-C is an exit code and not a traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from autotune.cli.exits import INTERRUPTED


def main() -> None:
    """Import the command, which takes a second, and run it."""
    _open_standard_streams()
    before = signal.signal(signal.SIGINT, _leave)
    from autotune.cli.main import main

    signal.signal(signal.SIGINT, before)
    main()


def _open_standard_streams() -> None:
    """Put the null device where the process was begun without stdin, stdout or stderr, as by ``2>&-``. The next file to be
    opened, such as a study's journal, would otherwise be that descriptor and take what native code prints, and ``print`` takes
    a ``sys.stderr`` of None for stdout."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            os.set_inheritable(opened, True)  # as the others are
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: an exception would pass through half an import, where others may catch it. Nothing is open yet."""
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)
