"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0


def until(true: Callable[[], object]) -> None:
    """Return as soon as ``true()``; ``AssertionError`` if it is not within ``PATIENCE_S``."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never was"
        time.sleep(0.01)
