"""How one request ends before its time: cancelled or out of time in every state, or by a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime import (
    FinishReason,
    Knobs,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)
from runtime.clock import MonotonicClock
from runtime.llm.engine import Engine
from runtime.llm.stream import Stream
from runtime.request import Sequence
from tests.engines import Bench, bench


def in_the_inbox(b: Bench) -> Stream:
    b.decoding(1)
    return b.engine.submit("a", max_tokens=50)


def waiting(b: Bench) -> Stream:
    b.engine.set_knobs(Knobs(max_batch_size=1))
    b.others = b.decoding(1)  # type: ignore[attr-defined]
    stream = b.engine.submit("a", max_tokens=50)
    b.step()
    return stream


def prefilling(b: Bench) -> Stream:
    b.engine.set_knobs(Knobs(chunk_size=2))
    b.executor.hold()
    stream = b.engine.submit("abcdefgh", max_tokens=50)
    b.held()
    b.step()
    return stream


def decoding(b: Bench) -> Stream:
    return b.decoding(1)[0]


def preempted(b: Bench) -> Stream:
    b.executor.hold()
    old = b.others = b.engine.submit(list(range(30)), max_tokens=64)  # type: ignore[attr-defined]
    b.held()
    new = b.engine.submit(list(range(100, 130)), max_tokens=64)
    while not any(plan.preemptions for plan in b.executor.plans):
        b.step()
    assert b.executor.plans[-1].n_decode == 1 and not old.done
    return new


STATES = [in_the_inbox, waiting, prefilling, decoding, preempted]


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(state: Callable[[Bench], Stream]) -> None:
    with bench(kv_tokens=96) as b:
        stream = state(b)
        had = len(stream.token_ids)
        assert b.engine.cancel(stream.request_id)
        b.executor.go()
        with pytest.raises(RequestCancelledError, match=f"request {stream.request_id} was cancelled"):
            stream.result(timeout=30)
        assert stream.record is not None and stream.record.reason is FinishReason.CANCELLED
        assert had <= len(stream.token_ids) <= had + 1
        assert not b.engine.cancel(stream.request_id)
        assert b.engine.submit("a", max_tokens=2).result(timeout=30).text == "bc"


class ClockThatJumps(MonotonicClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.parametrize("state", STATES)
def test_timeout_in_every_state(state: Callable[[Bench], Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, submit = ClockThatJumps(), Engine.submit
    monkeypatch.setattr("runtime.llm.engine.MonotonicClock", lambda: clock)
    monkeypatch.setattr(Engine, "submit", lambda self, *a, **k: submit(self, *a, **{"timeout_s": 1000.0, **k}))
    with bench(kv_tokens=96) as b:
        stream = state(b)
        clock.ahead = 1001.0
        b.executor.go()
        with pytest.raises(RequestTimeoutError, match=f"request {stream.request_id} timed out after 1001"):
            stream.result(timeout=30)
        assert stream.record is not None and stream.record.reason is FinishReason.TIMEOUT


def test_timeout_of_a_request_that_only_waits() -> None:
    """Nothing runs, so the engine itself must wake up for it."""
    with bench(knobs=Knobs(max_wait_ms=10000)) as b:
        stream = b.engine.submit("a", timeout_s=0.05)
        with pytest.raises(RequestTimeoutError):
            stream.result(timeout=9)  # the window is 10 s
        assert not b.executor.plans
        assert b.heard.request().reason is FinishReason.TIMEOUT


def test_a_deadline_cancels_nothing() -> None:
    with bench() as b:
        assert b.engine.submit("a", max_tokens=3, deadline_s=1e-9).result(timeout=30).text == "bcd"


def test_cancelling_what_has_ended() -> None:
    with bench() as b:
        stream = b.engine.submit("a", max_tokens=2)
        assert stream.result(timeout=30).text == "bc"
        stream.cancel()
        assert not b.engine.cancel(stream.request_id) and not b.engine.cancel("nobody")
        assert b.engine.submit("a", max_tokens=1).result(timeout=30)
        assert stream.result().text == "bc" and [e.text for e in stream] == ["b", "c"]


def test_result_times_out_and_the_request_goes_on() -> None:
    with bench() as b:
        stream = b.decoding(1, max_tokens=5)[0]
        with pytest.raises(TimeoutError, match=r"has not finished within 0\.01 s"):
            stream.result(timeout=0.01)
        b.executor.go()
        assert stream.result(timeout=30).token_ids == (1, 2, 3, 4, 5)


def test_tokens_before_a_fault_are_delivered() -> None:
    def sample(sequence: Sequence) -> int:
        if len(sequence.output) == 3:
            raise ZeroDivisionError("three")
        return 65

    with bench(sample) as b:
        stream = b.engine.submit("x", max_tokens=9)
        got = []
        with pytest.raises(StepFailedError, match="failed after 3 tokens: ZeroDivisionError: three") as caught:
            for event in stream:
                got.append(event.text)
        assert got == ["A"] * 3 and isinstance(caught.value.__cause__, ZeroDivisionError)
        assert b.heard.request().cause == "ZeroDivisionError: three"
