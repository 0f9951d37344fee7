"""The batcher as a tunable: knobs, lease, records, view; under a controller; and measured like an engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import autotune
from autotune.control.controllers.static import StaticController
from autotune.engines.callable import CallableEngine
from autotune.measure.evaluate import evaluate
from autotune.workload.parse import parse_workload
from runtime import SLO, Batcher, EngineClosedError, Knobs, LeaseError
from runtime.tunable import SchedulerView
from tests.fakes import Records


def same(items: list[Any]) -> list[Any]:
    return items


def test_records_say_what_happened_in_the_engines_words() -> None:
    heard = Records()
    with Batcher(same, cost=len, slo="e2e=30s") as b:
        end = b.subscribe(heard)
        b("four", tenant="t", priority=2, request_id="mine")
        end()
        b("unheard")
    (step,), (request,) = heard.steps, heard.requests
    assert (step.chunks, step.prefill_tokens, step.prefill_attention, step.sampled, step.failed) == (1, 4, 10, 1, 0)
    assert (request.id, request.tenant, request.priority, request.reason) == ("mine", "t", 2, "stop")
    assert (request.prompt_tokens, request.output_tokens, request.epoch_first, request.epoch_last) == (4, 1, 0, 0)
    assert request.arrival <= (request.scheduled or 0) == step.start <= step.end == request.token_times[0]
    assert request.e2e == request.ttft and b.slos["default"].met(request)


def test_a_change_of_knobs_holds_from_the_next_call_on() -> None:
    sizes: list[int] = []
    gate, entered = threading.Semaphore(0), threading.Semaphore(0)

    def work(items: list[int]) -> list[int]:
        sizes.append(len(items))
        entered.release()
        assert gate.acquire(timeout=30)
        return items

    with Batcher(work, strategy="dynamic", max_batch_size=8, max_wait_ms=0) as b:
        futures = [b.submit(0)]
        entered.acquire()
        futures += [b.submit(i) for i in range(1, 21)]
        assert b.set_knobs(b.knobs.with_(max_batch_size=3)) == 1 == b.epoch
        gate.release(20)
        assert [f.result(30) for f in futures] == list(range(21))
    assert sizes[0] == 1 and max(sizes[1:]) == 3
    with pytest.raises(EngineClosedError):
        b.set_knobs(Knobs())


def test_a_knob_that_changes_ends_a_wait() -> None:
    with Batcher(same, strategy="dynamic", max_batch_size=8, max_wait_ms=10000) as b:
        future = b.submit(1)
        b.set_knobs(b.knobs.with_(max_wait_ms=0))
        assert future.result(9) == 1  # the window was 10 s


def test_one_controller_at_a_time() -> None:
    with Batcher(same) as b:
        lease = b.acquire("me")
        with pytest.raises(LeaseError):
            b.acquire("you")
        with pytest.raises(LeaseError):
            b.set_knobs(Knobs())
        with pytest.raises(LeaseError):
            b.set_step_policy(None)
        b.set_knobs(b.knobs.with_(max_batch_size=4), lease=lease)
        lease.release()
        assert b.knobs.max_batch_size == 4


def test_a_step_policy_gives_each_call_its_budget() -> None:
    class Five:
        def budget(self, view: SchedulerView) -> int:
            return 5 if view.waiting < 100 else 1

    heard = Records()
    with Batcher(same, cost=lambda item: 2) as b:
        b.subscribe(heard)
        b.set_step_policy(Five())
        assert list(b.map(range(50))) == list(range(50))
        b.set_step_policy(Broken())
        assert b(1) == 1
    assert max(step.prefill_tokens for step in heard.steps) <= 4


class Broken:
    def budget(self, view: SchedulerView) -> int:
        raise RuntimeError


@pytest.mark.parametrize("controller", ["predictive", "static"])
def test_a_controller_attaches_to_it(controller: str) -> None:
    with (
        Batcher(same, slo="e2e=1s") as b,
        autotune.control(b, slo="e2e=500ms", controller=controller, interval_s=0.001) as c,
    ):
        assert b.slos["default"] == SLO(e2e_ms=500)
        for _ in range(3):
            assert list(b.map(range(200))) == list(range(200))
        with pytest.raises(LeaseError):
            b.set_knobs(Knobs())
        status = c.status()
        assert not status.ended and status.attainment.offered > 0
        c.set(max_batch_size=7)
        assert b.knobs.max_batch_size == 7
    assert b.closed


def test_a_controllers_static_knobs_are_put_in_force() -> None:
    with Batcher(same) as b:
        knobs = b.knobs.with_(max_batch_size=5)
        with autotune.control(b, slo="e2e=1s", controller=StaticController(knobs), interval_s=0.001):
            for _ in range(200):  # the guardrails let it come there step by step
                list(b.map(range(100)))
                if b.knobs.max_batch_size == 5:
                    break
            assert b.knobs.max_batch_size == 5


def test_it_is_measured_like_an_engine() -> None:
    workload = parse_workload("poisson:rate=200,prompt=8,output=1")
    with Batcher(same, cost=len, slo="e2e=2s") as b:
        served = CallableEngine(b, ["a", "bb", "ccc"])
        score = evaluate(
            served, b.knobs.with_(max_batch_size=16), workload, SLO(e2e_ms=2000), vocab_size=64, seed=3, duration=0.5
        )
    assert score.attainment > 0.95


def test_who_holds_a_batcher_holds_it_with_inputs_too() -> None:
    with Batcher(same) as b, b.acquire("somebody") as lease:
        served = CallableEngine(b, ["a"])
        with pytest.raises(LeaseError):
            served.set_knobs(max_batch_size=8)
        served.set_knobs(max_batch_size=8, lease=lease)
        assert b.knobs.max_batch_size == 8


def test_inputs_are_needed_to_measure() -> None:
    with Batcher(same) as b, pytest.raises(ValueError, match="inputs is empty"):
        CallableEngine(b, [])


class Raising(StaticController):
    """A controller whose budget is no use."""

    def budget(self, view: SchedulerView) -> int:
        raise ZeroDivisionError("no budget")


def test_a_controller_whose_budget_raises_is_detached_and_holds_nothing_up() -> None:
    """It is asked under the batcher's own lock, in which no knob can be put back: that waits for the record of the call."""
    with Batcher(same) as b:
        before = b.knobs
        control = autotune.control(b, slo="e2e=30s", controller=Raising(before))
        assert [b.submit(n).result(timeout=60) for n in range(3)] == [0, 1, 2]
    assert control.status().ended and b.knobs == before
    assert any("ZeroDivisionError: no budget" in d.cause for d in control.decisions)
