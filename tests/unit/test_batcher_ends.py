"""Ends other than a result: cancelled, timed out, refused, dropped, closed; each exactly once."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait

import pytest

from runtime import Batcher, FinishReason
from runtime.batching.strategies import Adaptive
from runtime.errors import RejectedError, RequestCancelledError, RequestTimeoutError
from tests.fakes import Records
from tests.unit.batcher_doubles import Gated, double


def test_a_cancelled_item_never_reaches_the_function() -> None:
    fn = Gated()
    heard = Records()
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
    """While a call runs for far longer than predicted, items wait beyond their deadline: they are not run then."""
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

    fn, heard = Gated(), Records()
    b = Batcher(fn, max_batch_size=2)
    b.subscribe(heard)
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
    cut = [r for r in heard.requests if not r.completed]
    assert [(r.reason, r.cause) for r in cut] == [(FinishReason.ERROR, "the batcher was closed")] * 4
    assert all(r.offered for r in cut), "that was no wish of their clients"


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
