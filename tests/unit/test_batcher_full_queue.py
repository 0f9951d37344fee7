"""Waiting for room in a full queue: one item, one record, one timeout, however often it is tried."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from functools import partial

import pytest

from runtime import Batcher, FinishReason
from runtime.batching.item import Item
from runtime.batching.strategies import Dynamic
from runtime.batching.strategies.protocol import Decision, State
from runtime.errors import RejectedError, RequestTimeoutError
from tests.fakes import Records
from tests.unit.batcher_doubles import Gated
from tests.waiting import until

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


def stands(b: Batcher[int, int], waiting: int, in_line: int) -> bool:
    """Whether so many items are in the queue, and so many in line before it."""
    with b._pool.lock:
        return (b._pool.core.state.waiting, len(b._pool._backpressure._line)) == (waiting, in_line)


async def test_newcomers_stand_behind_the_tasks_that_were_held_back() -> None:
    """The place of the one that goes into a call is given to who has waited longest, so there is none for who comes now."""
    fn = Gated()
    b = Batcher(fn, max_batch_size=1, max_queue=8)
    tasks = [asyncio.create_task(b(0))]
    await asyncio.to_thread(until, lambda: fn.calls)
    tasks += [asyncio.create_task(b(i)) for i in range(1, 12)]
    await asyncio.to_thread(until, partial(stands, b, 8, 3))
    fn.gate.release()
    await asyncio.to_thread(until, partial(stands, b, 8, 2))
    with pytest.raises(RejectedError, match="max_queue is 8"):
        b.submit(99)  # in an event loop it must not wait
    tasks.append(asyncio.create_task(b(12)))
    await asyncio.to_thread(until, partial(stands, b, 8, 3))
    fn.gate.release(20)
    assert await asyncio.gather(*tasks) == list(range(13))
    await b.aclose()
    assert fn.calls == [[i] for i in range(13)] and stands(b, 0, 0)


def test_newcomers_stand_behind_the_threads_that_were_held_back() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=2) as b:
        futures = [b.submit(0)]
        fn.entered.acquire()
        futures += [b.submit(1), b.submit(2)]
        threads = [threading.Thread(target=lambda i=i: futures.append(b.submit(i))) for i in range(3, 8)]
        for in_line, thread in enumerate(threads, 1):
            thread.start()
            until(partial(stands, b, 2, in_line))
        fn.gate.release(20)
        for thread in threads:
            thread.join(30)
        assert sorted(future.result(30) for future in futures) == list(range(8))
    assert [call[0] for call in fn.calls] == list(range(8))


def test_nobody_starves_behind_callers_that_never_stop() -> None:
    """A caller in line beside eight that submit again and again: it is in after a queue's length of calls."""
    fn = Gated()
    done = threading.Event()
    with Batcher(fn, max_batch_size=1, max_queue=2) as b:
        threads = [threading.Thread(target=keep_submitting, args=(b, done)) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(partial(stands, b, 2, 8))
        held = threading.Thread(target=b.submit, args=(1,))
        held.start()
        until(partial(stands, b, 2, 9))
        fn.gate.release(1 + 2 + 8)
        until(lambda: [1] in fn.calls)
        assert fn.calls.index([1]) <= 1 + 2 + 8
        done.set()
        fn.gate.release(100)
        for thread in [*threads, held]:
            thread.join(30)
            assert not thread.is_alive()


def keep_submitting(b: Batcher[int, int], done: threading.Event) -> None:
    while not done.is_set():
        b.submit(0)


async def test_who_gives_up_waiting_holds_nobody_back() -> None:
    fn, _, b, tasks = await full()
    held = [asyncio.create_task(b(i)) for i in range(2, 5)]
    await asyncio.to_thread(until, partial(stands, b, 1, 3))
    for one in held[:2]:
        one.cancel()
    await asyncio.wait(held[:2])
    assert stands(b, 1, 1)
    fn.gate.release(4)
    assert await asyncio.gather(*tasks, held[2]) == [0, 1, 4]
    assert await asyncio.wait_for(b(5), 30) == 5
    await b.aclose()


def test_tasks_of_a_loop_that_stopped_hold_nobody_back() -> None:
    """They stand in line, and will never see that they are in."""
    fn = Gated()
    b = Batcher(fn, max_batch_size=1, max_queue=1)
    loop = asyncio.new_event_loop()

    async def fill() -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(b(i)) for i in range(4)]
        await asyncio.to_thread(until, partial(stands, b, 1, 2))
        return tasks

    tasks = loop.run_until_complete(fill())
    fn.gate.release(10)
    assert [b.submit(i).result(30) for i in range(4, 7)] == [4, 5, 6]
    assert loop.run_until_complete(asyncio.gather(*tasks)) == [0, 1, 2, 3]
    loop.close()
    b.close()


def test_who_timed_out_in_line_is_not_waited_for_any_more() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=1) as b:
        first = b.submit(0)
        fn.entered.acquire()
        second = b.submit(1)
        with pytest.raises(RequestTimeoutError):
            b.submit(2, timeout_s=0.05).result(30)
        assert stands(b, 1, 0)
        fn.gate.release(2)
        assert (first.result(30), second.result(30)) == (0, 1)


@pytest.mark.parametrize("drain", [True, False])
async def test_a_close_turns_away_all_that_stand_in_line(drain: bool) -> None:
    fn, heard, b, tasks = await full()
    task = asyncio.create_task(b(2, request_id="task"))
    await asyncio.to_thread(until, partial(stands, b, 1, 1))
    thread = asyncio.create_task(asyncio.to_thread(b.submit, 3, request_id="thread"))
    await asyncio.to_thread(until, partial(stands, b, 1, 2))
    closing = asyncio.create_task(b.aclose(drain))
    for each in (task, thread):
        with pytest.raises(RejectedError, match="the batcher is closed") as refused:
            await asyncio.wait_for(each, 30)
        assert refused.value.reason == "closed"
    fn.gate.release(2)
    await closing
    await asyncio.wait(tasks)
    found = {r.id: (r.reason, r.cause) for r in heard.requests if r.id in ("task", "thread")}
    assert found == {"task": (FinishReason.REJECTED, "closed"), "thread": (FinishReason.REJECTED, "closed")}


class Choosy(Dynamic):
    """Takes in no item that came to a full queue."""

    def admit(self, item: Item, state: State) -> float | None:
        return 7.0 if item.held else super().admit(item, state)


async def test_who_is_refused_at_its_place_hears_of_it() -> None:
    """By the strategy, once there is room: a task from its await, a thread from its submit; the next takes the place."""
    fn, heard = Gated(), Records()
    b = Batcher(fn, strategy=Choosy(), max_batch_size=1, max_queue=1)
    b.subscribe(heard)
    tasks = [asyncio.create_task(b(0))]
    await asyncio.to_thread(until, lambda: fn.calls)
    tasks.append(asyncio.create_task(b(1)))
    await asyncio.to_thread(until, partial(stands, b, 1, 0))
    task = asyncio.create_task(b(2, request_id="task"))
    await asyncio.to_thread(until, partial(stands, b, 1, 1))
    thread = asyncio.create_task(asyncio.to_thread(b.submit, 3, request_id="thread"))
    await asyncio.to_thread(until, partial(stands, b, 1, 2))
    fn.gate.release(1)
    for each in (task, thread):
        with pytest.raises(RejectedError, match="deadline cannot be met") as refused:
            await asyncio.wait_for(each, 30)
        assert (refused.value.reason, refused.value.retry_after_s) == ("slo", 7.0)
    fn.gate.release(2)
    assert await asyncio.gather(*tasks, b(4)) == [0, 1, 4]
    await b.aclose()
    assert Counter((r.reason, r.cause) for r in heard.requests) == {(STOP, ""): 3, (FinishReason.REJECTED, "slo"): 2}


class Breaks(Dynamic):
    broken = False

    def decide(self, state: State) -> Decision:
        if self.broken:
            raise RuntimeError("boom")
        return super().decide(state)


async def test_a_breakdown_leaves_nobody_in_line_without_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker ends its call before the first one has closed the batcher."""
    fn, strategy = Gated(), Breaks()
    b = Batcher(fn, strategy=strategy, max_batch_size=1, max_queue=2, replicas=2)
    stop, stopping = b._pool.stop, threading.Event()

    def slowly(drain: bool) -> None:
        fn.gate.release()
        stopping.wait(0.2)
        stop(drain)

    monkeypatch.setattr(b._pool, "stop", slowly)
    tasks = [asyncio.create_task(b(i)) for i in range(2)]
    await asyncio.to_thread(until, lambda: len(fn.calls) == 2)
    tasks += [asyncio.create_task(b(i)) for i in range(2, 10)]
    await asyncio.to_thread(until, partial(stands, b, 2, 6))
    strategy.broken = True
    fn.gate.release()
    done, pending = await asyncio.wait(tasks, timeout=30)
    assert not pending and stands(b, 0, 0)
    assert sum(task.exception() is None for task in done) == 2
    await asyncio.wait_for(b.aclose(), 30)


def test_who_is_interrupted_as_it_gets_its_place_gives_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=1) as b:
        futures = [b.submit(0)]
        fn.entered.acquire()
        futures.append(b.submit(1))
        wait = b._pool._backpressure.wait

        def interrupted(item: Item) -> None:
            if item.payload == 2:
                monkeypatch.undo()
                b._pool.core.forget(item)
                b._pool._backpressure.leave(item)
                b._pool.core.forget(futures[1].item)  # whose place it had
                raise KeyboardInterrupt
            wait(item)

        monkeypatch.setattr(b._pool._backpressure, "wait", interrupted)
        thread = threading.Thread(target=lambda: futures.append(b.submit(3)))
        thread.start()
        until(partial(stands, b, 1, 1))
        with pytest.raises(KeyboardInterrupt):
            b.submit(2)
        assert stands(b, 1, 0)
        thread.join(30)
        fn.gate.release(3)
        assert futures[2].result(30) == 3


def test_everybody_in_line_has_one_outcome() -> None:
    """Threads and tasks, of which some time out and some are cancelled, at a queue of three."""
    heard = Records()
    answered = Counter[str]()

    def fn(items: list[int]) -> list[int]:
        time.sleep(0.0005)
        return items

    b = Batcher(fn, max_batch_size=2, max_queue=3)
    b.subscribe(heard)

    def thread(first: int) -> None:
        for i in range(first, first + 40):
            try:
                assert b.call(i, request_id=str(i), timeout_s=0.002 if i % 7 == 0 else None) == i
                answered["answered"] += 1
            except RequestTimeoutError:
                answered["timed out"] += 1

    async def task(i: int) -> None:
        try:
            assert await asyncio.wait_for(b(i, request_id=str(i)), 0.01 if i % 5 == 0 else None) == i
            answered["answered"] += 1
        except TimeoutError:
            answered["cancelled"] += 1

    async def tasks() -> None:
        await asyncio.gather(*[task(i) for i in range(1000, 1200)])

    threads = [threading.Thread(target=thread, args=(100 * n,)) for n in range(4)]
    for each in threads:
        each.start()
    asyncio.run(tasks())
    for each in threads:
        each.join(60)
    b.close()
    assert answered.total() == 4 * 40 + 200
    assert len({r.id for r in heard.requests}) == len(heard.requests) == 4 * 40 + 200
    assert stands(b, 0, 0)


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
