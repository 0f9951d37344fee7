"""A clock for measuring on a machine that does other work too."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil


def others() -> tuple[float, float]:
    """(seconds on the clock, seconds of CPU that other processes have used): what a measurement here must be read with."""
    spent = psutil.cpu_times()
    mine = psutil.Process().cpu_times()
    return time.monotonic(), spent.user + spent.system + spent.nice - mine.user - mine.system


class UndisturbedClock:
    """Monotonic time without the time for which one thread was ready to run and the kernel ran something else.

    The kernel counts it in the second field of the thread's ``schedstat``, in ns (Linux,
    Documentation/scheduler/sched-stats.rst). It is added when the thread runs again: read from other threads, this clock can be
    ahead by a wait that still goes on, a few milliseconds, and step back. What other work costs by emptying caches stays in.
    Between :meth:`count_waits` and :meth:`leave_waits_out` waits pass like other time, for work that is part of an experiment.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._counted = 0.0  # waits that are not left out
        self._since: float | None = None  # waited when counting began

    def follow(self, thread: threading.Thread) -> None:
        """Leave out the waits of ``thread``, which has started. Raises OSError where there is no such account."""
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        before = self.now()
        self._file = os.open(path, os.O_RDONLY)
        self._offset = self.now() - before  # no jump

    _offset = 0.0

    def count_waits(self) -> None:
        """From now on, until :meth:`leave_waits_out`, waits are not left out."""
        if self._since is None:
            self._since = self._read()

    def leave_waits_out(self) -> None:
        if self._since is not None:
            self._counted += self._read() - self._since
            self._since = None

    @property
    def waited(self) -> float:
        """Seconds left out since the thread began."""
        return (self._read() if self._since is None else self._since) - self._counted

    def _read(self) -> float:
        """Seconds that the thread has waited since it began."""
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def now(self) -> float:
        while True:
            waited, now = self.waited, time.monotonic()
            if (
                self.waited == waited
            ):  # else the thread was kept waiting between the two, and they do not belong together
                return now - waited - self._offset
