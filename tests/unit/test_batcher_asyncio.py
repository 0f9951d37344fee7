"""The batcher in event loops: awaiting, asynchronous functions, streams, back-pressure, and threads at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime import Batcher, batch
from runtime.batching.future import StreamFuture
from runtime.errors import RejectedError, StepFailedError


async def adouble(items: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * item for item in items]


async def test_await_from_a_loop_and_wait_from_threads_at_once() -> None:
    @batch(max_batch_size=16)
    async def embed(items: list[int]) -> list[int]:
        return await adouble(items)

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(embed.submit(i).result() for i in range(100)))
    thread.start()
    assert await asyncio.gather(*[embed(i) for i in range(200)]) == [2 * i for i in range(200)]
    await asyncio.to_thread(thread.join)
    assert found == [2 * i for i in range(100)]
    assert await embed.submit(4) == 8
    assert await asyncio.wrap_future(embed.submit(5)) == 10
    await asyncio.to_thread(embed.close)


async def test_calls_of_an_async_function_run_at_once() -> None:
    running = most = 0
    gate = asyncio.Event()
    home = asyncio.get_running_loop()

    async def fetch(items: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 4:
            home.call_soon_threadsafe(gate.set)
        while not gate.is_set():
            await asyncio.sleep(0.001)
        running -= 1
        return items

    b = Batcher(fetch, concurrency=4, max_batch_size=1)
    assert await asyncio.gather(*[b(i) for i in range(12)]) == list(range(12))
    assert most == 4
    await b.aclose()


async def test_several_loops() -> None:
    with Batcher(adouble) as b:

        async def use() -> list[int]:
            return await asyncio.gather(*[b(i) for i in range(50)])

        others = [asyncio.to_thread(asyncio.run, use()) for _ in range(3)]
        for found in await asyncio.gather(use(), *others):
            assert found == [2 * i for i in range(50)]


async def test_cancelling_the_task_withdraws_the_item() -> None:
    gate = threading.Event()
    seen: list[int] = []

    def wait(items: list[int]) -> list[int]:
        seen.extend(items)
        assert gate.wait(30)
        return items

    b = Batcher(wait, max_batch_size=1)
    first, second = asyncio.create_task(b(1)), asyncio.create_task(b(2))
    while 1 not in seen:
        await asyncio.sleep(0.001)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert b.view().waiting == 0
    gate.set()
    assert await first == 1
    await b.aclose()
    assert seen == [1]


async def test_an_await_waits_for_room_and_a_submit_never_blocks_the_loop() -> None:
    gate = threading.Event()

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(30)
        return items

    b = Batcher(wait, max_batch_size=2, max_queue=3)
    tasks = [asyncio.create_task(b(i)) for i in range(20)]
    while b.view().waiting < 3:
        await asyncio.sleep(0.001)
    with pytest.raises(RejectedError) as full:
        b.submit(99)
    assert full.value.reason == "queue_full"
    gate.set()
    assert await asyncio.gather(*tasks) == list(range(20))
    await asyncio.to_thread(b.close)


async def test_those_who_await_room_are_told_of_a_close() -> None:
    gate = threading.Event()

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(30)
        return items

    b = Batcher(wait, max_batch_size=1, max_queue=1)
    tasks = [asyncio.create_task(b(i)) for i in range(4)]
    while b.view().waiting < 1:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(asyncio.to_thread(b.close))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    assert done and all(isinstance(task.exception(), RejectedError) for task in done)
    gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    await closing
    assert found[0] == 0 and sum(isinstance(f, RejectedError) for f in found) >= 2


async def test_an_async_generator_streams() -> None:
    async def count(items: list[int]) -> AsyncIterator[list[Any]]:
        for i in range(max(items)):
            await asyncio.sleep(0)
            yield [i if i < item else None for item in items]

    b = Batcher(count)
    futures = [b.submit(n) for n in (3, 1, 5)]
    for future, n in zip(futures, (3, 1, 5), strict=True):
        assert isinstance(future, StreamFuture)
        assert [output async for output in future] == list(range(n))
    assert await b(4) == [0, 1, 2, 3]
    await asyncio.to_thread(b.close)


async def test_an_exception_of_an_async_function_reaches_those_who_await() -> None:
    async def fail(items: list[int]) -> list[int]:
        raise LookupError("nothing there")

    b = Batcher(fail)
    with pytest.raises(LookupError, match="nothing there"):
        await b(1)
    await asyncio.to_thread(b.close)


async def test_an_async_worker_that_dies_takes_no_loop_with_it() -> None:
    deaths = 0

    async def mortal(items: list[int]) -> list[int]:
        nonlocal deaths
        if not deaths:
            deaths += 1
            raise SystemExit
        return items

    b = Batcher(mortal)
    assert [await b(1), await b(2)] == [1, 2] and deaths == 1
    await asyncio.to_thread(b.close)


@pytest.mark.parametrize("fatal", [SystemExit, KeyboardInterrupt])
def test_a_child_task_that_would_end_the_loop_ends_its_call_alone(fatal: type[BaseException]) -> None:
    async def one(item: int) -> int:
        if item == 3:
            raise fatal
        return item

    async def gathered(items: list[int]) -> list[int]:
        return await asyncio.gather(*map(one, items))

    b = Batcher(gathered, strategy="dynamic", max_batch_size=1)
    futures = [b.submit(i) for i in range(6)]
    with pytest.raises(StepFailedError, match=f"its worker died 2 times: {fatal.__name__}"):
        futures.pop(3).result(30)
    assert [future.result(30) for future in futures] == [0, 1, 2, 4, 5]
    _closes(b)


@pytest.mark.parametrize("how", ["raise", "stop"])
def test_what_would_end_the_loop_in_the_background_ends_no_call(how: str) -> None:
    async def leaves() -> None:
        raise SystemExit

    async def fn(items: list[int]) -> list[int]:
        if how == "stop":
            asyncio.get_running_loop().stop()
        else:
            await asyncio.wait([asyncio.create_task(leaves())])
        await asyncio.sleep(0)
        return items

    b = Batcher(fn)
    assert [b.submit(i).result(30) for i in range(2)] == [0, 1]
    _closes(b)


def _closes(b: Batcher) -> None:
    closing = threading.Thread(target=b.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


async def test_it_is_an_asynchronous_context_manager() -> None:
    async with Batcher(adouble) as b:
        waiting = [asyncio.ensure_future(b(i)) for i in range(20)]
        await asyncio.sleep(0)
    assert b.closed and await asyncio.gather(*waiting) == [2 * i for i in range(20)]
    with pytest.raises(RejectedError, match="closed"):
        await b(1)


def test_a_loop_that_closed_meanwhile_harms_nobody() -> None:
    gate = threading.Event()

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(30)
        return items

    with Batcher(wait, max_batch_size=1) as b:

        async def start() -> None:
            future = b.submit(1)
            asyncio.get_running_loop().create_task(_await(future))
            await asyncio.sleep(0)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(start())
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()
        other = b.submit(2)
        gate.set()
        assert other.result(30) == 2


async def _await(future: Any) -> Any:
    return await future


def test_what_an_asynchronous_function_has_started_is_cancelled_by_close() -> None:
    ended: list[str] = []

    async def refresh() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # has time to clean up
            ended.append("cleaned up")
            raise

    kept: list[asyncio.Task[None]] = []

    @batch
    async def embed(items: list[int]) -> list[int]:
        kept.append(asyncio.create_task(refresh()))
        await asyncio.sleep(0)
        return items

    assert embed.submit(1).result(30) == 1
    embed.close()
    assert ended == ["cleaned up"] and kept[0].cancelled()
