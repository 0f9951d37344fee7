"""Waiting for room in a full queue: one item, one record, one timeout, however often it is tried."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from runtime import Batcher, FinishReason
from runtime.errors import RejectedError, RequestTimeoutError
from tests.fakes import Records
from tests.unit.batcher_doubles import Gated

STOP, TIMEOUT, CANCELLED = FinishReason.STOP, FinishReason.TIMEOUT, FinishReason.CANCELLED


async def test_awaiting_room_is_no_rejection() -> None:
    fn, heard = Gated(), Records()
    fn.gate.release(100)
    b = Batcher(fn, max_batch_size=1, max_queue=2)
    b.subscribe(heard)
    assert await asyncio.gather(*[b(i, request_id=f"r{i}") for i in range(20)]) == list(range(20))
    await b.aclose()
    assert Counter((r.id, r.reason) for r in heard.requests) == {(f"r{i}", STOP): 1 for i in range(20)}


def test_map_that_waits_for_room_is_no_rejection() -> None:
    fn, heard = Gated(), Records()
    fn.gate.release(100)
    with Batcher(fn, max_batch_size=1, max_queue=2, when_full="reject") as b:
        b.subscribe(heard)
        assert list(b.map(range(20))) == list(range(20))
    assert Counter(r.reason for r in heard.requests) == {STOP: 20}


def test_map_waits_while_the_queue_is_full_of_others() -> None:
    fn, heard = Gated(), Records()
    with Batcher(fn, max_batch_size=1, max_queue=1, when_full="reject") as b:
        b.submit(0)
        fn.entered.acquire()
        b.submit(1)
        b.subscribe(heard)
        found: list[int] = []
        mapping = threading.Thread(target=lambda: found.extend(b.map([2, 3])))
        mapping.start()
        with pytest.raises(RejectedError, match="max_queue is 1"):
            b.submit(9)
        fn.gate.release(4)
        mapping.join(30)
        assert found == [2, 3]
    assert [r.cause for r in heard.requests if r.reason is FinishReason.REJECTED] == ["queue_full"]


async def full() -> tuple[Gated, Records, Batcher[int, int], list[asyncio.Task[int]]]:
    """A batcher with one item being served and one waiting, which is all it has room for."""
    fn, heard = Gated(), Records()
    b = Batcher(fn, max_batch_size=1, max_queue=1)
    b.subscribe(heard)
    tasks = [asyncio.create_task(b(i)) for i in range(2)]
    while b.view().waiting < 1:
        await asyncio.sleep(0.001)
    return fn, heard, b, tasks


async def test_a_timeout_holds_while_an_await_waits_for_room() -> None:
    fn, heard, b, tasks = await full()
    with pytest.raises(RequestTimeoutError):
        await asyncio.wait_for(b(9, timeout_s=0.05, request_id="late"), 30)
    until = time.monotonic() + 30
    while not heard.requests and time.monotonic() < until:  # listeners hear of it from a thread of their own
        await asyncio.sleep(0.01)
    assert [(r.id, r.reason) for r in heard.requests] == [("late", TIMEOUT)]
    fn.gate.release(2)
    assert await asyncio.gather(*tasks) == [0, 1]
    await b.aclose()
    assert fn.calls == [[0], [1]] and len(heard.requests) == 3


def test_a_timeout_holds_while_a_submit_waits_for_room() -> None:
    fn, heard = Gated(), Records()
    with Batcher(fn, max_batch_size=1, max_queue=1) as b:
        b.subscribe(heard)
        first = b.submit(0)
        fn.entered.acquire()
        second = b.submit(1)
        late = b.submit(2, timeout_s=0.05)  # returns, though there is no room
        with pytest.raises(RequestTimeoutError, match="its timeout passed"):
            late.result(30)
        fn.gate.release(2)
        assert (first.result(30), second.result(30)) == (0, 1)
    assert fn.calls == [[0], [1]]
    assert sorted(r.reason for r in heard.requests) == sorted([TIMEOUT, STOP, STOP])


def test_who_timed_out_outside_is_not_waited_for_any_more() -> None:
    """Nobody is outside once the queue has room: or a static batcher would never again wait for a full call."""
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=1) as b:
        first = b.submit(0)
        fn.entered.acquire()
        second = b.submit(1)
        with pytest.raises(RequestTimeoutError):
            b.submit(2, timeout_s=0.05).result(30)
        assert b._pool.core.state.outside == 1
        fn.gate.release(2)
        assert (first.result(30), second.result(30)) == (0, 1)
        assert b._pool.core.state.outside == 0


async def test_a_task_cancelled_while_it_waits_for_room_has_one_outcome() -> None:
    fn, heard, b, tasks = await full()
    waiting = asyncio.create_task(b(9, timeout_s=0.05, request_id="gone"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.1)  # past its timeout
    assert [(r.id, r.reason) for r in heard.requests] == [("gone", CANCELLED)]
    fn.gate.release(2)
    assert await asyncio.gather(*tasks) == [0, 1]
    await b.aclose()


def test_a_timeout_longer_than_the_platform_can_wait_keeps_time_all_the_same() -> None:
    assert threading.TIMEOUT_MAX < 1e10
    fn = Gated()
    with Batcher(fn, max_batch_size=1) as b:
        first = b.submit(0, timeout_s=1e10)
        fn.entered.acquire()
        with pytest.raises(RequestTimeoutError):
            b.submit(1, timeout_s=0.05).result(30)
        fn.gate.release()
        assert first.result(30) == 0
