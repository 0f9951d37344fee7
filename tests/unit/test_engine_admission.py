"""Requests that a live engine rejects because they would come too late."""

from __future__ import annotations

import time

import pytest

from runtime import (
    SLO,
    AdmissionPolicy,
    EngineClosedError,
    FinishReason,
    Knobs,
    LeaseError,
    RejectedError,
    RequestClass,
    RequestTimeoutError,
)
from runtime.llm.prefill_rate import RateSource
from tests.engines import bench


def test_what_comes_too_late_is_rejected() -> None:
    """By prediction at arrival and by the queue's timeout: the stream says why, the record says so too."""
    policy = AdmissionPolicy(queue_timeout=30.0)
    with bench(slo="ttft=50ms", admission=policy, knobs=Knobs(8, 0, 4, 4)) as b:
        assert b.engine.admission == policy
        b.engine.set_admission(policy, source=SlowRate())
        b.executor.hold()
        first = b.engine.submit([1, 2, 3], max_tokens=1)  # nothing before it: a probe, whatever is predicted
        b.held()
        late = b.engine.submit([5, 6], max_tokens=1)
        b.executor.go()
        assert first.result(timeout=30).token_ids
        with pytest.raises(RejectedError, match="its first token is predicted after") as caught:
            late.result(timeout=30)
        assert caught.value.reason == "slo" and caught.value.retry_after_s and caught.value.retry_after_s > 0
        refused = next(r for r in (b.heard.request(), b.heard.request()) if not r.completed)
        assert (refused.reason, refused.cause) == (FinishReason.REJECTED, "slo")
        assert refused.retry_after_s == caught.value.retry_after_s and refused.scheduled is None
        b.engine.set_admission(AdmissionPolicy(late=None, queue_timeout=0.01))
        b.executor.hold()
        running = b.engine.submit([1], max_tokens=3)
        b.held()
        waiting = b.engine.submit([2], max_tokens=1)
        time.sleep(0.02)
        b.executor.go()
        assert running.result(timeout=30)
        with pytest.raises(RejectedError) as caught:
            waiting.result(timeout=30)
        assert caught.value.reason == "queue_timeout" and caught.value.retry_after_s
        b.engine.set_admission(False)
        assert b.engine.submit([3], max_tokens=1).result(timeout=30)
        assert b.engine.admission is None


def test_the_policy_last_set_is_told_at_once() -> None:
    """As knobs and SLOs are, though it is in force from the next step on."""
    policy = AdmissionPolicy(queue_timeout=3.0)
    with bench() as b:
        b.executor.hold()
        running = b.engine.submit([1, 2, 3], max_tokens=2)
        b.held()
        b.engine.set_admission(policy)
        assert b.engine.admission == policy
        b.engine.set_admission(False)
        assert b.engine.admission is None
        b.engine.set_admission(policy)
        with b.engine.acquire("somebody"), pytest.raises(LeaseError):
            b.engine.set_admission(None)
        with pytest.raises(ValueError, match="admission is 'reject'"):
            b.engine.set_admission("reject")  # type: ignore[arg-type]
        assert b.engine.admission == policy
        b.executor.go()
        assert running.result(timeout=30)
    with pytest.raises(EngineClosedError):
        b.engine.set_admission(None)
    assert b.engine.admission == policy


def test_what_comes_too_late_is_computed_after_what_can_be_met() -> None:
    """Its client waits and has its answer; the record ends as any other."""
    slos = [RequestClass("patient", SLO(ttft_ms=100_000))]
    with bench(slo="ttft=50ms", classes=slos, admission=AdmissionPolicy(late="relegate"), knobs=Knobs(1, 0, 4, 4)) as b:
        b.engine.set_admission(b.engine.admission, source=SlowRate())
        b.executor.hold()
        first = b.engine.submit([1, 2, 3], max_tokens=2)
        b.held()
        late = [b.engine.submit([5, 6], max_tokens=1) for _ in range(3)]
        patient = b.engine.submit([7], max_tokens=1, request_class="patient")
        short = b.engine.submit([8], max_tokens=1, timeout_s=0.01)
        time.sleep(0.02)
        b.executor.go()
        assert all(stream.result(timeout=30).token_ids for stream in (first, *late, patient))
        with pytest.raises(RequestTimeoutError):
            short.result(timeout=30)
        records = sorted((b.heard.request() for _ in range(6)), key=lambda r: r.scheduled or 0.0)
        ids = [r.id for r in records if r.completed]
        assert ids == [s.request_id for s in (first, patient, *late)]
        assert not any(r.cause for r in records if r.completed)
        assert [r.reason for r in records if not r.completed] == [FinishReason.TIMEOUT]


class SlowRate(RateSource):
    prefill_rate = 1.0
