"""The batcher with its threads: results and exceptions of each item, futures, replicas, wrong values."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, as_completed, wait
from typing import Any

import pytest

from runtime import Batcher
from runtime.batching.strategies import STRATEGIES, Static
from runtime.errors import StepFailedError
from tests.fakes import Records
from tests.threads import in_threads
from tests.unit.batcher_doubles import Gated, double


def test_results_come_back_to_whoever_submitted() -> None:
    with Batcher(double) as b:
        futures = [b.submit(i) for i in range(500)]
        assert [f.result() for f in futures] == [2 * i for i in range(500)]
        assert b(21) == 42 and b.call(21) == 42


def test_what_comes_while_a_call_runs_makes_the_next_one() -> None:
    fn = Gated()
    with Batcher(fn) as b:
        first = b.submit(0)
        fn.entered.acquire()
        rest = [b.submit(i) for i in range(1, 8)]
        fn.gate.release(2)
        assert [f.result(30) for f in [first, *rest]] == list(range(8))
    assert fn.calls == [[0], [1, 2, 3, 4, 5, 6, 7]]


def test_many_threads_at_once() -> None:
    results: dict[int, list[int]] = {}
    with Batcher(double, replicas=3, max_batch_size=7) as b:

        def client(number: int) -> None:
            results[number] = [b.submit(1000 * number + i).result() for i in range(200)]

        in_threads(client, 8)
    assert results == {n: [2 * (1000 * n + i) for i in range(200)] for n in range(8)}


def test_a_future_is_a_concurrent_future() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1) as b:
        one, two = b.submit(1), b.submit(2)
        called = []
        two.add_done_callback(called.append)
        fn.entered.acquire()
        assert one.running() and not two.running() and not one.done()
        fn.gate.release()
        done, left = wait([one, two], return_when=FIRST_COMPLETED, timeout=30)
        assert (done, left) == ({one}, {two})
        fn.gate.release()
        assert {f.result() for f in as_completed([one, two], timeout=30)} == {1, 2}
        assert called == [two]


def test_an_exception_in_a_slot_is_that_items_own() -> None:
    def some(items: list[int]) -> list[Any]:
        return [ValueError(f"{i} is odd") if i % 2 else i for i in items]

    heard = Records()
    with Batcher(some) as b:
        b.subscribe(heard)
        futures = [b.submit(i) for i in range(4)]
        assert futures[2].result() == 2
        with pytest.raises(ValueError, match="3 is odd"):
            futures[3].result()
    assert sorted(r.reason for r in heard.requests) == ["error", "error", "stop", "stop"]
    assert sum(s.failed for s in heard.steps) == 2


def test_a_call_that_raises_fails_its_items_and_nobody_elses() -> None:
    def fail(items: list[int]) -> list[int]:
        if 13 in items:
            raise ArithmeticError("thirteen")
        return items

    with Batcher(fail, max_batch_size=4) as b:
        futures = [b.submit(i) for i in range(40)]
        errors = [f.exception() for f in futures]
        assert isinstance(errors[13], ArithmeticError)
        assert 1 <= sum(e is not None for e in errors) <= 4
        assert b(99) == 99


def test_isolate_finds_the_item_at_fault() -> None:
    runs = []

    def fail(items: list[int]) -> list[int]:
        runs.append(len(items))
        if {13, 20} & set(items):
            raise ArithmeticError("poison")
        return items

    fn = Gated()
    with Batcher(lambda items: fail(items) if items != [-1] else fn(items), isolate=True) as b:
        first = b.submit(-1)
        fn.entered.acquire()
        futures = [b.submit(i) for i in range(32)]
        fn.gate.release()
        first.result()
        errors = [f.exception() for f in futures]
    assert [i for i, e in enumerate(errors) if e is not None] == [13, 20]
    assert all(isinstance(errors[i], ArithmeticError) for i in (13, 20))
    assert max(runs) > 1 and len(runs) < 32


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], r"returned 1 results for 2 items; it must be one for each"),
        (None, r"returned NoneType; it must return a list"),
        ("ab", r"returned str; it must return a list"),
        ({1: 2, 3: 4}, r"returned dict; it must return a list"),
    ],
)
def test_what_is_no_list_of_results_is_said(returned: Any, message: str) -> None:
    fn = Gated()
    with Batcher(lambda items: returned if len(items) == 2 else fn(items), name="f") as b:
        first = b.submit(0)
        fn.entered.acquire()
        two = [b.submit(i) for i in (1, 2)]
        fn.gate.release()
        for future in two:
            with pytest.raises(StepFailedError, match=message):
                future.result(30)
        first.result()


def test_static_batches_are_full_but_for_the_last() -> None:
    sizes = []
    with Batcher(lambda items: sizes.append(len(items)) or items, strategy="static", max_batch_size=8) as b:
        futures = [b.submit(i) for i in range(20)]
        assert [f.result(30) for f in futures[:16]] == list(range(16))
    assert sizes == [8, 8, 4] and futures[19].result(0) == 19


def test_replicas_may_be_callables_of_their_own() -> None:
    fns = [Gated(), Gated()]
    with Batcher(replicas=fns, max_batch_size=1) as b:
        futures = [b.submit(i) for i in range(2)]
        for fn in fns:  # both, before either may end and take the other's item
            assert fn.entered.acquire(timeout=30)
        for fn in fns:
            fn.gate.release()
        assert [f.result(30) for f in futures] == [0, 1]


def test_a_function_that_calls_its_own_batcher_is_told() -> None:
    with (
        Batcher(lambda items: [b.call(item) for item in items]) as b,
        pytest.raises(RuntimeError, match="wait for itself"),
    ):
        b.call(1)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_strategy_and_its_name_are_the_same(strategy: str) -> None:
    with Batcher(double, strategy=strategy) as named, Batcher(double, strategy=STRATEGIES[strategy]()) as given:
        assert given.knobs == named.knobs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": None}, "fn is missing"),
        ({"fn": 7}, "fn is 7; it must be callable"),
        ({"slo": "fast"}, '"fast" is not a target'),
        ({"cost": 3}, "cost is 3; it must be a function"),
        ({"strategy": "magic"}, "strategy is 'magic'; it must be one of adaptive, dynamic, static"),
        ({"strategy": Static}, "strategy is <class"),
        ({"grouping": "magic"}, "grouping is 'magic'"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": 5000}, "max_batch_size is 5000; .* 4096"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1"),
        ({"token_budget": 1.5}, "token_budget is 1.5"),
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": [double]}, "replicas is a list"),
        ({"fn": None, "replicas": []}, "replicas is a list"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_queue": 0}, "max_queue is 0"),
        ({"when_full": "panic"}, "when_full is 'panic'"),
        ({"call_price_ms": -1}, "call_price_ms is -1"),
        ({"call_price_ms": 5, "strategy": "dynamic"}, 'call_price_ms is 5; it must be 0 unless strategy is "adaptive"'),
        ({"strategy": "static", "max_queue": 3}, "a static batch of 32 would never fill"),
        ({"memory_limit_bytes": 100}, "measure_bytes is None; beside memory_limit_bytes, 100, it must be a function"),
        ({"measure_bytes": int}, "memory_limit_bytes is None; beside measure_bytes it must be a number of bytes"),
        (
            {"memory_limit_bytes": 100, "measure_bytes": int, "processes": True},
            "measure_bytes is given and processes is set",
        ),
        ({"strategy": Static(), "max_queue": 8}, "max_queue is 8; a static batch of 32 would never fill"),
        ({"processes": True, "fn": lambda items: items}, "cannot be sent to a process"),
        ({"processes": True, "concurrency": 2}, "concurrency is 2 and processes is set"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batcher(**({"fn": double} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": "1"}, "timeout_s is '1'"),
    ],
)
def test_wrong_options_of_an_item_are_named(options: dict[str, Any], message: str) -> None:
    with Batcher(double) as b, pytest.raises(ValueError, match=message):
        b.submit(1, **options)


@pytest.mark.parametrize("cost", [float("nan"), -1, "many", None, float("inf")])
def test_a_cost_that_is_no_number_is_named(cost: object) -> None:
    with Batcher(double, cost=lambda item: cost) as b, pytest.raises(ValueError, match="cost of an item is"):  # type: ignore[arg-type,return-value]
        b.submit(1)


def test_costs_are_rounded_up() -> None:
    heard = Records()
    with Batcher(lambda items: items, cost=lambda item: item) as b:
        b.subscribe(heard)
        for cost in (0, 0.2, 1.0, 2.5, 7):
            b(cost)
    assert [r.prompt_tokens for r in heard.requests] == [1, 1, 1, 3, 7]
