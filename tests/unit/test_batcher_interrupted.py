"""Signal handlers that call a batcher, or raise, while their thread is in the middle of a change to it; and threads refused."""

from __future__ import annotations

import faulthandler
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import Batcher
from runtime.batching import pool as pool_module
from runtime.batching.future import ItemFuture
from runtime.batching.groupings import grouping_of
from runtime.batching.item import Item
from runtime.batching.strategies import Dynamic
from runtime.batching.strategies.protocol import State
from runtime.errors import RejectedError, RequestCancelledError, StepFailedError
from tests.unit.batcher_doubles import Gated, double
from tests.waiting import until


@pytest.fixture(autouse=True)
def no_deadlock() -> Iterator[None]:
    """A test that does not end says where it stands."""
    faulthandler.dump_traceback_later(300)
    yield
    faulthandler.cancel_dump_traceback_later()


class Signalled(Dynamic):
    """Calls ``handler`` at an item's arrival, under the batcher's lock, as a signal does between two instructions."""

    def __init__(self) -> None:
        self.handler: Callable[[], object] | None = None
        self.found: Any = None

    def admit(self, item: Item, state: State) -> None:
        if self.handler is not None:
            handler, self.handler = self.handler, None
            self.found = handler()


def batcher(fn: Callable[..., Any] = double, **options: Any) -> tuple[Batcher, Signalled]:
    strategy = Signalled()
    return Batcher(fn, strategy=strategy, max_batch_size=1, max_wait_ms=0, **options), strategy


@pytest.mark.parametrize("drain", [True, False])
def test_a_close_within_a_submit_holds_up_nobody(drain: bool) -> None:
    fn = Gated()
    b, signal = batcher(fn)
    first = b.submit(0)
    fn.entered.acquire()

    def handler() -> bool:
        b.close(drain=drain)
        return b.closed

    signal.handler = handler
    future = b.submit(1)
    assert signal.found is True
    fn.gate.release(2)
    assert first.result(30) == 0
    if drain:
        assert future.result(30) == 1
    else:
        with pytest.raises(RequestCancelledError, match="the batcher was closed"):
            future.result(30)
    b.close()
    assert not any(thread.is_alive() for thread in b._pool.threads())
    with pytest.raises(RejectedError, match="closed"):
        b.submit(2)


def test_a_submit_within_a_submit_is_served_behind_it() -> None:
    b, signal = batcher()
    with b:
        signal.handler = lambda: b.submit(2)
        assert b.submit(1).result(30) == 2
        assert signal.found.result(30) == 4


def test_a_submit_within_a_submit_to_a_full_queue_is_refused_by_its_future() -> None:
    fn = Gated()
    b, signal = batcher(fn, max_queue=1, when_full="reject")
    with b:
        futures = [b.submit(0)]
        fn.entered.acquire()
        signal.handler = lambda: b.submit(2)
        futures.append(b.submit(1))
        assert isinstance(signal.found.exception(30), RejectedError)
        fn.gate.release(2)
        assert [future.result(30) for future in futures] == [0, 1]


def test_settings_and_a_cancel_within_a_submit_hold() -> None:
    fn = Gated()
    b, signal = batcher(fn)
    with b:
        running, waiting = b.submit(0), b.submit(1)
        fn.entered.acquire()

        def handler() -> tuple[int, bool]:
            b.set_slo("e2e=60s")
            return b.set_knobs(max_batch_size=7), waiting.cancel()

        signal.handler = handler
        last = b.submit(2)
        assert signal.found == (1, False)
        assert waiting.cancelled() and b.knobs.max_batch_size == 7 and b.slos["default"].e2e_ms == 60_000
        assert b.slo_history.latest == b.slos, "the change that was put off is not forgotten"
        fn.gate.release(2)
        assert running.result(30) == 0 and last.result(30) == 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda b, running: b.view(),
        lambda b, running: running.result(),
        lambda b, running: running.exception(),
        lambda b, running: list(b.map([1])),
    ],
)
def test_who_cannot_wait_within_a_submit_is_told_so(wait: Callable[[Batcher, ItemFuture], object]) -> None:
    fn = Gated()
    b, signal = batcher(fn)
    with b:
        running = b.submit(0)
        fn.entered.acquire()

        def handler() -> None:
            with pytest.raises(RuntimeError, match="a signal handler that interrupts a call of the batcher"):
                wait(b, running)

        signal.handler = handler
        other = b.submit(1)
        fn.gate.release(2)
        assert (running.result(30), other.result(30)) == (0, 1) and b.view()


def interrupted(found: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """``found``, whose first call Ctrl-C interrupts: before it has done anything, or behind all."""
    left = [None]

    def once(*args: Any) -> Any:
        if before and left:
            left.pop()
            raise KeyboardInterrupt
        result = found(*args)
        if left:
            left.pop()
            raise KeyboardInterrupt
        return result

    return once


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("where", ["admit", "queue", "expiries", "watch", "arrived", "submit"])
@pytest.mark.parametrize("grouping", ["arrival", "fair", "buckets", "sorted", "priority"])
def test_ctrl_c_within_a_submit_leaves_nothing_half_in(
    grouping: str, where: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = Gated()
    queue = grouping_of(grouping)
    with Batcher(fn, strategy=Dynamic(), grouping=queue, max_batch_size=4, max_wait_ms=0) as b:
        pool, core = b._pool, b._pool.core
        first = b.submit(0)
        fn.entered.acquire()
        waiting = [b.submit(1)]
        owner: Any
        owner, name = {
            "admit": (core.strategy, "admit"), "queue": (queue, "add"), "expiries": (core.expiries, "add"),
            "watch": (pool._timekeeper, "watch"), "arrived": (pool, "_arrived"), "submit": (core, "submit"),
        }[where]  # fmt: skip
        if where == "expiries":
            monkeypatch.setattr(core, "expiries", type("Slotless", (type(owner),), {})(owner._over))
            owner = core.expiries
        if where == "arrived":
            fn.gate.release(2)
            assert [f.result(30) for f in (first, *waiting)] == [0, 1]
            until(lambda: pool._idle)
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name), before=before))
        with pytest.raises(KeyboardInterrupt):
            b.submit(2, timeout_s=60)
        if where != "arrived":
            assert core.state.waiting == core.state.waiting_cost == 1 and list(core._pending) == [waiting[0].item]
            assert core.state.free_places == core.max_queue - 1
            waiting.append(b.submit(3))
            fn.gate.release(2)
            assert [f.result(30) for f in (first, *waiting)] == [0, 1, 3] and fn.calls[1:] == [[1, 3]]
        fn.gate.release()
        assert b.submit(4).result(30) == 4 and core.fault is None


def test_ctrl_c_between_waking_a_worker_and_noting_it_loses_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(dict[Any, None]):
        def __delitem__(self, slot: Any) -> None:
            monkeypatch.undo()
            b._pool._idle = dict(self)
            raise KeyboardInterrupt

    fn = Gated()
    with Batcher(fn, strategy=Dynamic(), max_batch_size=1, max_wait_ms=0, replicas=2) as b:
        until(lambda: len(b._pool._idle) == 2)
        with b._pool.lock:
            monkeypatch.setattr(b._pool, "_idle", Interrupted(b._pool._idle))
        with pytest.raises(KeyboardInterrupt):
            b.submit(0)
        futures = [b.submit(i) for i in (1, 2)]
        assert fn.entered.acquire(timeout=30) and fn.entered.acquire(timeout=30), "both workers are at work"
        fn.gate.release(2)
        assert [f.result(30) for f in futures] == [1, 2]
        until(lambda: len(b._pool._idle) == 2)


def test_ctrl_c_in_a_cancel_costs_nobody_their_place_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, max_queue=1) as b:
        core, line = b._pool.core, b._pool._backpressure
        running = b.submit(0)
        fn.entered.acquire()
        waiting = b.submit(1)
        held: list[Any] = []
        thread = threading.Thread(target=lambda: held.append(b.submit(2)))
        thread.start()
        until(lambda: line._line)
        with monkeypatch.context() as patched:
            patched.setattr(core, "submit", interrupted(core.submit, before=False))
            with pytest.raises(KeyboardInterrupt):
                waiting.cancel()
        assert core.state.waiting == 0 and len(line._line) == 1
        assert isinstance(line._line, OrderedDict), "the first of it is found at once, however many were before"
        fn.gate.release(2)
        thread.join(30)
        assert running.result(30) == 0 and held[0].result(30) == 2


def test_ctrl_c_where_the_queue_lets_go_of_an_item_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Gated()
    queue = grouping_of("arrival")
    with Batcher(fn, strategy=Dynamic(), grouping=queue, max_batch_size=4, max_wait_ms=0) as b:
        futures = [b.submit(0)]
        fn.entered.acquire()
        futures += [b.submit(1), b.submit(2)]
        monkeypatch.setattr(queue, "removed", interrupted(queue.removed, before=True))
        with pytest.raises(KeyboardInterrupt):
            futures.pop().cancel()
        futures.append(b.submit(3))
        fn.gate.release(2)
        assert [f.result(30) for f in futures] == [0, 1, 3]


def test_a_put_off_submit_that_another_thread_cancels_meanwhile_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    b, signal = batcher()
    submit = b._pool.submit

    def late(item: Item, **options: Any) -> None:
        if signal.found is not None and item is signal.found.item:
            thread = threading.Thread(target=signal.found.cancel)
            thread.start()
            thread.join(30)
        submit(item, **options)

    monkeypatch.setattr(b._pool, "submit", late)
    with b:
        signal.handler = lambda: b.submit(2)
        assert b.submit(1).result(30) == 2
        assert signal.found.cancelled() and not b._pool.core.state.waiting
        assert b.submit(3).result(30) == 6


def test_what_was_put_off_and_fails_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    b, signal = batcher()
    later: list[int] = []

    def fail() -> None:
        raise ValueError("put off")

    with b:
        signal.handler = lambda: b._pool._put_off.extend([fail, lambda: later.append(1)])
        assert b.submit(1).result(30) == 2
        assert later == [1] and "put off" in caplog.text
        assert b.submit(2).result(30) == 4


def test_ctrl_c_in_a_put_off_submit_fails_its_future(monkeypatch: pytest.MonkeyPatch) -> None:
    b, signal = batcher()
    core = b._pool.core
    with b:

        def handler() -> ItemFuture:
            monkeypatch.setattr(core, "submit", interrupted(core.submit, before=True))
            return b.submit(2)

        signal.handler = handler
        with pytest.raises(KeyboardInterrupt):
            b.submit(1)
        assert isinstance(signal.found.exception(0), StepFailedError)
        assert b.submit(3).result(30) == 6


@pytest.mark.parametrize("where", ["forget", "freed", "listener"])
def test_ctrl_c_in_a_cancel_leaves_no_future_without_an_outcome(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Gated()
    with Batcher(fn, strategy="dynamic", max_batch_size=1, max_wait_ms=0) as b:
        running = b.submit(0)
        fn.entered.acquire()
        waiting = b.submit(1)
        b.subscribe(SimpleNamespace(on_step=lambda step: None, on_request=lambda record: None))
        owner: Any
        owner, name = {
            "forget": (b._pool.core, "forget"), "freed": (b._pool, "_places_freed"), "listener": (b._pool.listeners, "tell")
        }[where]  # fmt: skip
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name), before=where != "forget"))
        with pytest.raises(KeyboardInterrupt):
            waiting.cancel()
        assert waiting.cancelled() and waiting.cancel()
        fn.gate.release()
        assert running.result(30) == 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("where", ["drop", "line", "tell", "refuse"])
def test_ctrl_c_in_a_close_that_does_not_drain_loses_no_item(
    where: str, times: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = Gated()
    b = Batcher(fn, strategy="dynamic", max_batch_size=1, max_wait_ms=0, max_queue=4)
    pool = b._pool
    running = b.submit(0)
    fn.entered.acquire()
    waiting = [b.submit(i) for i in range(1, 5)]
    for i in range(5, 8):
        waiting.append(b._future(b._item(i, 1)))
        pool.submit(waiting[-1].item, patient=True)
    owner: Any
    owner, name = {
        "drop": (pool.core, "forget"), "line": (pool._backpressure, "_refuse"), "tell": (pool_module, "end_early"),
        "refuse": (pool_module, "refuse"),
    }[where]  # fmt: skip
    found = getattr(owner, name)
    for _ in range(times):
        found = interrupted(found, before=before)
    monkeypatch.setattr(owner, name, found)
    for _ in range(times):
        with suppress(KeyboardInterrupt):
            pool.stop(drain=False)
    fn.gate.release(8)
    b.close(drain=False)
    assert running.result(0) == 0
    assert [type(future.exception(0)) for future in waiting] == [RequestCancelledError] * 4 + [RejectedError] * 3
    assert not pool.core.state.waiting and not pool.core._pending and not pool._untold


def test_ctrl_c_after_the_strategy_refused_one_in_line_still_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = Gated()
    b = Batcher(fn, strategy="dynamic", max_batch_size=1, max_wait_ms=0, max_queue=1)
    with b:
        running, waiting = b.submit(0), b.submit(1)
        fn.entered.acquire()
        until(lambda: running.running())
        held = [b._future(b._item(i, 1)) for i in (2, 3)]
        for future in held:
            b._pool.submit(future.item, patient=True)
        answers: list[BaseException] = [RejectedError("late", reason="slo"), KeyboardInterrupt()]

        def refused(item: Item, now: float) -> None:
            raise answers.pop(0)

        with monkeypatch.context() as patched:
            patched.setattr(b._pool.core, "submit", refused)
            with pytest.raises(KeyboardInterrupt):
                waiting.cancel()
        fn.gate.release(2)
        assert running.result(30) == 0 and held[1].result(30) == 3
        assert isinstance(held[0].exception(30), RejectedError)


def test_who_interrupts_the_end_of_a_call_that_nobody_waits_for_cannot_wait() -> None:
    fn = Gated()
    b = Batcher(fn, strategy="dynamic", max_batch_size=1, max_wait_ms=0)
    running = b.submit(0, timeout_s=100)
    fn.entered.acquire()
    b.submit(1)
    found: list[bool] = []

    def kill() -> None:
        if not found:
            found.append(b._pool.holds_up)
            with pytest.raises(RuntimeError, match="cannot wait"):
                running.result(30)
            b.close()
            fn.gate.release()

    b._pool._functions[0].kill = kill
    with b._pool.lock:
        assert b._pool.core.leave(running.item)
    b.close(drain=False)
    assert found == [True]


@pytest.mark.parametrize("named", ["batcher timekeeper", "batcher loop"])
def test_a_thread_that_is_refused_costs_one_item(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == named:
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")
        start(thread)

    async def fn(items: list[int]) -> list[int]:
        return items

    with Batcher(fn, strategy="dynamic", max_batch_size=4) as b:
        if named == "batcher timekeeper":
            assert b.submit(0).result(30) == 0
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            b.submit(1, timeout_s=60).result(30)
        assert not b._pool.core.state.waiting and not b._pool.core._pending
        assert b.submit(2, timeout_s=60).result(30) == 2
