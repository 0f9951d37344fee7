"""Who keeps whom: futures their batcher, bound methods their object, and nobody for longer than that."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from runtime import Batcher, batch
from tests.unit.batcher_doubles import Gated


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
