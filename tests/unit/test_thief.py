"""The process that takes a core: it works when told to, and ends with whoever started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.controller_live.thief import Thief
from tests.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_takes_time_when_told_to_and_none_otherwise() -> None:
    with Thief() as thief:
        process = psutil.Process(thief.pid)

        def used() -> float:
            return process.cpu_times().user + process.cpu_times().system

        thief.rest()
        thief.go_on()  # for who does not work these say nothing
        assert not thief.busy
        thief.start()
        begun = used()
        until(lambda: used() > begun + 0.2)
        thief.rest()
        assert thief.busy
        until(lambda: process.status() == psutil.STATUS_SLEEPING)
        rested = used()
        time.sleep(0.2)
        assert used() - rested < 0.1
        thief.go_on()
        until(lambda: used() > rested + 0.1)
        thief.stop()
        until(lambda: process.status() == psutil.STATUS_SLEEPING)
    assert gone(thief.pid)
    with pytest.raises(RuntimeError, match="has ended"):
        thief.start()


def test_it_ends_with_a_parent_that_was_killed() -> None:
    text = (
        "from benchmarks.controller_live.thief import Thief\n"
        "thief = Thief(); thief.start(); print(thief.pid, flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: gone(pid))
    parent.stdin.close()
    parent.stdout.close()
