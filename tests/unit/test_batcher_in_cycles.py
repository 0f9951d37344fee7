"""What a garbage collector or a fork does in the middle of a batcher."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import pytest

from runtime import Batcher, RejectedError, StepFailedError, batch
from runtime.batching.process_worker import _readable
from runtime.ordering.fair_share import FairShare


def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def test_a_map_that_is_collected_under_the_lock_holds_nobody_up() -> None:
    """Left in a reference cycle, it ends in whatever thread allocates next, such as one that holds the lock."""
    with Batcher(doubled, strategy="static", max_batch_size=1000) as batcher:
        futures = [batcher.submit(1) for _ in range(10)]
        with batcher._pool.lock:
            batcher._pool.drop(futures)
            assert not any(future.done() for future in futures)
        last = batcher.submit(2)
        wait(futures, 10)  # a worker's thread may be withdrawing some of them
        assert all(future.cancelled() for future in futures) and not last.done()


def test_a_callback_that_brings_more_than_there_is_room_for_is_told_so() -> None:
    told: list[str] = []
    over = threading.Event()

    def more(future: Any) -> None:
        try:
            for number in range(4):
                batcher.submit(number)
        except RejectedError as error:
            told.append(error.reason)
        over.set()

    with Batcher(doubled, max_queue=2, max_batch_size=1) as batcher:
        batcher.submit(1).add_done_callback(more)
        assert over.wait(10) and told == ["queue_full"]


class Shared:
    @batch(grouping=FairShare({"a": 3.0}), strategy="static", max_batch_size=2)
    def double(self, items: list[int]) -> list[int]:
        return doubled(items)


def test_instances_share_no_grouping() -> None:
    one, other = Shared(), Shared()
    futures = [
        each.double.submit(number, tenant="ab"[number % 2]) for number in range(10) for each in (one, other, one, other)
    ]
    assert [future.result(10) for future in futures] == [2 * number for number in range(10) for _ in range(4)]
    one.double.close()
    other.double.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_closes_nothing() -> None:
    async def slowly(items: list[int]) -> list[int]:
        return doubled(items)

    with Batcher(slowly) as batcher:
        assert batcher.call(3) == 6
        child = os.fork()
        if not child:
            batcher.close()
            os._exit(0)
        until = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert ended == (child, 0) and batcher.call(4) == 8


def test_at_the_end_of_the_interpreter_a_call_in_a_process_runs_once(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        textwrap.dedent("""
        import time

        def slow(items):
            with open("log", "a") as log:
                log.write("begins ")
            time.sleep(0.7)
            with open("log", "a") as log:
                log.write("ends ")
            return items
        """)
    )
    main = "import time, work; from runtime import Batcher; b = Batcher(work.slow, processes=True); b.submit(1); time.sleep({})"
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    script = main.format("3")  # the process has started by then, and ended its call
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=found, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "begins ends "
    (tmp_path / "log").unlink()
    waits = main.replace(
        "time.sleep({})", "[time.sleep(0.01) for _ in iter(lambda: __import__('os').path.exists('log'), True)]"
    )
    subprocess.run([sys.executable, "-c", waits], cwd=tmp_path, env=found, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "begins ends "


@pytest.mark.parametrize("ends", ["in the function", "by a breakdown"])
def test_no_event_loop_is_left(ends: str) -> None:
    def loops() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.endswith(" loop")}

    async def closing(items: list[int]) -> list[int]:
        if ends == "in the function":
            made[0].close()
        return doubled(items)

    before, made = loops(), [Batcher(closing)]
    assert made[0].call(3) == 6
    if ends == "by a breakdown":
        made[0]._pool._break_down(ZeroDivisionError("of the strategy"))
    for thread in made[0]._pool.threads():
        thread.join(10)
    made.clear()
    gc.collect()
    until = time.monotonic() + 10
    while loops() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not loops() - before


class TwoWords(Exception):
    """Can be written, and not read."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_an_exception_that_cannot_be_read_is_told_in_words() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoWords("a", "b")))
    found = _readable(TwoWords("a", "b"))
    assert isinstance(found, RuntimeError) and str(found) == "TwoWords: a b"
    plain = ValueError("x")
    assert _readable(plain) is plain


def test_map_raises_what_is_no_exception_too() -> None:
    def cancelled(items: list[int]) -> list[Any]:
        return [asyncio.CancelledError() if item == 1 else item for item in items]

    with Batcher(cancelled) as batcher, pytest.raises((asyncio.CancelledError, CancelledError)):
        list(batcher.map([0, 1, 2]))


def test_a_stream_whose_worker_dies_repeats_nothing() -> None:
    calls = 0

    def stream(items: list[int]) -> Any:
        nonlocal calls
        calls += 1
        yield ["a" for _ in items]
        yield ["b" for _ in items]
        if calls == 1:
            raise SystemExit
        yield ["c" for _ in items]

    with Batcher(stream) as batcher:
        future = batcher.submit(1)
        given = []
        with pytest.raises(StepFailedError, match="its worker died after its first outputs"):
            given += [output for output in future]
            future.result(10)
        assert calls == 1
        assert batcher.submit(2).result(10) == ["a", "b", "c"]
