"""Ctrl-C, wherever the main thread is when it comes."""

from __future__ import annotations

import signal
import subprocess
import sys

from autotune.cli.exits import INTERRUPTED
from autotune.cli.interrupt import stop_on_interrupt


def test_the_first_sets_the_event_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as requested:
        assert not requested.is_set()
        signal.raise_signal(signal.SIGINT)
        assert requested.is_set()  # at once, whatever thread is to wake those that wait
        assert requested.wait(30)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_within_a_wait_for_the_event_does_not_lock_up() -> None:
    """Event.wait and Event.set take one lock, and a handler runs on the thread that may hold it."""
    script = """
import signal
from autotune.cli.interrupt import stop_on_interrupt
with stop_on_interrupt() as requested:
    with requested._cond:
        signal.raise_signal(signal.SIGINT)
    assert requested.wait(30)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_the_second_ends_the_process_at_once() -> None:
    script = """
import signal, time
from autotune.cli.interrupt import stop_on_interrupt
with stop_on_interrupt():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == INTERRUPTED
