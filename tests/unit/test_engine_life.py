"""How requests and engines end: cancel, timeout, close, forgotten streams, closed event loops, a dead thread. No hang."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime import (
    EngineClosedError,
    FinishReason,
    Knobs,
    RejectedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)
from runtime.clock import MonotonicClock
from runtime.llm.engine import Engine
from runtime.llm.stream import Stream
from runtime.request import Sequence
from tests.engines import Bench, bench
from tests.fakes import FakeExecutor, FakeModel

# -- one request --------------------------------------------------------------------------------------------------------


def in_the_inbox(b: Bench) -> Stream:
    b.decoding(1)
    return b.engine.submit("a", max_tokens=50)


def waiting(b: Bench) -> Stream:
    b.engine.set_knobs(Knobs(max_batch_size=1))
    b.others = b.decoding(1)  # type: ignore[attr-defined]
    stream = b.engine.submit("a", max_tokens=50)
    b.step()
    return stream


def prefilling(b: Bench) -> Stream:
    b.engine.set_knobs(Knobs(chunk_size=2))
    b.executor.hold()
    stream = b.engine.submit("abcdefgh", max_tokens=50)
    b.held()
    b.step()
    return stream


def decoding(b: Bench) -> Stream:
    return b.decoding(1)[0]


def preempted(b: Bench) -> Stream:
    b.executor.hold()
    old = b.others = b.engine.submit(list(range(30)), max_tokens=64)  # type: ignore[attr-defined]
    b.held()
    new = b.engine.submit(list(range(100, 130)), max_tokens=64)
    while not any(plan.preemptions for plan in b.executor.plans):
        b.step()
    assert b.executor.plans[-1].n_decode == 1 and not old.done
    return new


STATES = [in_the_inbox, waiting, prefilling, decoding, preempted]


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(state: Callable[[Bench], Stream]) -> None:
    with bench(kv_tokens=96) as b:
        stream = state(b)
        had = len(stream.token_ids)
        assert b.engine.cancel(stream.request_id)
        b.executor.go()
        with pytest.raises(RequestCancelledError, match=f"request {stream.request_id} was cancelled"):
            stream.result(timeout=30)
        assert stream.record is not None and stream.record.reason is FinishReason.CANCELLED
        assert had <= len(stream.token_ids) <= had + 1
        assert not b.engine.cancel(stream.request_id)
        assert b.engine.submit("a", max_tokens=2).result(timeout=30).text == "bc"


class ClockThatJumps(MonotonicClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.parametrize("state", STATES)
def test_timeout_in_every_state(state: Callable[[Bench], Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, submit = ClockThatJumps(), Engine.submit
    monkeypatch.setattr("runtime.llm.engine.MonotonicClock", lambda: clock)
    monkeypatch.setattr(Engine, "submit", lambda self, *a, **k: submit(self, *a, **{"timeout_s": 1000.0, **k}))
    with bench(kv_tokens=96) as b:
        stream = state(b)
        clock.ahead = 1001.0
        b.executor.go()
        with pytest.raises(RequestTimeoutError, match=f"request {stream.request_id} timed out after 1001"):
            stream.result(timeout=30)
        assert stream.record is not None and stream.record.reason is FinishReason.TIMEOUT


def test_timeout_of_a_request_that_only_waits() -> None:
    """Nothing runs, so the engine itself must wake up for it."""
    with bench(knobs=Knobs(max_wait_ms=10000)) as b:
        stream = b.engine.submit("a", timeout_s=0.05)
        with pytest.raises(RequestTimeoutError):
            stream.result(timeout=5)
        assert not b.executor.plans
        assert b.heard.request().reason is FinishReason.TIMEOUT


def test_a_deadline_cancels_nothing() -> None:
    with bench() as b:
        assert b.engine.submit("a", max_tokens=3, deadline_s=1e-9).result(timeout=30).text == "bcd"


def test_cancelling_what_has_ended() -> None:
    with bench() as b:
        stream = b.engine.submit("a", max_tokens=2)
        assert stream.result(timeout=30).text == "bc"
        stream.cancel()
        assert not b.engine.cancel(stream.request_id) and not b.engine.cancel("nobody")
        assert b.engine.submit("a", max_tokens=1).result(timeout=30)
        assert stream.result().text == "bc" and [e.text for e in stream] == ["b", "c"]


def test_result_times_out_and_the_request_goes_on() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=5)[0]
        with pytest.raises(TimeoutError, match=r"has not finished within 0\.01 s"):
            stream.result(timeout=0.01)
        b.executor.go()
        assert stream.result(timeout=30).token_ids == (1, 2, 3, 4, 5)


def test_tokens_before_a_fault_are_delivered() -> None:
    def sample(sequence: Sequence) -> int:
        if len(sequence.output) == 3:
            raise ZeroDivisionError("three")
        return 65

    with bench(sample) as b:
        stream = b.engine.submit("x", max_tokens=9)
        got = []
        with pytest.raises(StepFailedError, match="failed after 3 tokens: ZeroDivisionError: three") as caught:
            for event in stream:
                got.append(event.text)
        assert got == ["A"] * 3 and isinstance(caught.value.__cause__, ZeroDivisionError)
        assert b.heard.request().cause == "ZeroDivisionError: three"


# -- readers that stop reading ------------------------------------------------------------------------------------------


def test_a_consumer_that_stops_reading_holds_up_nobody() -> None:
    with bench() as b:
        idle = b.engine.stream("a", max_tokens=200)
        reader = iter(idle)
        next(reader)
        assert b.engine.submit("b", max_tokens=100).result(timeout=30)
        while not idle.done:
            b.heard.request()
        assert len(idle.token_ids) == 200
        assert len(list(reader)) == 199


def forget(stream: Stream) -> None:
    pass


def break_out(stream: Stream) -> Any:
    for _ in stream:
        break
    return stream


def leave_block(stream: Stream) -> Any:
    with stream:
        return stream


def raise_inside(stream: Stream) -> Any:
    try:
        for _ in stream:
            raise KeyError
    except KeyError:
        return stream


def close_iterator(stream: Stream) -> Any:
    reader = iter(stream)
    next(reader)
    reader.close()
    return stream, reader


def break_out_async(stream: Stream) -> Any:
    async def read() -> None:
        async for _ in stream:
            break

    asyncio.run(read())
    return stream


@pytest.mark.parametrize("leave", [forget, leave_block, break_out, raise_inside, close_iterator, break_out_async])
def test_leaving_a_stream_cancels_its_request(leave: Callable[[Stream], Any]) -> None:
    with bench() as b:
        b.executor.hold()
        streams = [b.engine.stream("a", max_tokens=200)]
        b.held()
        b.step()  # there is one token to read, and the engine stands still
        kept = leave(streams.pop())
        b.executor.go()
        record = b.heard.request()
        assert record.reason is FinishReason.CANCELLED and record.output_tokens <= 2
        del kept


def test_a_forgotten_cycle_is_cancelled_too() -> None:
    with bench() as b:
        b.executor.hold()
        cycle: list[Any] = [b.engine.stream("a", max_tokens=200)]
        cycle.append(cycle)
        b.held()
        del cycle
        gc.collect()
        b.executor.go()
        assert b.heard.request().reason is FinishReason.CANCELLED


# -- event loops --------------------------------------------------------------------------------------------------------


def test_an_event_loop_that_ends() -> None:
    """Its readers wait for ever; the engine notices, cancels their requests and goes on."""
    with bench() as b:
        other = b.decoding(1, max_tokens=100)[0]
        loop = asyncio.new_event_loop()
        streams = [b.engine.astream("a", max_tokens=200) for _ in range(3)]

        async def read(stream: Stream) -> None:
            async for _ in stream:
                pass

        tasks = [loop.create_task(read(stream)) for stream in streams]
        loop.run_until_complete(asyncio.sleep(0))  # they wait now
        loop.close()
        b.executor.go()
        assert other.result(timeout=30)
        records = [b.heard.request() for _ in range(4)]
        lost = [r for r in records if r.reason is FinishReason.CANCELLED]
        assert len(lost) == 3 and {r.cause for r in lost} == {"its event loop was closed"}
        for task in tasks:  # a loop that is gone cannot end its tasks; drop them without its complaint
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.get_coro().close()  # type: ignore[union-attr]


def test_an_event_loop_that_ends_while_nobody_waits() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=200)[0]

        async def first() -> object:
            reader = stream.__aiter__()
            b.executor.step()
            kept.append(reader)
            return await reader.__anext__()

        kept: list[object] = []
        asyncio.run(first())
        b.executor.go()
        record = b.heard.request()
        assert (record.reason, record.cause) == (FinishReason.CANCELLED, "its event loop was closed")


async def test_cancelling_a_task_cancels_its_request() -> None:
    with bench() as b:
        b.executor.hold()
        task = asyncio.create_task(b.engine.agenerate("a", max_tokens=200))
        await asyncio.to_thread(b.held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        b.executor.go()
        assert (await asyncio.to_thread(b.heard.request)).reason is FinishReason.CANCELLED


async def test_giving_up_one_wait_leaves_the_request() -> None:
    with bench() as b:
        b.executor.hold()
        stream = b.engine.submit("a", max_tokens=3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.aresult(), 0.01)
        b.executor.go()
        assert (await stream).text == "bcd"


async def test_errors_reach_async_readers() -> None:
    with bench() as b:
        b.executor.hold()
        stream = b.engine.astream("a", max_tokens=200)

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        stream.cancel()
        b.executor.go()
        with pytest.raises(RequestCancelledError):
            await reading
        with pytest.raises(RequestCancelledError):
            await stream


@contextmanager
def goes_on_once_closed(engine: Engine, executor: FakeExecutor) -> Iterator[None]:
    """The step that stands still ends as soon as the engine has been told to close, which the block does."""

    def watch() -> None:
        while not engine.closed:
            left.wait(0.001)
        with engine._loop._lock:  # whoever said so has also put it into the inbox
            executor.go()

    left = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    watcher.join(timeout=30)


# -- the engine ---------------------------------------------------------------------------------------------------------


def test_close_finishes_what_was_accepted() -> None:
    with bench(knobs=Knobs(max_batch_size=2)) as b:
        streams = [b.engine.submit([i], max_tokens=20) for i in range(10)]
        b.engine.close()
        assert all(stream.done and len(stream.result().token_ids) == 20 for stream in streams)
        b.engine.close()
        b.engine.close(drain=False)
        with pytest.raises(RejectedError, match="the engine is closed") as caught:
            b.engine.submit("a")
        assert caught.value.reason == "closed"
        assert b.engine.closed and "closed" in repr(b.engine)


def test_close_without_draining_cancels() -> None:
    with bench(knobs=Knobs(max_batch_size=2)) as b:
        streams = [*b.decoding(2), *(b.engine.submit("a", max_tokens=50) for _ in range(3))]
        with goes_on_once_closed(b.engine, b.executor):
            b.engine.close(drain=False)
        for stream in streams:
            with pytest.raises(RequestCancelledError, match="the engine was closed"):
                stream.result(timeout=30)


def test_close_while_many_are_busy() -> None:
    """Clients in threads and loops; whatever each was doing, it gets an answer or an error, and the engine ends."""
    with bench() as b:
        begun, ends = threading.Semaphore(0), []

        def client(n: int) -> None:
            try:
                while True:
                    begun.release()
                    if n % 2:
                        list(b.engine.stream([n], max_tokens=50))
                    else:
                        asyncio.run(b.engine.agenerate([n], max_tokens=50))
            except (RejectedError, RequestCancelledError) as error:
                ends.append(error)

        clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in clients:
            thread.start()
        for _ in range(30):
            begun.acquire()
        closers = [threading.Thread(target=b.engine.close, args=(n % 2 == 0,)) for n in range(4)]
        for thread in [*closers, *clients]:
            if thread in closers:
                thread.start()
        for thread in [*closers, *clients]:
            thread.join(timeout=30)
            assert not thread.is_alive()
        assert len(ends) == 8


def test_a_second_close_cuts_the_first_short() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=200)[0]
        first = threading.Thread(target=b.engine.close)
        first.start()
        while not b.engine.closed:
            first.join(timeout=0.001)
        b.step()  # it has taken note, and still drains
        second = threading.Thread(target=b.engine.close, args=(False,))
        second.start()
        while b.engine._loop._inbox.empty():  # until the second has said so
            second.join(timeout=0.001)
        b.executor.go()
        first.join(timeout=30)
        with pytest.raises(RequestCancelledError):
            stream.result(timeout=30)


def test_a_block_that_raises_does_not_wait() -> None:
    executor = FakeExecutor()
    engine = Engine(FakeModel(), executor=executor, kv_tokens=512)
    with goes_on_once_closed(engine, executor), pytest.raises(KeyError), engine:
        executor.hold()
        stream = engine.submit("a", max_tokens=200)
        assert executor.held.acquire(timeout=30)
        raise KeyError
    with pytest.raises(RequestCancelledError):
        stream.result(timeout=30)


def test_close_from_a_listener() -> None:
    with bench() as b:
        b.heard.on_step = lambda record: b.engine.close(drain=False)  # type: ignore[method-assign]
        stream = b.engine.submit("a", max_tokens=50)
        with pytest.raises(RequestCancelledError, match="the engine was closed"):
            stream.result(timeout=30)
        b.engine.close()


def test_an_engine_lives_as_long_as_its_streams() -> None:
    stream = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512).submit("a", max_tokens=50)
    gc.collect()
    assert len(stream.result(timeout=30).token_ids) == 50


def test_a_forgotten_engine_stops_its_thread() -> None:
    engine = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512)
    assert engine.submit("a", max_tokens=3).result(timeout=30)
    thread, gone = engine._loop._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del engine, stream, reader"])
def test_a_forgotten_engine_does_not_hold_up_the_interpreter(ending: str) -> None:
    code = f"""
from runtime.clock import MonotonicClock
from runtime.llm.engine import Engine
from tests.fakes import FakeExecutor, FakeModel, Heard
class Says(Heard):
    def on_request(self, record):
        print(record.reason.value)
engine = Engine(FakeModel(max_model_len=10**9), executor=FakeExecutor(), kv_tokens=10**7)
engine.subscribe(Says())
stream = engine.submit("a", max_tokens=9 * 10**6)
reader = iter(stream)
next(reader)
{ending}
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\n", "")


class ThreadDies(BaseException):
    """What nobody catches."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_everybody_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    dying = threading.Event()

    def sample(sequence: Sequence) -> int:
        if dying.is_set():
            raise ThreadDies("out")
        return 65

    executor = FakeExecutor(sample)
    engine = Engine(FakeModel(), executor=executor, kv_tokens=512)
    b = Bench(engine, executor)
    streams = b.decoding(2)
    streams.append(engine.submit("late"))
    errors: list[Exception] = []

    def read(stream: Stream) -> None:
        try:
            list(stream)
        except EngineClosedError as error:
            errors.append(error)

    async def aread() -> None:
        async for _ in streams[0]:
            pass

    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    views: list[object] = []
    asking = threading.Thread(target=lambda: views.append(engine.view()))
    for thread in [*readers, asking]:
        thread.start()
    dying.set()
    executor.go()
    for thread in [*readers, asking]:
        thread.join(timeout=30)
    assert len(errors) == 3 and len(views) == 1
    assert all(isinstance(error.__cause__, ThreadDies) for error in errors)
    with pytest.raises(EngineClosedError, match="the engine stopped: ThreadDies"):
        asyncio.run(aread())
    with pytest.raises(EngineClosedError):
        streams[0].result()
    with pytest.raises(RejectedError, match="the engine stopped: ThreadDies") as caught:
        engine.submit("a")
    assert isinstance(caught.value.__cause__, ThreadDies)
    with pytest.raises(EngineClosedError, match="ThreadDies"):
        engine.set_knobs(Knobs(token_budget=1))
    assert {b.heard.request().reason for _ in range(2)} == {FinishReason.ERROR}
    engine.close()
    assert "the engine's thread died" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_whose_queueing_kills_the_thread_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512)

    def broken(request: object, now: float) -> None:
        raise ThreadDies("in the queue")

    monkeypatch.setattr(engine._core, "add", broken)
    stream = engine.submit("a")
    with pytest.raises(EngineClosedError, match="ThreadDies"):
        stream.result(timeout=30)
    assert not engine.cancel(stream.request_id)
    engine.close()
