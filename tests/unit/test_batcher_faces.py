"""The batcher's faces: streams, the decorator, methods, map, collation."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from typing import Any

import pytest

from runtime import SLO, Batcher, ItemFuture, RejectedError, batch
from runtime.batching.packing import Packed, pack
from runtime.batching.padding import pad
from tests.fakes import Records
from tests.unit.batcher_doubles import Gated, double


def test_a_generator_streams_to_each_item() -> None:
    def spell(words: list[str]) -> Iterator[list[Any]]:
        for i in range(max(map(len, words))):
            yield [word[i] if i < len(word) else None for word in words]

    heard = Records()
    with Batcher(spell) as b:
        b.subscribe(heard)
        futures = [b.submit(word) for word in ("some", "words", "a")]
        assert [list(f) for f in futures] == [list("some"), list("words"), ["a"]]  # type: ignore[call-overload]
        assert futures[0].result() == list("some")
    assert sorted(r.output_tokens for r in heard.requests) == [1, 4, 5]


def test_a_stream_that_breaks_gives_what_came_and_then_raises() -> None:
    def broken(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise OSError("lost")

    with Batcher(broken) as b:
        stream = iter(b.submit(3))  # type: ignore[call-overload]
        assert next(stream) == 3
        with pytest.raises(OSError, match="lost"):
            next(stream)


def test_the_decorator_keeps_the_function_and_makes_one_batcher() -> None:
    @batch(slo="e2e=30s@99%", cost=len)
    def embed(texts: list[str]) -> list[int]:
        """Counts."""
        return [len(text) for text in texts]

    assert embed.submit("four").result() == 4 and embed("eleven chars") == 12
    assert embed.__doc__ == "Counts." and embed.__name__ == "embed" and embed.function(["a"]) == [1]
    assert embed.batcher.slos["default"] == SLO(e2e_ms=30000)
    assert list(embed.map(["a", "bb", "ccc"])) == [1, 2, 3]
    embed.close()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"slo": "200ms"}, ValueError, '"200ms" is not a target; write'),
        ({"slo": "e2e=200"}, ValueError, '"e2e=200" has no unit'),
        ({"max_batch": 3}, TypeError, "@batch has no option 'max_batch'; the options are slo, cost, strategy, "),
    ],
)
def test_a_wrong_option_is_said_where_it_stands(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        batch(**options)(lambda items: items)


def test_a_method_has_a_batcher_for_each_instance_and_lets_go_of_it() -> None:
    @dataclass  # compared by value, so not hashable
    class Model:
        weight: int

        @batch
        def times(self, items: list[int]) -> list[int]:
            return [self.weight * item for item in items]

    two, three = Model(2), Model(3)
    assert two.times(5) == 10 and three.times(5) == 15
    assert two.times.batcher is two.times.batcher is not three.times.batcher
    threads = two.times.batcher._pool.threads()
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    three.times.close()


def test_map_keeps_the_order_or_gives_what_is_ready() -> None:
    with Batcher(double, max_queue=16, max_batch_size=4) as b:
        assert list(b.map(range(300))) == [2 * i for i in range(300)]
        assert sorted(b.map(iter(range(300)), ordered=False)) == [2 * i for i in range(300)]
        assert list(b.map([])) == []


@pytest.mark.slow
def test_map_gives_out_every_item_once_while_calls_end_all_the_time() -> None:
    """Results come from another thread at any moment, also while the ones before them are being collected."""
    with Batcher(double, max_batch_size=32) as b:
        for _ in range(3):
            assert sorted(b.map(range(20_000), ordered=False)) == list(range(0, 40_000, 2))


def test_unordered_map_gives_out_what_is_ready_before_it_has_read_everything() -> None:
    fn = Gated()
    read: list[int] = []

    def source() -> Iterator[int]:
        for i in range(40):
            read.append(i)
            yield i

    with Batcher(fn, max_queue=8, max_batch_size=4) as b:
        fn.gate.release(100)
        results = b.map(source(), ordered=False)
        first = next(results)
        assert first < 20 and len(read) < 20
        assert sorted([first, *results]) == list(range(40))


def test_map_waits_for_room_that_others_take_where_submit_would_refuse() -> None:
    fn = Gated()
    with Batcher(fn, max_queue=4, max_batch_size=2, when_full="reject") as b:
        results = b.map(range(10))
        ends = threading.Thread(target=fn.gate.release, args=(100,))
        others: list[ItemFuture] = []

        def crowd() -> None:
            while len(others) < 20:
                with suppress(RejectedError):
                    others.append(b.submit(100 + len(others)))
                time.sleep(0.0001)

        crowding = threading.Thread(target=crowd)
        for each in (crowding, ends):
            each.start()
        assert list(results) == list(range(10))
        crowding.join(30)
        assert sorted(f.result(30) for f in others) == list(range(100, 120))


def test_map_reads_no_further_ahead_than_the_queue_has_room() -> None:
    fn = Gated()
    read = []

    def source() -> Iterator[int]:
        for i in range(100):
            read.append(i)
            yield i

    with Batcher(fn, max_queue=5, max_batch_size=2) as b:
        fn.gate.release(100)
        results = b.map(source())
        assert next(results) == 0
        assert len(read) < 20
        assert list(results) == list(range(1, 100))


def test_map_raises_the_first_error_or_puts_it_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    def picky(items: list[int]) -> list[Any]:
        return [ValueError(f"not {i}") if i == 7 else i for i in items]

    with Batcher(picky) as b:
        with pytest.raises(ValueError, match="not 7"):
            list(b.map(range(50)))
        found = list(b.map(range(10), return_exceptions=True, progress=True))
        assert found[:7] == list(range(7)) and isinstance(found[7], ValueError) and found[8:] == [8, 9]
    assert "10/10" in capsys.readouterr().err


@pytest.mark.parametrize("ordered", [True, False])
def test_map_puts_an_error_of_the_cost_function_in_its_place(ordered: bool) -> None:
    costs = {"a": 1, "below": -1, "b": 2, "none": nan}
    with Batcher(lambda names: names, cost=costs.__getitem__) as b:
        found = list(b.map([*costs, "unknown"], ordered=ordered, return_exceptions=True))
        results, errors = ([f for f in found if isinstance(f, Exception) is bad] for bad in (False, True))
        assert results == ["a", "b"] and [type(e) for e in errors] == [ValueError, ValueError, KeyError]
        assert not ordered or found[0::2] == ["a", "b", errors[-1]]
        with pytest.raises(ValueError, match="cost of an item is -1"):
            list(b.map(costs))
        left = b.map([*costs] * 50, return_exceptions=True)
        assert next(left) == "a"
        del left  # while some that failed have not been given out


@pytest.mark.parametrize(("options", "error"), [({"deadline_s": -1}, ValueError), ({"dedline_s": 1}, TypeError)])
def test_a_wrong_option_of_map_is_nobodys_outcome(options: dict[str, Any], error: type[Exception]) -> None:
    source = iter([1, 2])
    with Batcher(double) as b, pytest.raises(error, match="_s"):
        list(b.map(source, return_exceptions=True, **options))
    assert list(source) == [1, 2]


def test_packing_and_padding_are_ways_to_collate() -> None:
    def sums(packed: Packed) -> list[int]:
        return [int(row.sum()) for row in packed.rows()]

    with Batcher(sums, cost=len, collate=pack) as b:
        assert list(b.map([[1, 2], [3], [4, 5, 6]])) == [3, 3, 15]
    with Batcher(lambda padded: padded.values.sum(1).tolist(), cost=len, collate=pad, grouping="buckets") as b:
        assert list(b.map([[1, 2], [3], [4, 5, 6]])) == [3, 3, 15]
