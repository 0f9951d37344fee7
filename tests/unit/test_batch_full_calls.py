"""Strategies that hold out for full calls: none hangs, whatever the order; a window that opens when it goes, not when seen."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime import Batcher
from runtime.batching.groupings import GROUPINGS, SortedWindows
from runtime.batching.item import RUNNING, WAITING, Item
from runtime.batching.strategies import STRATEGIES, Dynamic, Static
from tests.unit.batching_world import core_of, poisson, run


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, unless it hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("grouping", sorted(GROUPINGS))
@pytest.mark.parametrize("ordered", [True, False])
def test_map_comes_to_its_end(strategy: str, grouping: str, ordered: bool) -> None:
    """Neither the last call nor one of a rare length is ever full; a small queue is full of items that do not go together."""
    items = [1000, *(i % 7 + 100 * (i % 3) for i in range(100)), 5000]
    for max_queue in (10, 100_000):
        with Batcher(
            lambda batch: [-x for x in batch], cost=lambda x: x or 1, strategy=strategy, grouping=grouping,
            max_batch_size=8, max_wait_ms=1, max_queue=max_queue,
        ) as b:  # fmt: skip
            found = within(30, lambda b=b: list(b.map(items, ordered=ordered)))
        assert (found if ordered else sorted(found, reverse=True)) == [
            -x for x in (items if ordered else sorted(items))
        ]


def test_static_calls_are_full_but_for_the_last() -> None:
    sizes: list[int] = []

    def work(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    with Batcher(work, strategy="static", max_batch_size=8) as b:
        assert within(30, lambda: list(b.map(range(100)))) == list(range(100))
    assert sizes == [8] * 12 + [4]


def test_a_slow_source_is_waited_for() -> None:
    """Nothing goes early while the iterable may still bring more."""
    sizes: list[int] = []

    def work(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    def source() -> Iterator[int]:
        for i in range(12):
            if i == 5:
                threading.Event().wait(0.05)
            yield i

    with Batcher(work, strategy="static", max_batch_size=6) as b:
        assert within(30, lambda: list(b.map(source()))) == list(range(12))
    assert sizes == [6, 6]


@pytest.mark.parametrize("strategy", [Static(), Dynamic()])
def test_a_rare_length_does_not_hold_up_full_buckets(strategy: Static | Dynamic) -> None:
    core = core_of(strategy, "buckets", size=4, wait_ms=1000)
    core.submit(Item(None, 0.0, 1000), 0.0)
    for i in range(1, 5):
        assert core.next(0.01 * i).call is None
        core.submit(Item(None, 0.01 * i, 10), 0.01 * i)
    call = core.next(0.05).call
    assert call is not None and [item.cost for item in call.items] == [10] * 4


def test_the_window_of_the_rare_length_counts_all_the_same() -> None:
    core = core_of(Dynamic(), "buckets", size=4, wait_ms=30)
    core.submit(Item(None, 0.0, 1000), 0.0)
    for i in range(1, 5):
        core.submit(Item(None, 0.001 * i, 10), 0.001 * i)
    call = core.next(0.031).call
    assert call is not None and [item.cost for item in call.items] == [1000]


@pytest.mark.parametrize(("strategy", "least"), [(Static(), 15.5), (Dynamic(), 9.0)])
def test_calls_of_sorted_windows_are_as_full_as_others(strategy: Static | Dynamic, least: float) -> None:
    """500 items a second in calls of up to 16, or every 20 ms: some ten a call with the window."""
    items = poisson(500, 10, seed=8, cost=lambda rng: rng.randint(1, 100))
    served = run(core_of(strategy, "sorted", size=16, wait_ms=20), items, lambda call: 0.001)
    assert len(items) / len(served.calls) > least


def test_what_comes_before_a_window_goes_belongs_to_it() -> None:
    grouping = SortedWindows(window=4)

    def put(*costs: int) -> None:
        for cost in costs:
            item = Item(None, 0.0, cost)
            item.state = WAITING
            grouping.add(item)

    def take(most: int) -> list[int]:
        found = grouping.first(most)
        for item in found:
            item.state = RUNNING
        grouping.took(found)
        return [item.cost for item in found]

    put(5)
    assert [item.cost for item in grouping.first(3)] == [5]
    put(9, 2, 7, 8)  # the last is of the next window
    assert take(3) == [9, 7, 5]
    put(1, 60, 3, 50)
    assert take(3) == [2, 1, 8]  # what was left goes first, then the cheapest: from now on upwards
    assert take(3) == [60, 50, 3]


def test_nobody_is_left_behind_in_sorted_windows() -> None:
    """Calls of 30 leave 16 of 256; they are in the first call of the next window."""
    rng = random.Random(5)
    grouping = SortedWindows(window=256)
    number: dict[Item, int] = {}
    waited = []
    for call in range(400):
        while len(number) < 600:
            item = Item(None, float(call), rng.choice([1, 2, 3, 50, 99, 100]))
            item.state = WAITING
            grouping.add(item)
            number[item] = call
        found = grouping.first(30)
        assert len(found) == 30
        for item in found:
            item.state = RUNNING
            waited.append(call - number.pop(item))
        grouping.took(found)
    assert max(waited) <= 600 / 30 + 256 / 30 + 2


def test_whoever_waits_for_room_gets_it_though_no_call_is_full() -> None:
    """Ten lengths that do not go together fill the queue; more of other lengths wait outside."""
    with Batcher(
        lambda items: items, cost=int, strategy="static", grouping="buckets", max_batch_size=8, max_queue=10
    ) as b:
        futures: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: futures.append(b.submit(20 * 2**n)), daemon=True) for n in range(13)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(futures) == 13, "they wait for ever"
