"""A second process that takes a core: it spins while it is told to, and ends with whoever started it.

It listens at its standard input: ``1`` spin, ``0`` rest. When that is closed, which the kernel does for a parent however it
ends, the process ends too.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

_GLANCE_S = 0.0005  # of spinning, between two looks at the orders


class Thief:
    """The process, seen from here. Use as a context manager: leaving it ends the process."""

    def __init__(self) -> None:
        self._busy = False
        self._process = subprocess.Popen([sys.executable, "-I", __file__], stdin=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether it was told to spin."""
        return self._busy

    def start(self) -> None:
        """Take a core. Raises ``RuntimeError`` if the process has ended."""
        self._busy = True
        self._order(b"1")

    def stop(self) -> None:
        """Give it back."""
        self._busy = False
        self._order(b"0")

    def rest(self) -> None:
        """Give it back for a moment, until :meth:`go_on`. Nothing happens where it rests anyway."""
        if self._busy:
            self._order(b"0")

    def go_on(self) -> None:
        if self._busy:
            self._order(b"1")

    def close(self) -> None:
        """End the process and wait for its end. Any number of times."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _order(self, word: bytes) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), word)
        except (BrokenPipeError, ValueError) as error:
            raise RuntimeError("the process that takes a core has ended") from error


def serve(orders: int) -> None:
    """Do as ``orders``, a file descriptor, says until it is closed."""
    busy = False
    while True:
        if select.select([orders], [], [], 0.0 if busy else None)[0]:
            words = os.read(orders, 64)
            if not words:
                return
            busy = words.endswith(b"1")
        end = time.monotonic() + _GLANCE_S
        while busy and time.monotonic() < end:
            pass


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reaches the whole group; the parent says when it is over
        serve(sys.stdin.fileno())
