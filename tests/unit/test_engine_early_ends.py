"""How one request ends before its time: cancelled or out of time in every state, or by a fault."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from autotune import control
from runtime import (
    FinishReason,
    Knobs,
    RejectedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)
from runtime.clock import MonotonicClock
from runtime.llm.engine import Engine
from runtime.llm.stream import Stream
from runtime.request import Sequence
from runtime.serving.streaming import end_all
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


def test_a_cancel_says_nothing_of_how_the_request_ends() -> None:
    """As the callback of a future calls it: what it is given never comes to the engine's thread."""
    with bench(slo="ttft=30s") as b, control(b.engine) as attached:
        stream, other = b.decoding(2, max_tokens=9)
        for cancel in (stream.cancel, stream.close):
            with pytest.raises(TypeError):
                cancel("the user pressed stop")  # type: ignore[call-arg]
        done: Future[None] = Future()
        done.add_done_callback(stream.cancel)  # type: ignore[arg-type]
        done.set_result(None)
        b.executor.go()
        assert len(stream.result(timeout=30).token_ids) == len(other.result(timeout=30).token_ids) == 9
        b.engine.view()  # who listens has heard of both by then
        assert attached.status().attainment.offered == 2


@pytest.mark.parametrize("error", [StepFailedError("another"), RejectedError("another", reason="slo")])
def test_blocks_of_a_request_that_was_ended_from_outside_are_sound(error: Exception) -> None:
    with bench() as b:
        b.executor.hold()
        stream = b.engine.submit([7] * 96, max_tokens=100)
        b.held()
        b.step()
        b.step()
        end_all([stream], error)
        b.executor.go()
        with pytest.raises(StepFailedError):
            stream.result(timeout=30)
        assert b.engine.generate([[7] * 96], max_tokens=1)[0].record.cached_tokens == 80


@pytest.mark.parametrize("state", STATES)
def test_what_has_tokens_is_not_rejected(state: Callable[[Bench], Stream]) -> None:
    """Where another request of the same call was, for being late."""
    with bench(kv_tokens=96, slo="ttft=30s") as b:
        stream = state(b)
        begun = bool(stream.token_ids)
        end_all([stream], RejectedError("another would be late", reason="slo"))
        b.executor.go()
        with pytest.raises(StepFailedError if begun else RejectedError):
            stream.result(timeout=30)
        record = stream.record
        assert record is not None and record.offered
        if begun:
            said = "rejected after its first token: same_call"
            assert (record.reason, record.cause) == (FinishReason.ERROR, said)
        else:
            assert (record.reason, record.cause) == (FinishReason.REJECTED, "same_call")


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
