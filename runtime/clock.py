"""Time, as an argument. Nothing below the engine reads a clock of its own."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Seconds on an arbitrary, never decreasing scale."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()


@cache
def boot() -> str:
    """Eight hexadecimal digits that differ from boot to boot of a machine: :class:`MonotonicClock` begins anew with each. Empty
    where the system does not tell boots apart, as all but Linux."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:8]
    except (OSError, UnicodeDecodeError):
        return ""


class VirtualClock:
    """A clock that stands still until it is advanced: for tests and simulation."""

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        if not seconds >= 0:  # NaN is not
            raise ValueError(f"seconds is {seconds}; a clock cannot run backwards")
        self._now += seconds
        return self._now

    def advance_to(self, when: float) -> float:
        """Move to ``when``; a time already past leaves the clock where it is."""
        if when > self._now:
            self._now = when
        return self._now
