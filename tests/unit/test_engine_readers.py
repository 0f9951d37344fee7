"""Readers that stop reading, forgotten streams, closed event loops: nobody waits for them, and nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runtime import (
    FinishReason,
    RequestCancelledError,
)
from runtime.llm.stream import Stream
from tests.engines import bench


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


def test_a_wait_that_is_collected_under_the_lock_holds_nobody_up() -> None:
    """Left behind by a closed event loop, it ends in whatever thread allocates next, such as one that holds the lock."""
    with bench() as b:
        (stream,) = b.decoding(1)
        buffer = stream._buffer
        waits = buffer.wait_async(None)
        loop = asyncio.new_event_loop()

        async def begins() -> None:
            waits.send(None)

        loop.run_until_complete(begins())
        loop.close()

        def collects() -> None:
            with buffer._lock:
                waits.close()

        thread = threading.Thread(target=collects, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()


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


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_goes_on_reading_after_an_event_loop_that_gave_up(waits: bool) -> None:
    """``waits``: it waited all the while."""
    with bench() as b:
        b.executor.hold()
        stream = b.engine.submit("a", max_tokens=20)
        b.held()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(len(stream.result(timeout=30).token_ids)))
        if waits:
            thread.start()
            while not stream._buffer._gates:
                time.sleep(0.001)

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.aresult(), 0.01)

        asyncio.run(impatient())
        if not waits:
            thread.start()
            while not stream._buffer._gates:
                time.sleep(0.001)
        b.executor.go()
        thread.join(timeout=30)
        assert found == [20]


def test_a_thread_that_reads_a_backlog_is_a_reader_whatever_event_loop_was_one() -> None:
    with bench() as b:
        (stream,) = b.decoding(1, max_tokens=20)
        loop = asyncio.new_event_loop()
        with pytest.raises(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(stream.aresult(), 0.01))
        tokens = iter(stream)
        next(tokens)  # one that has come
        loop.close()
        b.step()
        b.executor.go()
        assert len(list(tokens)) == 19


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


@pytest.mark.parametrize("behind", [False, True])
def test_a_stream_goes_on_in_one_event_loop_though_another_was_closed_that_waited_for_it(behind: bool) -> None:
    """``behind``: the reader in the other loop has a backlog, and does not wait when the next token comes."""
    with bench() as b:
        (stream,) = b.decoding(1, max_tokens=20)
        gone = asyncio.new_event_loop()
        task = gone.create_task(stream.aresult())
        gone.run_until_complete(asyncio.sleep(0))  # it waits now
        gone.close()

        async def read() -> int:
            reader, found = stream.__aiter__(), 0
            if behind:
                await anext(reader)  # one that has come
                b.step()
                found = 1
            b.executor.go()
            async for _ in reader:
                await asyncio.sleep(0.001)
                found += 1
            return found

        assert asyncio.run(read()) == 20
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()  # type: ignore[union-attr]


def test_an_event_loop_that_ends_while_nobody_waits_leaves_the_request_to_who_holds_it() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=20)[0]

        async def first() -> object:
            reader = stream.__aiter__()
            b.executor.step()
            kept.append(reader)
            return await reader.__anext__()

        kept: list[object] = []
        asyncio.run(first())
        b.step()
        b.executor.go()
        assert len(stream.result(timeout=30).token_ids) == 20
        assert b.heard.request().reason is FinishReason.LENGTH


def test_a_wait_that_was_given_up_leaves_the_request_though_its_event_loop_ends() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=20)[0]

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.aresult(), 0.01)

        asyncio.run(impatient())
        b.step()  # a token comes in between
        b.step()
        b.executor.go()
        assert len(stream.result(timeout=30).token_ids) == 20


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
