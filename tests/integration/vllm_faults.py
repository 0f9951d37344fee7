"""Run by the pytest of an environment with vLLM's scheduler (see test_vllm_agrees.py): a fault of this project's own code in the
middle of a run leaves the vLLM that there would be without it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as Stock

from autotune.control.decision_log import read_decisions
from autotune.engines.vllm.scheduler import REJECTED
from runtime.errors import EngineClosedError
from runtime.knobs import KnobLimits, Knobs
from tests.integration.vllm_tunes import OverlappingExecutor, Served, SlowExecutor, alone, folder, serve
from tests.vllm_fakes import vllm_engine

__all__ = ["alone", "folder", "serve"]  # fixtures

SAID = "of ours"
LATE = {"slo": "ttft=60s,tpot=1s", "classes": ["batch:ttft=600s"], "reject_late": True}


def fault(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError(SAID)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged at level error, or above."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.autotune"), "error", lambda text, *more, **_: said.append(text % more))
    return said


def assert_stock(served: Served) -> None:
    """Its scheduler is as it would be if nobody had ever steered it."""
    scheduler = served.scheduler
    assert scheduler.steering is None and scheduler._tunable is None
    assert scheduler.policy == SchedulingPolicy.FCFS
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (256, 16)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0
    assert scheduler.kv_cache_manager.watermark_blocks == 0
    assert all(request.priority == 0 for request in scheduler.requests.values())
    arrivals = [request.arrival_time for request in scheduler.waiting]
    assert arrivals == sorted(arrivals)


PLACES: dict[str, Callable[[Any], tuple[object, str]]] = {
    "a request is taken in": lambda s: (s.steering.waiting, "push"),
    "the prefix cache is looked at": lambda s: (s.steering.kv, "cached"),
    "admission judges an arrival": lambda s: (s.steering._admission, "arrive"),
    "admission queues": lambda s: (s.steering._admission, "queued"),
    "between two steps": lambda s: (s._tunable, "between_steps"),
    "a step's budget": lambda s: (s.steering.settings, "budget"),
    "prompts are put in order": lambda s: (s.steering, "begun"),
    "admission judges a prompt in progress": lambda s: (s.steering._admission, "judge_in_progress"),
    "prompts are planned": lambda s: (s.steering, "_plan_prompts"),
    "admission judges whose turn it is": lambda s: (s.steering._admission, "turn"),
    "a request begins": lambda s: (s.steering, "_begin"),
    "a first token": lambda s: (s.steering, "_first_token"),
    "admission learns the rate": lambda s: (s.steering._admission, "observe"),
    "a request ends": lambda s: (s.steering._admission, "ended"),
    "the controller is told": lambda s: (s._tunable, "_tell"),
    "the wait window": lambda s: (s.steering.waiting, "stepped"),
}


@pytest.mark.parametrize(
    ("place", "concurrent"),
    [
        *((place, False) for place in PLACES),
        *((place, True) for place in ("prompts are planned", "a first token", "a request begins")),
    ],
)
def test_a_fault_leaves_stock_vllm_with_all_that_it_had(
    serve: Callable[..., Served], tmp_path: Path, errors: list[str], place: str, concurrent: bool
) -> None:
    path = tmp_path / "decisions.jsonl"
    section = {**LATE, "log": str(path), "pinned": {"token_budget": 48, "max_batch_size": 6, "chunk_size": 40}}
    served = serve(section, OverlappingExecutor if concurrent else SlowExecutor, async_scheduling=concurrent)
    outputs = {served.add(30 + 20 * n, 4 + n, request_class="batch" if n % 2 else "default"): 4 + n for n in range(10)}
    ended = {}
    for _ in range(4):
        ended |= {one.request_id: len(one.outputs[0].token_ids) for one in served.llm.step() if one.finished}
    assert served.scheduler.steering is not None and served.scheduler.waiting
    where, name = PLACES[place](served.scheduler)
    setattr(where, name, fault)
    outputs |= {served.add(50, 3 + n): 3 + n for n in range(4)}
    ended |= {name: tokens for name, (_, _, tokens) in served.run().items()}
    assert {name.partition("-")[0]: tokens for name, tokens in outputs.items()} == ended, "none is lost, none is cut"
    assert_stock(served)
    assert len(errors) == 1 and f"ZeroDivisionError('{SAID}')" in errors[0], errors
    assert errors[0].startswith("autotune failed while ") and errors[0].endswith("it would without autotune")
    assert served.control.status().ended and isinstance(served.control.failed, ZeroDivisionError)
    served.llm.engine_core.shutdown()
    kill, detach = list(read_decisions(path))[-2:]
    assert (kill.action, detach.action) == ("kill", "detach")
    assert kill.cause.startswith("autotune failed while ") and SAID in kill.cause and "goes on without" in kill.cause


def test_a_fault_leaves_waiting_requests_in_the_order_of_their_arrival(
    serve: Callable[..., Served], errors: list[str]
) -> None:
    """Relegated ones too, and with the priorities that their clients gave."""
    section = {"slo": "ttft=40ms", "classes": ["patient:ttft=100s"], "relegate_late": True}
    served = serve(section, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()  # so that the rate is known
    names = [served.add(250, 4) for _ in range(30)]
    names.append(served.add(60, 4, request_class="patient"))
    steering, scheduler = served.scheduler.steering, served.scheduler
    assert steering.waiting.relegated_tokens >= 1000
    queued = [request.request_id for request in scheduler.waiting]
    assert queued != names, "by deadline"
    steering.prepare = fault
    served.llm.step()
    waits = [request.request_id for request in scheduler.waiting]
    assert waits == [name for name in names if name in waits] and len(waits) >= 6
    assert {(reason, tokens) for reason, _, tokens in served.run().values()} == {("length", 4)}
    assert len(errors) == 1


def test_one_that_is_out_of_vllms_queue_when_the_fault_comes_is_put_back(serve: Callable[..., Served]) -> None:
    section = {"slo": "ttft=40ms", "classes": ["patient:ttft=100s"], "relegate_late": True}
    served = serve(section, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()
    for _ in range(12):
        served.add(250, 4)
    queue = served.scheduler.waiting
    add = type(queue).add_request

    def failing(request: Any) -> None:
        """As a heap whose keys cannot be compared."""
        if request.priority > 1e9:  # relegated
            raise TypeError(SAID)
        add(queue, request)

    queue.add_request = failing
    time.sleep(0.05)  # nobody's TTFT can be met any more
    ended = served.run()
    assert served.scheduler.steering is None, "a relegation failed"
    assert {(reason, tokens) for reason, _, tokens in ended.values()} == {("length", 4)}
    assert not served.scheduler.requests and not served.scheduler.waiting


def test_who_was_rejected_before_the_fault_is_told(serve: Callable[..., Served]) -> None:
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()
    names = [served.add(250, 4) for _ in range(30)]
    served.scheduler.steering.prepare = fault
    ended = served.run()
    assert len(ended) == len(names)
    rejected = [why for reason, why, tokens in ended.values() if reason == "abort" and tokens == 0]
    assert rejected and all(str(why).startswith(REJECTED) and " s: " in str(why) for why in rejected)
    assert not served.scheduler.requests and not served.scheduler.waiting


def test_a_rejection_that_fails_halfway_is_a_request_that_goes_on(serve: Callable[..., Served]) -> None:
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()
    served.scheduler.steering._drop = fault
    names = [served.add(250, 4) for _ in range(30)]
    assert served.scheduler.steering is None and all(r.priority == 0 for r in served.scheduler.requests.values())
    ended = served.run()
    assert len(ended) == len(names) and {(reason, tokens) for reason, _, tokens in ended.values()} == {("length", 4)}


def test_clients_of_a_rejection_that_cannot_be_told_are_in_the_log(
    serve: Callable[..., Served], errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()
    monkeypatch.setattr("autotune.engines.vllm.scheduler._tell", fault)
    for _ in range(30):
        served.add(250, 4)
    while served.scheduler.has_unfinished_requests():
        served.llm.step()
    assert len(errors) == 1 and "clients were to be told of their rejection" in errors[0]
    assert served.scheduler.steering is None


def test_an_abort_that_cannot_be_noted_is_an_abort(serve: Callable[..., Served], errors: list[str]) -> None:
    served = serve(LATE, SlowExecutor)
    first, second = served.add(30, 50), served.add(30, 5)
    served.llm.step()
    served.scheduler.steering.dropped = fault
    served.llm.abort_request([first.partition("-")[0]])
    assert [tokens for _, _, tokens in served.run().values()] == [5]
    assert second and not served.scheduler.requests and len(errors) == 1
    assert_stock(served)


def yielding(serve: Callable[..., Served]) -> Served:
    """A prompt in progress that yields the coming step to one with an earlier deadline."""
    served = serve({**LATE, "pinned": {"token_budget": 48, "chunk_size": 48}}, SlowExecutor)
    served.add(200, 3, request_class="batch")
    served.llm.step()
    served.add(60, 3)
    served.scheduler.steering.prepare()
    assert served.scheduler.steering._yielding and not served.scheduler.running
    return served


def test_what_yielded_a_step_runs_on_after_a_fault(serve: Callable[..., Served]) -> None:
    served = yielding(serve)
    served.scheduler.steering.planned = fault
    assert sorted(tokens for _, _, tokens in served.run().values()) == [3, 3]
    assert_stock(served)
    served = yielding(serve)
    served.scheduler._tunable.between_steps = fault
    assert sorted(tokens for _, _, tokens in served.run().values()) == [3, 3]
    assert_stock(served)


def test_an_exception_of_vllms_own_passes_and_leaves_nothing_lent(
    serve: Callable[..., Served], errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("schedule", "update_from_output", "add_request", "finish_requests"):
        served = yielding(serve)
        theirs, scheduler = RuntimeError(f"of vLLM's {where}"), served.scheduler
        owner = next(one for one in type(scheduler).__mro__ if where in vars(one) and one.__module__.startswith("vllm"))

        def raising(*args: object, theirs: Exception = theirs, **kwargs: object) -> Any:
            raise theirs

        with monkeypatch.context() as patched:
            patched.setattr(owner, where, raising)
            with pytest.raises(RuntimeError) as raised:
                if where == "finish_requests":
                    scheduler.finish_requests("1", None)
                else:
                    served.add(20, 2)
                    served.llm.step()
        assert raised.value is theirs, where
        assert scheduler.steering is not None and not errors
        if where != "update_from_output":  # whose step it was is gone with it
            scheduler.steering.put_back()
            assert len(scheduler.running) == 1, "it is not lost"
            while scheduler.has_unfinished_requests():  # its front end knows of one that was never added
                served.llm.step()
            assert not scheduler.requests and not scheduler.steering._by_name and not scheduler.steering.waiting


def test_requests_named_by_an_iterator_are_aborted(serve: Callable[..., Served]) -> None:
    from vllm.v1.request import RequestStatus

    served = serve(LATE)
    names = [served.add(30, 5) for _ in range(3)]
    served.scheduler.finish_requests(iter(names), RequestStatus.FINISHED_ABORTED)
    assert not served.scheduler.requests and not served.scheduler.steering._by_name


def test_an_engine_that_lives_by_the_steering_ends_with_it() -> None:
    """Its tokens come through the steering: a vLLM that went on without would leave its callers waiting."""
    limits = KnobLimits(max_batch_size=16, max_wait_ms=200, token_budget=256, chunk_size=256)
    with vllm_engine(limits, Knobs(8, 0, 64, 48), step_s=0.002) as engine:
        stream = engine.submit([5] * 20, max_tokens=50, ignore_eos=True)
        engine._core.steering.planned = fault  # type: ignore[method-assign]
        with pytest.raises(EngineClosedError, match=SAID):
            stream.result()
        assert engine.closed


def test_an_attached_controller_hears_of_the_fault(folder: Path, tmp_path: Path) -> None:
    import autotune
    from autotune.engines.vllm.scheduler import Steered

    served = Served(folder, {}, SlowExecutor, scheduler_cls=Steered)
    made = SimpleNamespace  # told by what it has: a vllm.LLM
    llm = type("LLM", (made,), {"__module__": "vllm.entrypoints.llm"})(llm_engine=served.llm)
    with autotune.control(llm, slo="ttft=30s,tpot=1s", log=tmp_path / "d.jsonl") as control:
        scheduler = served.llm.engine_core.engine_core.scheduler
        served.llm.add_request(
            "a", {"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
        )
        served.llm.step()
        scheduler.steering.landed = fault
        assert [tokens for _, _, tokens in served.run().values()] == [6]
        assert scheduler.steering is None and control.status().ended
        with pytest.raises(ValueError, match="engine cannot be tuned"):
            autotune.control(llm, slo="ttft=30s")
    served.llm.engine_core.shutdown()
    assert [d.action for d in read_decisions(tmp_path / "d.jsonl")][-2:] == ["kill", "detach"]
    assert issubclass(type(scheduler), Stock)
