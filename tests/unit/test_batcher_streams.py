"""Functions that stream: items whose outputs end one by one, and calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from runtime import Batcher, FinishReason
from runtime.batching.future import StreamFuture
from runtime.batching.invoke import END
from runtime.batching.item import Call
from runtime.errors import RequestTimeoutError
from tests.fakes import Records


class Ticks:
    """Streams for ever, one output for each permit; says when it was closed."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.yielded = threading.Semaphore(0)
        self.closed = threading.Event()

    def __call__(self, items: list[Any]) -> Iterator[list[Any]]:
        try:
            while True:
                assert self.permits.acquire(timeout=30)
                yield items
                self.yielded.release()
        finally:
            self.closed.set()

    async def in_loop(self, items: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                while not self.permits.acquire(blocking=False):
                    await asyncio.sleep(0.001)
                yield items
                self.yielded.release()
        finally:
            self.closed.set()


@pytest.mark.parametrize("kind", ["__call__", "in_loop"])
def test_a_generator_is_closed_when_all_its_items_have_timed_out(kind: str) -> None:
    ticks = Ticks()
    with Batcher(getattr(ticks, kind)) as b:
        future = b.submit(1, timeout_s=0.05)
        with pytest.raises(RequestTimeoutError):
            future.result(30)
        ticks.permits.release()  # it comes back with outputs that nobody wants
        assert ticks.closed.wait(30)


@pytest.mark.parametrize("kind", ["__call__", "in_loop"])
def test_a_running_stream_can_be_cancelled_and_the_others_go_on(kind: str) -> None:
    ticks, heard = Ticks(), Records()
    with Batcher(getattr(ticks, kind), strategy="static", max_batch_size=2) as b:
        b.subscribe(heard)
        one, two = b.submit(1, request_id="one"), b.submit(2, request_id="two")
        assert isinstance(two, StreamFuture)
        ticks.permits.release()
        ticks.yielded.acquire()
        assert one.cancel() and one.cancelled() and not ticks.closed.is_set()
        ticks.permits.release()
        ticks.yielded.acquire()
        assert two.outputs == [2, 2]
        assert two.cancel()
        ticks.permits.release()
        assert ticks.closed.wait(30)
        with pytest.raises(CancelledError):
            list(two)
    assert [(r.id, r.reason) for r in heard.requests] == [
        ("one", FinishReason.CANCELLED),
        ("two", FinishReason.CANCELLED),
    ]


async def test_cancelling_the_task_that_iterates_stops_the_stream() -> None:
    ticks = Ticks()
    b = Batcher(ticks)
    got = asyncio.Event()

    async def read() -> None:
        async for _ in b.submit(1):  # type: ignore[attr-defined]
            got.set()

    task = asyncio.create_task(read())
    ticks.permits.release()
    await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ticks.permits.release()
    assert await asyncio.to_thread(ticks.closed.wait, 30)
    await b.aclose()


def test_an_exception_in_a_slot_ends_that_items_stream_alone() -> None:
    def stream(items: list[int]) -> Iterator[list[Any]]:
        for turn in range(3):
            yield [ValueError("mine") if item == 1 and turn else turn for item in items]

    heard = Records()
    with Batcher(stream, strategy="static", max_batch_size=2) as b:
        b.subscribe(heard)
        bad, good = b.submit(1, request_id="bad"), b.submit(2, request_id="good")
        assert good.result(30) == [0, 1, 2]
        outputs = iter(bad)  # type: ignore[call-overload]
        assert next(outputs) == 0
        with pytest.raises(ValueError, match="mine"):
            next(outputs)
    assert [(r.id, r.reason, r.output_tokens) for r in heard.requests] == [
        ("bad", FinishReason.ERROR, 1),
        ("good", FinishReason.STOP, 3),
    ]
    assert heard.steps[0].failed == 1 and heard.steps[0].sampled == 1


@pytest.mark.parametrize(("sign", "failed"), [(RuntimeError("own"), 2), (END, 1)], ids=["failed", "well"])
def test_an_item_that_has_ended_is_not_counted_again_when_the_call_fails(sign: Any, failed: int) -> None:
    def stream(items: list[int]) -> Iterator[list[Any]]:
        yield [sign, *[1] * (len(items) - 1)]
        raise ValueError("mid")

    heard = Records()
    with Batcher(stream, strategy="static", max_batch_size=2) as b:
        b.subscribe(heard)
        first, second = b.submit(1), b.submit(2)
        assert second.exception(30).args == ("mid",)
        assert first.exception(30) is (None if sign is END else sign)
    [call] = heard.steps
    assert (call.chunks, call.failed, call.sampled) == (2, failed, 2 - failed)
    assert [r.reason for r in heard.requests].count(FinishReason.ERROR) == failed


def test_nothing_is_learned_from_a_call_that_raised_whoever_had_left_it() -> None:
    gate = threading.Event()

    def function(items: list[int]) -> list[int]:
        assert gate.wait(30)
        raise ValueError("all")

    calls: list[Call] = []
    with Batcher(function, strategy="static", max_batch_size=2) as b:
        observe = b.strategy.observe
        b.strategy.observe = lambda call, state: (calls.append(call), observe(call, state))[1]  # type: ignore[method-assign]
        late, stays = b.submit(1, timeout_s=0.05), b.submit(2)
        with pytest.raises(RequestTimeoutError):
            late.result(30)
        gate.set()
        with pytest.raises(ValueError, match="all"):
            stays.result(30)
    [call] = calls
    assert call.failed == 1 and not call.informative


def test_a_short_items_stream_ends_before_the_longest_does() -> None:
    gate = threading.Event()

    def stream(items: list[int]) -> Iterator[list[Any]]:
        yield [0 for _ in items]
        yield [END if item == 1 else 1 for item in items]
        assert gate.wait(30)
        yield [2 for _ in items]

    with Batcher(stream, strategy="static", max_batch_size=2) as b:
        short, long = b.submit(1), b.submit(3)
        assert short.result(30) == [0] and not long.done()
        gate.set()
        assert long.result(30) == [0, 1, 2] and short.result() == [0]


def test_a_stream_that_ends_for_all_is_over() -> None:
    def stream(items: list[int]) -> Iterator[list[Any]]:
        yield [END for _ in items]
        raise AssertionError("nobody waits")

    with Batcher(stream) as b:
        assert b(1) == []


def test_a_stream_that_fails_before_its_first_output_is_halved() -> None:
    calls: list[list[int]] = []

    def stream(items: list[int]) -> Iterator[list[int]]:
        calls.append(items)
        if 3 in items:
            raise ValueError("three")
        if len(items) > 2:
            raise MemoryError
        yield items
        if 1 in items:
            raise OSError("late")

    with Batcher(stream, strategy="static", max_batch_size=8, isolate=True) as b:
        futures = [b.submit(i) for i in range(8)]
        found = [f.exception(30) for f in futures]
    assert isinstance(found[3], ValueError)
    assert [i for i, error in enumerate(found) if isinstance(error, OSError)] == [
        0,
        1,
    ]  # they had outputs: not run again
    assert [f.result() for f in futures[4:]] == [[4], [5], [6], [7]] and futures[2].result() == [2]
    assert calls.count([0, 1]) == 1
