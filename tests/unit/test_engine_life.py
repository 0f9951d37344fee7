"""How engines end: closed while they work, forgotten, or by the death of their thread. No hang."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime import (
    EngineClosedError,
    FinishReason,
    Knobs,
    RejectedError,
    RequestCancelledError,
    RequestError,
)
from runtime.llm.engine import Engine
from runtime.llm.stream import Stream
from runtime.request import Sequence
from tests.engines import Bench, bench
from tests.fakes import FakeExecutor, FakeModel


@contextmanager
def goes_on_once_closed(engine: Engine, executor: FakeExecutor) -> Iterator[None]:
    """The step that stands still ends as soon as the engine has been told to close, which the block does."""

    def watch() -> None:
        while not engine.closed:
            left.wait(0.001)
        with engine._loop._lock:  # whoever said so has also put it into the inbox
            executor.go()

    left = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    watcher.join(timeout=30)


def test_close_finishes_what_was_accepted() -> None:
    with bench(knobs=Knobs(max_batch_size=2)) as b:
        streams = [b.engine.submit([i], max_tokens=20) for i in range(10)]
        b.engine.close()
        assert all(stream.done and len(stream.result().token_ids) == 20 for stream in streams)
        b.engine.close()
        b.engine.close(drain=False)
        with pytest.raises(RejectedError, match="the engine is closed") as caught:
            b.engine.submit("a")
        assert caught.value.reason == "closed"
        assert b.engine.closed and "closed" in repr(b.engine)


@pytest.mark.parametrize("drain", [True, False])
def test_close_ends_though_the_last_request_ends_between_steps(drain: bool) -> None:
    """By its timeout, while the wait window holds it: no step follows."""
    with bench(knobs=Knobs(8, 5000, 64, 64)) as b:
        stream = b.engine.submit([1, 2], max_tokens=1, timeout_s=0.1)
        closing = threading.Thread(target=b.engine.close, args=(drain,), daemon=True)
        closing.start()
        closing.join(timeout=10)
        assert not closing.is_alive()
        with pytest.raises(RequestError):
            stream.result(timeout=10)
        assert b.heard.request().reason is (FinishReason.TIMEOUT if drain else FinishReason.ERROR)


def test_close_without_draining_cancels() -> None:
    with bench(knobs=Knobs(max_batch_size=2)) as b:
        streams = [*b.decoding(2), *(b.engine.submit("a", max_tokens=50) for _ in range(3))]
        with goes_on_once_closed(b.engine, b.executor):
            b.engine.close(drain=False)
        for stream in streams:
            with pytest.raises(RequestCancelledError, match="the engine was closed"):
                stream.result(timeout=30)
        ended = [b.heard.request() for _ in streams]
        assert {(r.reason, r.cause) for r in ended} == {(FinishReason.ERROR, "the engine was closed")}
        assert all(r.offered for r in ended), "that was no wish of their clients"


def test_close_while_many_are_busy() -> None:
    """Clients in threads and loops; whatever each was doing, it gets an answer or an error, and the engine ends."""
    with bench() as b:
        begun, ends = threading.Semaphore(0), []

        def client(n: int) -> None:
            try:
                while True:
                    begun.release()
                    if n % 2:
                        list(b.engine.stream([n], max_tokens=50))
                    else:
                        asyncio.run(b.engine.agenerate([n], max_tokens=50))
            except (RejectedError, RequestCancelledError) as error:
                ends.append(error)

        clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in clients:
            thread.start()
        for _ in range(30):
            begun.acquire()
        closers = [threading.Thread(target=b.engine.close, args=(n % 2 == 0,)) for n in range(4)]
        for thread in [*closers, *clients]:
            if thread in closers:
                thread.start()
        for thread in [*closers, *clients]:
            thread.join(timeout=30)
            assert not thread.is_alive()
        assert len(ends) == 8


def test_a_second_close_cuts_the_first_short() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=200)[0]
        first = threading.Thread(target=b.engine.close)
        first.start()
        while not b.engine.closed:
            first.join(timeout=0.001)
        b.step()  # it has taken note, and still drains
        second = threading.Thread(target=b.engine.close, args=(False,))
        second.start()
        while b.engine._loop._inbox.empty():  # until the second has said so
            second.join(timeout=0.001)
        b.executor.go()
        first.join(timeout=30)
        with pytest.raises(RequestCancelledError):
            stream.result(timeout=30)


def test_a_block_that_raises_does_not_wait() -> None:
    executor = FakeExecutor()
    engine = Engine(FakeModel(), executor=executor, kv_tokens=512)
    with goes_on_once_closed(engine, executor), pytest.raises(KeyError), engine:
        executor.hold()
        stream = engine.submit("a", max_tokens=200)
        assert executor.held.acquire(timeout=30)
        raise KeyError
    with pytest.raises(RequestCancelledError):
        stream.result(timeout=30)


def test_close_from_a_listener() -> None:
    with bench() as b:
        b.heard.on_step = lambda record: b.engine.close(drain=False)  # type: ignore[method-assign]
        stream = b.engine.submit("a", max_tokens=50)
        with pytest.raises(RequestCancelledError, match="the engine was closed"):
            stream.result(timeout=30)
        b.engine.close()


def test_an_engine_lives_as_long_as_its_streams() -> None:
    stream = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512).submit("a", max_tokens=50)
    gc.collect()
    assert len(stream.result(timeout=30).token_ids) == 50


def test_a_forgotten_engine_stops_its_thread() -> None:
    engine = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512)
    assert engine.submit("a", max_tokens=3).result(timeout=30)
    thread, gone = engine._loop._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del engine, stream, reader"])
def test_a_forgotten_engine_does_not_hold_up_the_interpreter(ending: str) -> None:
    code = f"""
from runtime.clock import MonotonicClock
from runtime.llm.engine import Engine
from tests.fakes import FakeExecutor, FakeModel, Heard
class Says(Heard):
    def on_request(self, record):
        print(record.reason.value)
engine = Engine(FakeModel(max_model_len=10**9), executor=FakeExecutor(), kv_tokens=10**7)
engine.subscribe(Says())
stream = engine.submit("a", max_tokens=9 * 10**6)
reader = iter(stream)
next(reader)
{ending}
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\n", "")


class ThreadDies(BaseException):
    """What nobody catches."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_everybody_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    dying = threading.Event()

    def sample(sequence: Sequence) -> int:
        if dying.is_set():
            raise ThreadDies("out")
        return 65

    executor = FakeExecutor(sample)
    engine = Engine(FakeModel(), executor=executor, kv_tokens=512)
    b = Bench(engine, executor)
    streams = b.decoding(2)
    streams.append(engine.submit("late"))
    errors: list[Exception] = []

    def read(stream: Stream) -> None:
        try:
            list(stream)
        except EngineClosedError as error:
            errors.append(error)

    async def aread() -> None:
        async for _ in streams[0]:
            pass

    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    views: list[object] = []
    asking = threading.Thread(target=lambda: views.append(engine.view()))
    for thread in [*readers, asking]:
        thread.start()
    dying.set()
    executor.go()
    for thread in [*readers, asking]:
        thread.join(timeout=30)
    assert len(errors) == 3 and len(views) == 1
    assert all(isinstance(error.__cause__, ThreadDies) for error in errors)
    with pytest.raises(EngineClosedError, match="the engine stopped: ThreadDies"):
        asyncio.run(aread())
    with pytest.raises(EngineClosedError):
        streams[0].result()
    with pytest.raises(RejectedError, match="the engine stopped: ThreadDies") as caught:
        engine.submit("a")
    assert isinstance(caught.value.__cause__, ThreadDies)
    with pytest.raises(EngineClosedError, match="ThreadDies"):
        engine.set_knobs(Knobs(token_budget=1))
    assert {b.heard.request().reason for _ in range(2)} == {FinishReason.ERROR}
    engine.close()
    assert "the engine's thread died" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_whose_queueing_kills_the_thread_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=512)

    def broken(request: object, now: float) -> None:
        raise ThreadDies("in the queue")

    monkeypatch.setattr(engine._core, "add", broken)
    stream = engine.submit("a")
    with pytest.raises(EngineClosedError, match="ThreadDies"):
        stream.result(timeout=30)
    assert not engine.cancel(stream.request_id)
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_whose_last_token_is_lost_with_the_thread_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    engine = Engine(FakeModel(), executor=executor, kv_tokens=512)
    b = Bench(engine, executor)
    (stream,) = b.decoding(1, max_tokens=4)

    recorded = engine._core._record

    def broken(*of: Any) -> Any:
        if engine._core.undelivered:
            raise ThreadDies("behind the end of a request")
        return recorded(*of)

    monkeypatch.setattr(engine._core, "_record", broken)
    executor.go()
    with pytest.raises(EngineClosedError, match="ThreadDies"):
        stream.result(timeout=30)
    assert len(stream.token_ids) == 3
    record = b.heard.request()
    assert record.reason is FinishReason.ERROR and "ThreadDies" in record.cause
    engine.close()


def test_ctrl_c_within_a_submit_costs_nobody_else_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key == "mine":
                raise KeyboardInterrupt
            super().__setitem__(key, value)

    with bench() as b:
        monkeypatch.setattr(b.engine._loop, "_live", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            b.engine.submit("a", request_id="mine", max_tokens=3)
        b.heard.request()
        assert len(b.engine.submit("b", request_id="other", max_tokens=3).result(timeout=30).token_ids) == 3
        assert b.engine._loop._on_the_way == 0


class Signalled(dict[str, Any]):
    """The engine's live requests. Looking among them calls ``handler`` once, as a signal does between two instructions:
    ``submit`` looks and puts under its lock."""

    def __init__(self, where: str, handler: Callable[[], object]) -> None:
        super().__init__()
        self.where, self.handler, self.found = where, handler, list[object]()

    def _signal(self, where: str) -> None:
        if where == self.where and not self.found:
            self.found.append(None)
            self.found[0] = self.handler()

    def __contains__(self, key: object) -> bool:
        self._signal("before")
        return super().__contains__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._signal("behind")
        super().__setitem__(key, value)


@contextmanager
def no_deadlock() -> Iterator[None]:
    """The whole process ends, and says where it stands, unless the block does."""
    faulthandler.dump_traceback_later(30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_signal_handler_that_closes_within_a_submit_holds_up_nobody(
    where: str, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``before``: the request stands behind the end in the inbox. ``behind``: it was accepted."""
    with no_deadlock(), bench() as b:
        live = Signalled(where, lambda: b.engine.close(drain=drain))
        monkeypatch.setattr(b.engine._loop, "_live", live)
        stream = b.engine.submit("a", max_tokens=3)
        if where == "behind" and drain:
            assert len(stream.result(timeout=30).token_ids) == 3
        else:
            with pytest.raises(RejectedError if where == "before" else RequestCancelledError, match="closed") as caught:
                stream.result(timeout=30)
            assert where == "behind" or caught.value.reason == "closed"  # type: ignore[attr-defined]
        record = b.heard.request()
        assert stream.record == record
        assert (record.reason is FinishReason.ERROR) == (where == "behind" and not drain), "accepted, and cut"
        b.engine.close()
        assert b.engine.error is None and not b.engine._loop._thread.is_alive() and not live


def test_a_signal_handler_that_sets_knobs_or_submits_within_a_submit_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with no_deadlock(), bench() as b:

        def handler() -> Stream:
            b.engine.set_knobs(chunk_size=8)
            return b.engine.submit("x", max_tokens=2)

        live = Signalled("before", handler)
        monkeypatch.setattr(b.engine._loop, "_live", live)
        assert len(b.engine.submit("a", max_tokens=3).result(timeout=30).token_ids) == 3
        [other] = live.found
        assert isinstance(other, Stream) and len(other.result(timeout=30).token_ids) == 2
        assert b.engine.knobs.chunk_size == 8 and b.engine._loop._on_the_way == 0


@pytest.mark.parametrize("wait", [lambda engine, stream: engine.view(), lambda engine, stream: stream.result()])
def test_a_signal_handler_within_a_submit_is_told_that_it_cannot_wait(
    wait: Callable[[Engine, Stream], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_deadlock(), bench() as b:
        (running,) = b.decoding(1)

        def handler() -> None:
            with pytest.raises(RuntimeError, match="a signal handler that interrupts a call of the engine"):
                wait(b.engine, running)

        monkeypatch.setattr(b.engine._loop, "_live", Signalled("before", handler))
        stream = b.engine.submit("a", max_tokens=3)
        b.executor.go()
        assert len(stream.result(timeout=30).token_ids) == 3 and b.engine.view()


FORKS = """
import os, signal, sys
from runtime.errors import EngineClosedError
from runtime.llm.engine import Engine
from tests.fakes import FakeExecutor, FakeModel

def told(call):
    try:
        call()
    except EngineClosedError as error:
        assert "before this one was forked; make it here" in str(error), error
    else:
        raise AssertionError(call)

executor = FakeExecutor()
engine = Engine(FakeModel(), executor=executor, kv_tokens=256)
assert engine.submit([1, 2], max_tokens=3).result(timeout=30)
executor.hold()
running = engine.submit([1, 2], max_tokens=3, request_id="running")
assert executor.held.acquire(timeout=30)
engine._loop._lock.acquire()  # as by the engine's thread, in the moment of the fork
child = os.fork()
if child == 0:
    signal.alarm(20)
    told(lambda: engine.submit([1, 2]))
    told(lambda: engine.view())
    told(lambda: engine.set_knobs(chunk_size=8))
    told(lambda: engine.set_admission(True))
    told(lambda: running.result(timeout=10))
    told(lambda: next(iter(running)))
    assert engine.closed and not engine.cancel("running")
    engine.close()
    sys.exit(7)  # as a process ends
engine._loop._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
executor.go()
assert len(running.result(timeout=30).token_ids) == 3
assert engine.submit([1, 2], max_tokens=3).result(timeout=30) and not engine.closed
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_to_make_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
