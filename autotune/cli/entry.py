"""Where the ``autotune`` command begins: nothing slow is imported before Ctrl-C is an exit code and not a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType

from autotune.cli.exits import INTERRUPTED


def main() -> None:
    """Import the command, which takes a second, and run it."""
    before = signal.signal(signal.SIGINT, _leave)
    from autotune.cli.main import main

    signal.signal(signal.SIGINT, before)
    main()


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: an exception would pass through half an import, where others may catch it. Nothing is open yet."""
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)
