"""An ordering or a listener that somebody wrote may raise anywhere: the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from runtime.errors import RejectedError, StepFailedError
from runtime.llm.admission import AdmissionPolicy
from runtime.ordering import Queued
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import Request
from runtime.shared.listeners import Listeners
from runtime.tunable import SchedulerView
from tests.engines import bench
from tests.unit.scheduler_world import World


class Picky:
    """First come, first served, by ``makes`` of the first prompt token."""

    def __init__(self, **makes: Any) -> None:
        self.makes = makes
        self.raises_on = 666

    def key(self, request: Request) -> float:
        first = request.prompt[0]
        if first == self.raises_on:
            raise ZeroDivisionError("no place for this one")
        return self.makes.get(f"t{first}", request.arrival)  # type: ignore[no-any-return]

    def took(self, request: Request, key: float) -> None:
        if request.prompt[0] == 7:
            raise LookupError("never heard of it")


@pytest.mark.parametrize(
    ("first", "told"),
    [(100, "no place for this one"), (101, "NaN"), (102, "could not convert"), (103, "TypeError")],
    ids=["raises", "nan", "text", "none"],
)
def test_an_ordering_that_raises_fails_that_request(first: int, told: str) -> None:
    picky = Picky(t101=float("nan"), t102="soon", t103=None)
    picky.raises_on = 100
    with bench(ordering=picky) as b:
        with pytest.raises(StepFailedError, match=told) as raised:
            b.engine.submit([first], max_tokens=4).result(timeout=30)
        record = b.heard.request()
        assert record.reason is FinishReason.ERROR and told in record.cause and "ordering" in record.cause
        assert first != 100 or isinstance(raised.value.__cause__, ZeroDivisionError)
        assert b.engine.submit([1], max_tokens=4).result(timeout=30).token_ids
        assert not b.engine.closed


def test_an_ordering_that_raises_when_a_request_begins_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with bench(ordering=Picky()) as b:
        assert b.engine.submit([7], max_tokens=4).result(timeout=30).token_ids
    assert "the ordering raised when request" in caplog.text and "never heard of it" in caplog.text


def test_an_ordering_that_raises_when_it_comes_back_into_force_fails_only_those_it_raises_for() -> None:
    picky = Picky()
    picky.raises_on = 9
    with bench(ordering=picky, admission=AdmissionPolicy(late=None, queue_timeout=None)) as b:
        [running] = b.decoding(1)
        b.engine.set_knobs(b.engine.knobs.with_(max_batch_size=1))
        bad, good = b.engine.submit([9], max_tokens=2), b.engine.submit([8], max_tokens=2)
        b.step()  # both wait
        b.engine.set_admission(None)
        b.executor.go()
        with pytest.raises(StepFailedError, match="no place for this one"):
            bad.result(timeout=30)
        assert good.result(timeout=30).token_ids and running.result(timeout=30).token_ids


class Quits:
    """``on_step`` and ``on_request`` raise what is no Exception."""

    def on_step(self, record: StepRecord) -> None:
        raise SystemExit(3)

    def on_request(self, record: RequestRecord) -> None:
        raise SystemExit(3)


def test_a_listener_that_raises_what_is_no_exception_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    with bench(max_queue=1) as b:
        [running] = b.decoding(1)
        b.engine.subscribe(Quits())
        waits = b.engine.submit([1], max_tokens=2)
        with pytest.raises(RejectedError):
            b.engine.submit([2])  # its record is told in the engine's thread, between two steps
        b.step()
        b.executor.go()
        assert waits.result(timeout=30).token_ids and running.result(timeout=30).token_ids and not b.engine.closed
    assert caplog.text.count("raised and will hear no more") == 1


class Raises:
    """A step policy, an ordering that learns, and a listener, whose ``method`` raises ``error``."""

    def __init__(self, method: str, error: BaseException) -> None:
        self._method, self._error = method, error

    def _call(self, method: str) -> None:
        if method == self._method:
            raise self._error

    def budget(self, view: SchedulerView) -> int:
        self._call("budget")
        return view.knobs.token_budget

    def key(self, queued: Queued) -> float:
        self._call("key")
        return queued.arrival

    def took(self, queued: Queued, key: float) -> None:
        self._call("took")

    def left(self, queued: Queued, key: float) -> None:
        self._call("left")

    def on_step(self, record: StepRecord) -> None:
        self._call("on_step")

    def on_request(self, record: RequestRecord) -> None:
        self._call("on_request")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("method", ["budget", "key", "took", "left", "on_step", "on_request"])
def test_what_is_no_exception_ends_no_engine_in_its_thread(method: str, error: BaseException) -> None:
    raises = Raises(method, error)
    with bench(ordering=raises, max_queue=8) as b:
        b.engine.set_step_policy(raises)
        b.engine.subscribe(raises)
        if method == "left":
            b.decoding(1)
            waits = b.engine.submit([1], max_tokens=2, request_id="waits")
            waits.cancel()
            b.executor.go()
        if method == "key":
            with pytest.raises(StepFailedError, match="its ordering raised"):
                b.engine.submit([1], max_tokens=2).result(timeout=30)
        else:
            assert b.engine.submit([1], max_tokens=2).result(timeout=30).token_ids
        assert b.engine.error is None and not b.engine.closed


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["budget", "key", "took", "left", "on_step", "on_request"])
def test_what_a_signal_handler_raises_in_a_policy_or_an_ordering_ends_the_program(
    method: str, error: BaseException
) -> None:
    """In the main thread, where a simulation runs."""
    w = World(kv_blocks=20, ordering=Raises(method, error))  # type: ignore[arg-type]
    w.core.settings.set_policy(Raises(method, error))
    with pytest.raises(type(error)):
        first = w.add(prompt=[1, 2], max_tokens=2)
        if method == "left":
            w.cancel(first)
        while True:
            w.step()
    assert w.core.settings.policy is not None


class Hears:
    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        pass


def test_a_subscription_that_ends_is_no_other() -> None:
    listeners, hears, other = Listeners(), Hears(), Hears()
    first = listeners.subscribe(hears)
    listeners.subscribe(other)
    listeners.subscribe(hears)
    for _ in range(2):  # it ends once
        first()
        assert listeners.known == (other, hears)


def test_who_raises_is_cut_off_however_often_it_subscribed() -> None:
    listeners, quits, hears = Listeners(), Quits(), Hears()
    for one in (quits, hears, quits):
        listeners.subscribe(one)
    listeners.tell(None, [None])  # type: ignore[list-item]
    assert listeners.known == (hears,)


def test_an_interrupt_while_a_listener_hears_is_for_whoever_waits() -> None:
    class Interrupted:
        def on_request(self, record: RequestRecord) -> None:
            raise KeyboardInterrupt

    listeners = Listeners()
    listeners.subscribe(Interrupted())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        listeners.tell(None, [None])  # type: ignore[list-item]
    assert not listeners.known


def test_a_change_that_raises_leaves_the_engine_running(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def change() -> None:
        done.set()
        raise ZeroDivisionError("no such change")

    with bench() as b, caplog.at_level(logging.ERROR):
        b.engine._loop.post(change)
        assert done.wait(30)
        assert b.engine.submit([1], max_tokens=4).result(timeout=30).token_ids
    assert "no such change" in caplog.text
