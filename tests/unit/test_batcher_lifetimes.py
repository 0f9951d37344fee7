"""Who keeps whom: futures their batcher, bound methods their object, and nobody for longer than that."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from runtime import Batcher, FinishReason, batch
from runtime.batching.item import Ended, Item
from runtime.batching.mapping import _press_for
from runtime.batching.strategies import Dynamic
from runtime.errors import RejectedError
from tests.unit.batcher_doubles import Gated, double


class Model:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    @batch
    def times(self, items: list[int]) -> list[int]:
        return [self.weight * item for item in items]


def test_a_method_keeps_its_object_while_an_item_is_under_way() -> None:
    assert Model(2).times(5) == 10
    assert Model(3).times.submit(5).result(30) == 15
    assert list(Model(4).times.map(range(4))) == [0, 4, 8, 12]


async def test_an_awaited_method_keeps_its_object() -> None:
    assert await Model(2).times(5) == 10
    coroutine = Model(3).times(5)
    gc.collect()
    assert await coroutine == 15


def test_the_object_and_its_batcher_go_once_the_futures_are_done() -> None:
    model = Model(2)
    gone, threads = weakref.ref(model), model.times.batcher._pool.threads()
    futures = [model.times.submit(i) for i in range(10)]
    del model
    assert [f.result(30) for f in futures] == [2 * i for i in range(10)]
    for thread in threads:
        while thread.is_alive():
            gc.collect()
            thread.join(0.01)
    assert gone() is None and futures  # which are still here


def test_futures_outlive_the_name_of_their_batcher() -> None:
    fn = Gated()

    def three() -> list[Future[Any]]:
        b = Batcher(fn, max_batch_size=1)
        return [b.submit(i) for i in range(3)]

    futures = three()
    gc.collect()
    fn.gate.release(3)
    assert [f.result(30) for f in futures] == [0, 1, 2]


def test_an_object_that_cannot_be_weakly_referenced_is_told_so() -> None:
    @dataclass(slots=True)
    class Slotted:
        weight: int

        @batch
        def times(self, items: list[int]) -> list[int]:
            return [self.weight * item for item in items]

    with pytest.raises(TypeError, match=r"@batch on times: a Slotted cannot be weakly referenced.*weakref_slot=True"):
        Slotted(2).times(5)

    @dataclass(slots=True, weakref_slot=True)
    class Referable:
        weight: int

        @batch
        def times(self, items: list[int]) -> list[int]:
            return [self.weight * item for item in items]

    assert Referable(2).times(5) == 10


async def test_an_async_function_that_awaits_its_own_batcher_is_told_so() -> None:
    async def own(items: list[int]) -> list[Any]:
        return [await b(item - 1) if item else 0 for item in items]

    b = Batcher(own)
    with pytest.raises(RuntimeError, match="would wait for itself"):
        await asyncio.wait_for(b(1), 30)
    assert await b(0) == 0
    await b.aclose()


@pytest.mark.parametrize("how", ["close", "aclose"])
def test_an_async_function_may_close_its_own_batcher(how: str) -> None:
    async def closing(items: list[int]) -> list[int]:
        if how == "close":
            b.close()
        else:
            await b.aclose()
        return items

    b = Batcher(closing)
    assert b.submit(1).result(30) == 1
    b.close()
    assert b.closed and not any(thread.is_alive() for thread in b._pool.threads())


def test_a_forgotten_batcher_of_an_async_function_stops_its_loop() -> None:
    before = set(threading.enumerate())

    async def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    b = Batcher(double)
    assert b.submit(2).result(30) == 4
    mine = set(threading.enumerate()) - before
    assert any(thread.name.endswith("loop") for thread in mine)
    del b
    gc.collect()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive(), thread.name


class Locked(Dynamic):
    """A strategy that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_strategy_that_cannot_be_copied_serves_one_instance() -> None:
    class Model:
        @batch(strategy=Locked())
        def times(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    first, second = Model(), Model()
    assert first.times(1) == 2 and first.times(2) == 4
    with pytest.raises(
        TypeError, match=r"@batch on times: strategy is .*Locked.* cannot be copied .*another instance has it"
    ):
        second.times(1)
    assert first.times(3) == 6


@pytest.mark.parametrize("ordered", [True, False])
def test_a_map_within_its_own_function_is_told_that_it_would_wait_for_itself(ordered: bool) -> None:
    def own(items: list[int]) -> list[Any]:
        return [list(b.map([item - 1], ordered=ordered)) if item else 0 for item in items]

    with Batcher(own) as b:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            b.submit(1).result(30)
        assert b.submit(0).result(30) == 0


def test_functions_are_closed_once_by_whoever_comes_first() -> None:
    with Batcher(double) as b:
        closed: list[str] = []
        inside, on = threading.Event(), threading.Event()

        def close() -> None:
            closed.append(threading.current_thread().name)
            inside.set()
            assert on.wait(30)

        b._pool._close = close
        closing = [threading.Thread(target=b.close, name=name) for name in ("first", "second")]
        closing[0].start()
        assert inside.wait(30)
        closing[1].start()
        closing[1].join(0.05)
        assert closing[1].is_alive(), "it waits until they are closed"
        on.set()
        for thread in closing:
            thread.join(30)
    assert closed == ["first"]


def test_close_ends_though_the_last_items_time_out_with_the_last_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing will wake the one who keeps time after that."""
    b = Batcher(double)
    pool = b._pool
    assert b.submit(1, timeout_s=60).result(30) == 2
    expired = [Ended(Item(1, 0.0), FinishReason.TIMEOUT, "its timeout passed")]
    monkeypatch.setattr(pool.core, "expire", lambda now: [])
    b._pool.stop(drain=True)
    for thread in pool.threads():
        thread.join(30)
    monkeypatch.setattr(pool.core, "expire", lambda now: expired)
    assert not pool._tick()
    b.close()


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def scarce(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", scarce)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Batcher(double, concurrency=3)
    assert len(started) == 2
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


class Payload:
    """Something that a weak reference can be made of."""


def test_a_rejected_item_goes_at_once() -> None:
    """Its future and its item know each other: under overload many would wait for the garbage collector."""
    gate = Gated()
    b = Batcher(gate, max_batch_size=1, max_queue=1, when_full="reject")
    under_way = b.submit(Payload())
    assert gate.entered.acquire(timeout=30)
    waiting, refused = b.submit(Payload()), Payload()
    gone = weakref.ref(refused)
    gc.disable()
    try:
        with pytest.raises(RejectedError):
            b.submit(refused)
        del refused
        assert gone() is None
    finally:
        gc.enable()
        gate.gate.release(2)
    assert under_way.result(30) is not None and waiting.result(30) is not None
    b.close()


def test_a_stream_that_is_over_goes_at_once() -> None:
    def counted(items: list[int]) -> Iterator[list[Any]]:
        yield [Payload() for _ in items]

    b = Batcher(counted)
    stream = b.submit(1)
    (output,) = stream.result(30)
    b.close()
    gone = weakref.ref(output)
    gc.disable()
    try:
        del output, stream
        assert gone() is None
    finally:
        gc.enable()


def test_who_waits_for_an_item_is_remembered_while_it_waits() -> None:
    """A strategy whose calls are full without it never asks who is waited for."""
    gate = Gated()
    b = Batcher(gate, strategy=Dynamic(), max_batch_size=1)
    futures = [b.submit(i) for i in range(6)]
    state = b._pool.core.state
    for future in futures[1:]:
        assert gate.entered.acquire(timeout=30)
        _press_for(future, b._pool)
        assert [item.payload for item in state.wanted] == [future.item.payload]
        gate.gate.release()
    gate.gate.release()
    assert [future.result(30) for future in futures] == list(range(6))
    b.close()
