"""What goes wrong around the function: memory runs out, workers die, listeners raise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest

from runtime import Batcher
from runtime.batching.largest import find_max_batch
from runtime.errors import RequestTimeoutError, StepFailedError
from runtime.records import RequestRecord, StepRecord


def test_out_of_memory_halves_the_call_and_remembers() -> None:
    sizes: list[int] = []
    gate, entered = threading.Event(), threading.Event()

    def hungry(items: list[int]) -> list[int]:
        sizes.append(len(items))
        entered.set()
        assert gate.wait(30)
        if len(items) > 10:
            raise MemoryError
        return items

    with Batcher(hungry, max_batch_size=32) as b:
        first = b.submit(0)
        entered.wait(30)
        futures = [b.submit(i) for i in range(1, 33)]
        gate.set()
        assert [f.result(30) for f in [first, *futures]] == list(range(33))
        assert b.effective_limits.max_batch_size < 16 and b.knobs.max_batch_size < 16
        most = b.knobs.max_batch_size
        seen = len(sizes)
        assert list(b.map(range(100))) == list(range(100))
    assert max(sizes[seen:]) <= most


def test_out_of_memory_of_a_single_item_is_its_own() -> None:
    def hungry(items: list[int]) -> list[int]:
        if 7 in items:
            raise MemoryError("too much")
        return items

    with Batcher(hungry) as b:
        found = list(b.map(range(10), return_exceptions=True))
    assert isinstance(found[7], MemoryError) and [f for f in found if not isinstance(f, Exception)] == [
        i for i in range(10) if i != 7
    ]


def test_pytorchs_out_of_memory_is_known() -> None:
    torch = pytest.importorskip("torch")

    def hungry(items: list[int]) -> list[int]:
        if len(items) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return items

    with Batcher(hungry, strategy="static", max_batch_size=8) as b:
        assert [f.result(30) for f in [b.submit(i) for i in range(8)]] == list(range(8))
        assert b.effective_limits.max_batch_size <= 4


def test_a_thread_that_dies_is_replaced_and_its_items_run_again() -> None:
    deaths = []

    def mortal(items: list[int]) -> list[int]:
        if 5 in items and not deaths:
            deaths.append(threading.current_thread())
            raise SystemExit("worker gone")
        return items

    with Batcher(mortal, max_batch_size=4) as b:
        before = b._pool.threads()
        assert list(b.map(range(40))) == list(range(40))
        after = b._pool.threads()
    assert deaths == before and after != before


def test_items_whose_worker_dies_twice_fail_with_the_cause() -> None:
    def deadly(items: list[int]) -> list[int]:
        if 3 in items:
            raise SystemExit("always")
        return items

    with Batcher(deadly, max_batch_size=1) as b:
        futures = [b.submit(i) for i in range(6)]
        with pytest.raises(StepFailedError, match=r"its worker died 2 times: SystemExit\('always'\)"):
            futures[3].result(30)
        assert [f.result(30) for i, f in enumerate(futures) if i != 3] == [0, 1, 2, 4, 5]


def test_of_a_call_that_kills_its_worker_only_the_item_at_fault_fails_if_items_are_isolated() -> None:
    sizes: list[int] = []

    def deadly(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if 13 in items:
            raise SystemExit("always")
        return items

    with Batcher(deadly, strategy="static", max_batch_size=8, isolate=True) as b:
        futures = [b.submit(i) for i in range(8, 16)]
        with pytest.raises(StepFailedError, match="its worker died 2 times"):
            futures[5].result(30)
        assert [f.result(30) for i, f in enumerate(futures) if i != 5] == [8, 9, 10, 11, 12, 14, 15]
    assert sizes == [8] + 8 * [1]


MODULE = """
import os, pathlib

def act(items):
    for item in items:
        if isinstance(item, str):
            mark = pathlib.Path(item)
            if not mark.exists():
                mark.touch()
                os._exit(3)
        elif item == -1:
            os._exit(4)
        elif item == -2:
            raise ValueError("minus two")
    return [(item, os.getpid()) for item in items]
"""


def test_a_process_that_dies_is_replaced_and_its_items_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acting_in_a_process.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    import acting_in_a_process as module  # type: ignore[import-not-found]

    with Batcher(module.act, processes=True, max_batch_size=1) as b:
        first = b.submit(1).result(60)
        assert first[0] == 1 and first[1] != os.getpid()
        mark = str(tmp_path / "died")
        second = b.submit(mark).result(60)
        assert second[0] == mark and second[1] not in (first[1], os.getpid())
        with pytest.raises(ValueError, match="minus two"):
            b.submit(-2).result(60)
        assert b.submit(2).result(60) == (2, second[1])  # an exception does not end it
        with pytest.raises(StepFailedError, match="ended with exit code 4"):
            b.submit(-1).result(60)
        assert b.submit(3).result(60)[0] == 3


def test_a_listener_that_raises_is_cut_off() -> None:
    class Bad:
        heard = 0

        def on_step(self, record: StepRecord) -> None:
            Bad.heard += 1
            raise RuntimeError("no")

        def on_request(self, record: RequestRecord) -> None:
            pass

    with Batcher(lambda items: items) as b:
        b.subscribe(Bad())
        assert [b(i) for i in range(5)] == list(range(5))
    assert Bad.heard == 1


def test_a_listener_may_look_at_the_batcher_and_close_it() -> None:
    class Curious:
        def __init__(self, b: Batcher) -> None:
            self.b = b
            self.views: list[Any] = []

        def on_step(self, record: StepRecord) -> None:
            self.views.append(self.b.view())

        def on_request(self, record: RequestRecord) -> None:
            self.b.close()

    b = Batcher(lambda items: items)
    curious = Curious(b)
    b.subscribe(curious)
    assert b(1) == 1
    b.close()
    assert curious.views[0].running == 0 and b.closed


def test_calls_stay_below_the_memory_limit_that_was_learned() -> None:
    """Each unit of cost takes 1,000 bytes beside 5,000 of its own; 30,000 are allowed."""
    peak = 0
    peaks: list[int] = []

    def work(items: list[int]) -> list[int]:
        nonlocal peak
        peak = 5000 + 1000 * sum(items)
        peaks.append(peak)
        return items

    with Batcher(work, cost=int, memory_limit_bytes=30_000, measure_bytes=lambda: peak) as b:
        for size in (1, 2, 3, 1, 2):
            b(size)
        assert list(b.map([2] * 300)) == [2] * 300
        assert max(peaks) <= 30_000
        assert max(peaks) > 20_000


@pytest.mark.parametrize(
    ("budget_ms", "most", "best"), [(None, 4096, 100), (60, 4096, 20), (60, 90, 20), (None, 90, 90)]
)
def test_the_largest_batch_is_found_and_the_best_inside_a_latency(
    budget_ms: float | None, most: int, best: int
) -> None:
    """20 ms and 2 ms an item on a clock of its own; memory for 100."""
    now = 0.0
    calls: dict[int, int] = {}

    def work(items: list[int]) -> list[int]:
        nonlocal now
        calls[len(items)] = calls.get(len(items), 0) + 1
        if len(items) > 100:
            raise MemoryError
        now += 0.020 + 0.002 * len(items)
        return items

    found = find_max_batch(work, 1, latency_ms=budget_ms, most=most, clock=lambda: now)
    assert found.fits == min(100, most) and max(calls) <= most
    assert found.best is not None and found.best <= best and found.best == pytest.approx(best, rel=1 / 16)
    assert found.out_of_memory == (most > 100)
    assert budget_ms is None or sum(n for size, n in calls.items() if size > 2 * best) < 16  # looked at, not timed
    assert [trial.size for trial in found.trials] == sorted(trial.size for trial in found.trials)


def test_no_batch_fits() -> None:
    def work(items: list[int]) -> list[int]:
        raise MemoryError

    with pytest.raises(MemoryError, match="with a single item"):
        find_max_batch(work, 1)
    with pytest.raises(ValueError, match="most is 0"):
        find_max_batch(work, 1, most=0)
    with pytest.raises(ValueError, match="latency_ms is 0"):
        find_max_batch(work, 1, latency_ms=0)


def test_whoever_asks_for_a_failed_items_result_sees_only_himself() -> None:
    def fails(items: list[int]) -> list[int]:
        raise ValueError("no")

    with Batcher(fails, max_batch_size=50) as b:
        futures = [b.submit(i) for i in range(50)]
        depths = []
        for future in futures * 3:
            with pytest.raises(ValueError) as caught:
                future.result(30)
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
            assert any(frame.name == "fails" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert len({*depths}) == 1


def test_a_mapping_is_no_list_of_results_whatever_its_size() -> None:
    """As tokenizers of transformers return: neither a dict nor a list, of two or three keys."""
    with Batcher(
        lambda items: UserDict(input_ids=items, attention_mask=items), max_wait_ms=10_000, max_batch_size=2
    ) as b:
        for future in [b.submit(1), b.submit(2)]:
            with pytest.raises(StepFailedError, match="returned UserDict; it must return a list"):
                future.result(30)


@pytest.mark.parametrize("bad", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_keeps_nobody_else_waiting(bad: type[BaseException]) -> None:
    def raises(future: object) -> None:
        raise bad

    gate = threading.Event()

    def slow(items: list[int]) -> list[int]:
        assert gate.wait(30)
        return items

    with Batcher(slow, max_batch_size=3) as b:
        b.submit(0)
        futures = [b.submit(i) for i in range(3)]
        futures[0].add_done_callback(raises)
        heard: list[object] = []
        futures[0].add_done_callback(heard.append)
        late = b.submit(9, timeout_s=0.3)
        late.add_done_callback(raises)
        with pytest.raises(RequestTimeoutError):
            late.result(30)
        gate.set()
        assert [f.result(30) for f in futures] == [0, 1, 2] and heard == futures[:1]
        assert b.submit(7).result(30) == 7


FORKS = """
import os, sys, threading
from runtime import Batcher, batch
from runtime.errors import EngineClosedError

@batch
def double(items):
    return [2 * item for item in items]

assert double(2) == 4
gate = threading.Event()
slow = Batcher(lambda items: gate.wait(30) and items)
running = slow.submit(1)
heard = []
slow._pool.lock.acquire()
double.batcher._pool.lock.acquire()  # as by a worker, in the moment of the fork
child = os.fork()
if child == 0:
    try:
        double.submit(3).result(10)
    except EngineClosedError as error:
        assert "before this one was forked" in str(error), error
        double.close()
        calls = [
            slow.view, lambda: slow.set_knobs(max_batch_size=2), lambda: slow.set_slo("e2e=1s"), lambda: slow.acquire("x"),
            running.result, running.exception, lambda: slow.call(1), lambda: list(slow.map([1])),
        ]
        for call in calls:
            try:
                call()
            except EngineClosedError as error:
                assert "before this one was forked" in str(error), error
            else:
                os._exit(2)
        assert slow.closed and not running.cancel()
        sys.exit(7)  # as a process ends
    os._exit(1)
double.batcher._pool.lock.release()
slow._pool.lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert double(4) == 8
assert not slow.closed and slow.view()
gate.set()
assert running.result(30) == 1
"""


def test_a_forked_process_is_told_to_make_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
