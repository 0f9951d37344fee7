"""The batcher with its threads: kinds of functions, results and exceptions, cancelling, timeouts, back-pressure, closing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, as_completed, wait
from typing import Any

import pytest

from runtime import SLO, Batcher, FinishReason, RequestRecord, StepRecord, batch
from runtime.batching.strategies import Adaptive, Static
from runtime.errors import RejectedError, RequestCancelledError, RequestTimeoutError, StepFailedError


class Gated:
    """A function that waits inside until it is let through, and remembers what it was called with."""

    def __init__(self, act: Callable[[Any], Any] = lambda x: x) -> None:
        self.calls: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self._act = act

    def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        return [self._act(item) for item in items]


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


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

        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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

    heard = Heard()
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


def test_a_cancelled_item_never_reaches_the_function() -> None:
    fn = Gated()
    heard = Heard()
    with Batcher(fn, max_batch_size=2) as b:
        b.subscribe(heard)
        futures = [b.submit(i) for i in range(6)]
        fn.entered.acquire()
        assert futures[3].cancel() and futures[3].cancel() and futures[3].cancelled()
        assert not futures[0].cancel()
        fn.gate.release(6)
        assert wait(futures, timeout=30).not_done == set()
        with pytest.raises(CancelledError):
            futures[3].result()
    assert sorted(i for call in fn.calls for i in call) == [0, 1, 2, 4, 5]
    assert {r.id: r.reason for r in heard.requests}["4"] is FinishReason.CANCELLED
    assert not futures[0].cancel()


def test_a_timeout_ends_what_waits_and_what_runs() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1) as b:
        runs, waits, other = b.submit("a", timeout_s=0.05), b.submit("b", timeout_s=0.05), b.submit("c")
        for future in (runs, waits):
            with pytest.raises(RequestTimeoutError, match="its timeout passed"):
                future.result(30)
        fn.gate.release(3)
        assert other.result(30) == "c"
    assert fn.calls == [["a"], ["c"]]


def test_a_full_queue_refuses_or_blocks() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=2, when_full="reject") as b:
        futures = [b.submit(0)]
        fn.entered.acquire()
        futures += [b.submit(i) for i in (1, 2)]
        with pytest.raises(RejectedError, match="max_queue is 2") as refused:
            b.submit(3)
        assert refused.value.reason == "queue_full" and refused.value.retry_after_s is not None
        fn.gate.release(3)
        assert [f.result(30) for f in futures] == [0, 1, 2]

    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=2) as b:
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.extend(f.result() for f in [b.submit(i) for i in range(9)]))
        thread.start()
        fn.entered.acquire()
        while b.view().waiting < 2:
            time.sleep(0.001)
        fn.gate.release(9)
        thread.join(30)
        assert results == list(range(9))


def test_what_cannot_be_on_time_is_dropped_early() -> None:
    """While a call runs for far longer than promised, items wait beyond their deadline: they are not run then."""
    fn = Gated()
    with Batcher(fn, slo="e2e=50ms", max_batch_size=4, strategy=_knowing(seconds=0.01)) as b:
        first = b.submit(0)
        fn.entered.acquire()
        late = [b.submit(i) for i in range(1, 4)]
        time.sleep(0.1)
        fresh = b.submit(9, deadline_s=60)
        fn.gate.release(2)
        assert first.result(30) == 0 and fresh.result(30) == 9
        for future in late:
            with pytest.raises(RejectedError, match="deadline cannot be met") as dropped:
                future.result(30)
            assert dropped.value.reason == "slo"
    assert fn.calls == [[0], [9]]


def _knowing(seconds: float) -> Adaptive:
    """An adaptive strategy that has seen calls of so many seconds."""
    from runtime.batching.item import Call, Item
    from runtime.batching.service_model import ServiceModel

    model = ServiceModel()
    for n in (1, 2, 4, 1, 2, 4, 3, 2):
        call = Call([Item(None, 0.0)] * n, n, 0, 0.0, 0, 0)
        call.end = seconds
        model.observe(call)
    assert model.ready
    return Adaptive(model=model)


def test_closing_finishes_what_waits_or_cancels_it() -> None:
    fn = Gated()
    b = Batcher(fn, max_batch_size=2)
    futures = [b.submit(i) for i in range(5)]
    fn.gate.release(5)
    b.close()
    assert [f.result(0) for f in futures] == list(range(5)) and b.closed
    with pytest.raises(RejectedError, match="closed") as refused:
        b.submit(1)
    assert refused.value.reason == "closed"
    b.close()

    fn = Gated()
    b = Batcher(fn, max_batch_size=2)
    futures = [b.submit(0)]
    fn.entered.acquire()
    futures += [b.submit(i) for i in range(1, 5)]
    closing = threading.Thread(target=b.close, args=(False,))
    closing.start()
    for future in futures[1:]:
        with pytest.raises(RequestCancelledError, match="the batcher was closed"):
            future.result(30)
    fn.gate.release()
    closing.join(30)
    assert futures[0].result(0) == 0 and len(fn.calls) == 1


def test_an_error_in_the_with_block_does_not_wait_for_what_is_queued() -> None:
    fn = Gated()
    with pytest.raises(KeyError), Batcher(fn, max_batch_size=1) as b:
        futures = [b.submit(i) for i in range(3)]
        fn.entered.acquire()
        fn.gate.release()
        raise KeyError
    assert isinstance(futures[2].exception(0), RequestCancelledError)


def test_a_forgotten_batcher_stops_its_threads() -> None:
    b = Batcher(double, replicas=2)
    assert b(1) == 2
    threads = b._pool.threads()
    gone = weakref.ref(b)
    del b
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


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
        for fn in fns:
            assert fn.entered.acquire(timeout=30)
            fn.gate.release()
        assert [f.result(30) for f in futures] == [0, 1]


def test_a_generator_streams_to_each_item() -> None:
    def spell(words: list[str]) -> Iterator[list[Any]]:
        for i in range(max(map(len, words))):
            yield [word[i] if i < len(word) else None for word in words]

    heard = Heard()
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


def test_a_method_has_a_batcher_for_each_instance_and_lets_go_of_it() -> None:
    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

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


def test_a_function_that_calls_its_own_batcher_is_told() -> None:
    with (
        Batcher(lambda items: [b.call(item) for item in items]) as b,
        pytest.raises(RuntimeError, match="wait for itself"),
    ):
        b.call(1)


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
        ({"call_price_ms": 5, "strategy": "dynamic"}, "only the adaptive strategy"),
        ({"strategy": "static", "max_queue": 3}, "a static batch of 32 would never fill"),
        ({"memory_limit_bytes": 100}, "memory_limit_bytes and measure_bytes go together"),
        ({"processes": True, "fn": lambda items: items}, "cannot be sent to a process"),
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
    heard = Heard()
    with Batcher(lambda items: items, cost=lambda item: item) as b:
        b.subscribe(heard)
        for cost in (0, 0.2, 1.0, 2.5, 7):
            b(cost)
    assert [r.prompt_tokens for r in heard.requests] == [1, 1, 1, 3, 7]
