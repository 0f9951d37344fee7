"""The clock that leaves out other processes' time, against a process that fights for the same processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.clocks.undisturbed import UndisturbedClock
from runtime.llm.engine import Engine
from tests.fakes import FakeExecutor, FakeModel, Heard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no such account"),
]


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_time_that_another_process_took_is_left_out() -> None:
    """Both on one processor: about half of the time is the other's."""
    clock, took = UndisturbedClock(), []
    ready = threading.Event()

    def run() -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        clock.follow(threading.current_thread())
        ready.wait()
        begun, wall, cpu = clock.now(), time.monotonic(), time.thread_time()
        spin(1.0)
        took.extend([clock.now() - begun, time.monotonic() - wall, time.thread_time() - cpu])

    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    ) as rival:
        try:
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(0.5)  # for the rival to start; it does not matter if it takes longer
            ready.set()
            thread.join()
        finally:
            rival.kill()
    mine, wall, cpu = took
    assert cpu < 0.9 * wall, "the rival did not run"
    assert mine == pytest.approx(cpu, abs=0.1 * wall)


def test_waits_that_are_part_of_the_experiment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = UndisturbedClock()
    waited, real = [5.0], [100.0]
    monkeypatch.setattr(clock, "_read", lambda: waited[0])
    monkeypatch.setattr(time, "monotonic", lambda: real[0])

    def passes(*, waiting: bool) -> float:
        before = clock.now()
        real[0] += 1.0
        waited[0] += 1.0 if waiting else 0.0
        return clock.now() - before

    assert (passes(waiting=False), passes(waiting=True)) == (1.0, 0.0)
    clock.count_waits()
    clock.count_waits()
    assert (passes(waiting=False), passes(waiting=True)) == (1.0, 1.0)
    before = clock.now()
    clock.leave_waits_out()
    assert clock.now() == before
    assert (passes(waiting=False), passes(waiting=True)) == (1.0, 0.0)


def test_it_does_not_jump_when_it_begins_to_follow_and_sleep_counts() -> None:
    clock = UndisturbedClock()
    before = clock.now()
    clock.follow(threading.current_thread())
    assert 0 <= clock.now() - before < 0.5
    begun = clock.now()
    time.sleep(0.2)
    assert clock.now() - begun > 0.15


def test_an_engine_runs_on_the_clock_it_is_given() -> None:
    class Shifted:
        def now(self) -> float:
            return time.monotonic() + 1e6

    heard = Heard()
    with Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=1024, clock=Shifted()) as engine:
        engine.subscribe(heard)
        begun = Shifted().now()
        engine.submit([1, 2], max_tokens=2).result()
        assert engine.view().now >= begun
        record = heard.request()
    assert record.scheduled is not None and begun <= record.arrival <= record.scheduled <= Shifted().now()
