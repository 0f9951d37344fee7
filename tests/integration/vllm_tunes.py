"""Run by the pytest of an environment with vLLM (see test_vllm_serve.py): the scheduler that brings its own controller, in vLLM's
engine without a model."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler as Stock
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from autotune.cli.connection import ask
from autotune.control.decision_log import read_decisions
from autotune.engines.vllm import Scheduler
from autotune.engines.vllm.scheduler import REJECTED, picked, unfit
from autotune.engines.vllm.steering import Steering
from autotune.profile import load_profile, save_profile
from runtime.clock import VirtualClock
from runtime.errors import EngineClosedError, InputError
from runtime.llm.admission import AdmissionPolicy
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.slo import RequestClass
from tests.fakes import Records
from tests.integration.llama_folder import weightless_folder
from tests.vllm_fakes import BLOCK, CountingExecutor

SLO = {"slo": "ttft=30s,tpot=1s"}


class SlowExecutor(CountingExecutor):
    step_s = 0.004


class OverlappingExecutor(SlowExecutor):
    """As vLLM's own do under async scheduling: a step is taken on at once, and its tokens come when they are asked for."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._made = self._run(scheduler_output)
        done: Future[Any] = Future()
        done.set_result(None if scheduler_output.total_num_scheduled_tokens else self._made)
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        done: Future[Any] = Future()
        done.set_result(self._made)
        return done


class ByAnotherTool(Stock):
    """A scheduler that took the slot before us."""

    budgets = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.budgets += 1
        return super().schedule(*args, **kwargs)


class KeepsItsOrder(Stock):
    """One that has all that is needed, and does not let it be changed."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "policy" and hasattr(self, name):
            raise AttributeError("FCFS it is")
        super().__setattr__(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("AUTOTUNE_")]:
        monkeypatch.delenv(name)


class Served:
    """vLLM's engine in this process, and its scheduler."""

    def __init__(self, folder: Path, section: object, executor: type[CountingExecutor], **options: Any) -> None:
        arguments: dict[str, Any] = {
            "model": str(folder), "load_format": "dummy", "dtype": "float32", "enforce_eager": True, "block_size": BLOCK,
            "skip_tokenizer_init": True, "scheduler_cls": Scheduler, "enable_prefix_caching": False,
            "max_num_seqs": 16, "max_num_batched_tokens": 256,
            "distributed_executor_backend": executor, "additional_config": {"autotune": section}, **options,
        }  # fmt: skip
        config = EngineArgs(**arguments).create_engine_config()
        config.scheduler_config.async_scheduling = bool(
            options.get("async_scheduling")
        )  # which vLLM switches off on a CPU
        self.llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        self.scheduler: Any = self.llm.engine_core.engine_core.scheduler
        self.names = 0

    @property
    def engine(self) -> Any:
        return self.scheduler._tunable

    @property
    def control(self) -> Any:
        return self.scheduler._control

    def add(self, prompt: int, output: int, *, now: bool = False, **extra: str) -> str:
        """``now``: it arrives at this moment of the scheduler's clock, to the last bit."""
        self.names += 1
        arrival = time.time() + 1e6 if now else None  # what comes from the future comes now
        params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, extra_args=extra or None)
        prompt_ids = {"prompt_token_ids": [5] * prompt}
        return self.llm.add_request(str(self.names), prompt_ids, params, arrival_time=arrival)

    def run(self) -> dict[str, tuple[str | None, object, int]]:
        """Step until nothing is left: for each request that ended how, why, and how many tokens it has."""
        ended = {}
        while self.llm.has_unfinished_requests():
            for one in self.llm.step():
                if one.finished:
                    out = one.outputs[0]
                    ended[one.request_id] = out.finish_reason, out.stop_reason, len(out.token_ids)
        return ended


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(section: object, executor: type[CountingExecutor] = CountingExecutor, **options: Any) -> Served:
        made.append(Served(folder, section, executor, **options))
        return made[-1]

    yield start
    for one in made:
        one.llm.engine_core.shutdown()


@contextmanager
def heard(served: Served) -> Iterator[Records]:
    records = Records()
    end = served.engine.subscribe(records)
    yield records
    end()


def test_it_brings_a_controller_that_hears_of_every_step(serve: Callable[..., Served], tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    served = serve({**SLO, "log": str(log), "classes": ["batch:ttft=60s"]}, SlowExecutor)
    assert isinstance(served.scheduler, Stock) and served.engine.facts.engine == "vllm"
    assert served.engine.knobs.as_dict() == {
        "max_batch_size": 16, "max_wait_ms": 0.0, "token_budget": 256, "chunk_size": 256, "draft_tokens": 0,
    }  # fmt: skip
    with heard(served) as records:
        for number in range(12):
            served.add(40 + number, 30, **({"request_class": "batch"} if number % 2 else {}))
        assert len(served.run()) == 12
    assert sum(step.sampled for step in records.steps) == 12 * 30
    assert sum(step.prefill_tokens for step in records.steps) == sum(40 + number for number in range(12))
    assert [r.request_class for r in records.requests].count("batch") == 6
    assert served.control.status().attainment.offered == 12, "the last step is told of, too, when nothing follows it"
    served.llm.engine_core.shutdown()
    actions = [decision.action for decision in read_decisions(log)]
    assert actions[0] == "attach" and actions[-1] == "detach" and not list(tmp_path.glob("autotune/*"))


def test_steps_of_decodes_alone_are_told_together(serve: Callable[..., Served]) -> None:
    served = serve(SLO)
    with heard(served) as records:
        served.add(20, 40)
        served.add(20, 40)
        told = []
        for made in range(1, 31):
            served.llm.step()
            told.append(len(records.steps))
            assert made - 4 <= told[-1] < made, "a step is told before the next one, or with the three that follow it"
        assert {later - earlier for earlier, later in pairwise(told[3:])} == {0, 4}
        served.add(20, 5)
        assert len(records.steps) == 30, "what comes is judged by all that has been"
        served.run()
    assert [step.start for step in records.steps] == sorted(step.start for step in records.steps)
    assert sum(step.sampled for step in records.steps) == 2 * 40 + 5 and len(records.requests) == 3


def test_being_told_together_changes_no_step(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """But the number of the setting and the budget, where none binds: a decision may come three steps later then."""

    def made(together: int) -> tuple[list[StepRecord], list[RequestRecord], list[tuple[str, object]]]:
        clock = VirtualClock()
        monkeypatch.setattr("autotune.engines.vllm.tuning._TOGETHER", together)
        monkeypatch.setattr("autotune.engines.vllm.scheduler.MonotonicClock", lambda: clock)

        class Ticking(CountingExecutor):
            def _run(self, output: Any) -> Any:
                clock.advance(0.004 + 1e-4 * output.total_num_scheduled_tokens)
                return super()._run(output)

        served = serve({"slo": "ttft=45ms,tpot=8ms", "reject_late": True}, Ticking)
        draw = random.Random(3)
        with heard(served) as records:
            for _ in range(80):
                served.add(draw.randrange(10, 200), draw.randrange(2, 60), now=True)
                for _ in range(draw.randrange(1, 16)):
                    served.llm.step()
            served.run()
        steps = [step._replace(epoch=0, budget_used=0) for step in records.steps]
        requests = [r._replace(id=r.id.partition("-")[0], epoch_first=0, epoch_last=0) for r in records.requests]
        return steps, requests, [(d.action, d.new) for d in served.control.latest(1000)]

    one_by_one, together = made(1), made(4)
    steps, requests, decisions = one_by_one
    assert sum(not step.chunks for step in steps) > 300 and sum(step.chunks > 0 for step in steps) > 80
    assert {r.reason for r in requests} == {FinishReason.LENGTH, FinishReason.REJECTED} and len(decisions) > 3
    assert together == one_by_one


def test_the_environment_says_it_as_well(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_SLO", "ttft=700ms")
    monkeypatch.setenv("AUTOTUNE_CONTROLLER", "static")
    served = serve({"pinned": {"token_budget": 48}})
    assert served.control.controller.name == "static" and served.engine.slos["default"].ttft_ms == 700
    assert served.engine.knobs.token_budget == 48
    with heard(served) as records:
        served.add(200, 2)
        served.run()
    assert max(step.prefill_tokens for step in records.steps) == 48


def test_another_process_watches_sets_and_kills(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve(SLO)
    (path,) = tmp_path.glob("autotune/*.sock")
    scheduler = served.scheduler
    assert ask(path, "status")["status"]["slo"] == "ttft=30000ms,tpot=1000ms@99%"
    ask(path, "set", knobs={"token_budget": 32})
    with heard(served) as records:
        served.add(100, 2)
        served.run()
    assert max(step.prefill_tokens for step in records.steps) == 32
    assert scheduler.policy == SchedulingPolicy.PRIORITY
    names = [served.add(100, 4) for _ in range(3)]
    served.llm.step()
    ask(path, "kill")
    ended = served.run()
    assert set(ended) == {name.split("-")[0] for name in names} or len(ended) == 3
    assert scheduler.steering is None and scheduler.policy == SchedulingPolicy.FCFS
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (256, 16)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0
    served.add(300, 3)
    assert [tokens for _, _, tokens in served.run().values()] == [3], "stock vLLM goes on"


def test_the_switch_goes_over_what_waits_in_vllms_own_order(serve: Callable[..., Served]) -> None:
    served = serve({**SLO, "pinned": {"max_batch_size": 1}}, max_num_seqs=1)
    for _ in range(4):
        served.add(20, 3)
    served.llm.step()
    late = [request.request_id for request in served.scheduler.waiting]
    served.control.kill()
    served.add(20, 3)
    served.llm.step()
    assert [request.request_id for request in served.scheduler.waiting][: len(late)] == late
    assert len(served.run()) == 5


def test_a_client_is_told_of_its_rejection_even_when_the_switch_comes_between(serve: Callable[..., Served]) -> None:
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()  # so that the rate is known
    names = [served.add(250, 4) for _ in range(30)]
    served.control.kill()
    ended = served.run()
    assert len(ended) == len(names)
    rejected = [why for reason, why, tokens in ended.values() if reason == "abort" and tokens == 0]
    assert rejected and all(str(why).startswith(REJECTED) and " s: " in str(why) for why in rejected)
    assert not served.scheduler.requests and not served.scheduler.waiting


def test_relegated_requests_are_computed_after_the_others_and_go_on_without_us(serve: Callable[..., Served]) -> None:
    section = {"slo": "ttft=40ms", "classes": ["patient:ttft=100s"], "relegate_late": True}
    served = serve(section, SlowExecutor, max_num_seqs=2)
    for _ in range(3):
        served.add(300, 2)  # more than a step holds
    served.run()  # so that the rate is known
    with heard(served) as records:
        names = [served.add(250, 4) for _ in range(30)]
        patient = served.add(60, 4, request_class="patient")
        queued = [request.request_id for request in served.scheduler.waiting]
        assert served.scheduler.steering.waiting.relegated_tokens >= 2000 and queued.index(patient) < 15
        while len(records.requests) < 18:
            served.llm.step()
    assert patient in [record.id for record in records.requests]
    assert all(record.reason is FinishReason.LENGTH for record in records.requests)
    served.control.kill()
    ended = served.run()
    assert all((reason, tokens) == ("length", 4) for reason, _, tokens in ended.values())
    assert len(ended) >= len(names) + 1 - len(records.requests)
    assert not served.scheduler.requests and not served.scheduler.waiting


def test_a_rejection_alone_is_told_of(serve: Callable[..., Served]) -> None:
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_batched_tokens=64)
    for _ in range(5):
        served.add(60, 2)
    served.run()
    with heard(served) as records:
        served.add(2000, 2)
        ((reason, why, tokens),) = served.run().values()
    assert (reason, tokens) == ("abort", 0) and "its first token is predicted after" in str(why)
    assert [r.reason for r in records.requests] == [FinishReason.REJECTED]


def test_what_one_http_request_asks_for_is_rejected_as_a_whole(serve: Callable[..., Served]) -> None:
    """Two prompts with two answers each: the last of them comes too late, and none is left running."""
    served = serve({"slo": "ttft=1s", "reject_late": True}, SlowExecutor, max_num_batched_tokens=64)
    for _ in range(5):
        served.add(60, 2)
    served.run()  # so that the rate is known

    def ask(family: str, *lengths: int) -> None:
        for number, length in enumerate(lengths):
            params = SamplingParams(max_tokens=500, ignore_eos=True, detokenize=False, n=2)
            served.llm.add_request(f"{family}-{number}", {"prompt_token_ids": [5] * length}, params)

    with heard(served) as records:
        ask("cmpl-88ad6f58f2d8f3b3", 20)
        served.llm.step()
        served.llm.step()
        served.scheduler.steering.settings.change_knobs({"token_budget": 1})
        served.scheduler.steering.slack.slos["default"] = served.engine.slos["default"].__class__(ttft_ms=1e-3)
        params = SamplingParams(max_tokens=500, ignore_eos=True, detokenize=False)
        served.llm.add_request("cmpl-88ad6f58f2d8f3b3-1", {"prompt_token_ids": [5] * 2000}, params)
        served.llm.add_request("cmpl-88ad6f58f2d8f3b3-2", {"prompt_token_ids": [5]}, params)
        for _ in range(3):
            served.llm.step()
        assert not served.scheduler.requests and not served.scheduler.running
        served.run()
    steering = served.scheduler.steering
    assert [r.reason for r in records.requests] == [FinishReason.REJECTED] * 4
    assert not steering._by_name and not steering._families._of and not steering._families.doomed


def test_who_wants_log_probabilities_of_the_prompt_is_relegated(serve: Callable[..., Served]) -> None:
    """vLLM's API server has no answer for it without any."""
    served = serve({"slo": "ttft=40ms", "reject_late": True}, SlowExecutor, max_num_batched_tokens=64)
    for _ in range(5):
        served.add(60, 2)
    served.run()
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    request = served.llm.add_request("a", {"prompt_token_ids": [5] * 1000}, params)
    steering = served.scheduler.steering
    assert steering.waiting.relegated_tokens == 1000 and request in steering._by_name
    served.add(2000, 2)
    ((reason, _, tokens),) = [found for name, found in served.run().items() if name != "a"]
    assert (reason, tokens) == ("abort", 0)


def test_a_listener_that_raises_is_cut_off(serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    served = serve(SLO)

    class Faulty(Records):
        def on_step(self, record: StepRecord) -> None:
            raise SystemExit("of a listener")

    served.engine.subscribe(Faulty())
    with heard(served) as records:
        served.add(30, 5)
        assert len(served.run()) == 1
    assert len(records.steps) == 5 and not served.control.status().ended
    assert "raised and will hear no more" in caplog.text


def test_a_controller_that_raises_leaves_stock_vllm(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve({**SLO, "log": str(tmp_path / "d.jsonl"), "pinned": {"token_budget": 32}})

    def faulty(record: StepRecord) -> None:
        raise ZeroDivisionError("of the controller")

    served.control.controller.observe_step = faulty
    served.add(100, 8)
    assert [tokens for _, _, tokens in served.run().values()] == [8]
    assert served.scheduler.steering is None and served.scheduler.max_num_scheduled_tokens == 256
    assert any("the controller failed" in decision.cause for decision in read_decisions(tmp_path / "d.jsonl"))


def test_a_step_that_raises_closes_the_log(folder: Path, tmp_path: Path) -> None:
    class Failing(CountingExecutor):
        fail_on = 77

    served = Served(folder, {**SLO, "log": str(tmp_path / "d.jsonl")}, Failing)
    served.add(77, 2)
    with pytest.raises(RuntimeError, match="of the model"):
        served.run()
    served.llm.engine_core.shutdown()  # as EngineCore's process does then
    assert [d.action for d in read_decisions(tmp_path / "d.jsonl")][-1] == "detach"
    assert not list(tmp_path.glob("autotune/*"))


def test_an_aborted_request_is_a_cancelled_one(serve: Callable[..., Served]) -> None:
    served = serve(SLO)
    with heard(served) as records:
        served.add(30, 50)
        served.llm.step()
        served.llm.abort_request(["1"])
        served.llm.step()
        served.add(30, 2)
        served.run()
    assert [r.reason for r in records.requests] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    view = served.engine.view()
    assert view.running == 0 and view.kv_free_blocks == view.kv_total_blocks


def test_records_add_up_with_two_steps_on_their_way(serve: Callable[..., Served]) -> None:
    """Async scheduling: a budget acts one step later."""
    served = serve(SLO, OverlappingExecutor, async_scheduling=True)
    assert isinstance(served.scheduler, AsyncScheduler)
    core = served.llm.engine_core.engine_core
    assert core.batch_queue_size == 2
    with heard(served) as records:
        for number in range(20):
            served.add(30 + 7 * number, 6)
        assert sorted(tokens for _, _, tokens in served.run().values()) == [6] * 20
    assert sum(step.sampled for step in records.steps) == 120
    assert sum(step.prefill_tokens for step in records.steps) == sum(30 + 7 * n for n in range(20))
    assert all(len(r.token_times) == 6 and r.reason is FinishReason.LENGTH for r in records.requests)
    view = served.engine.view()
    assert view.running == view.waiting == 0 and view.kv_free_blocks == view.kv_total_blocks
    served.engine.set_slo("ttft=1s")
    served.control.set(token_budget=32)
    with heard(served) as records:
        served.add(200, 2)
        served.run()
    assert max(step.prefill_tokens for step in records.steps) <= 32


def test_metrics_are_in_a_file(serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.engines.vllm.serving._WRITE_S", 0.05)
    path = tmp_path / "autotune.prom"
    served = serve({**SLO, "metrics": str(path)})
    served.add(50, 5)
    served.run()
    until = time.monotonic() + 10
    while "autotune_output_tokens_total 5.0" not in path.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    text = path.read_text()
    for line in (
        "autotune_up 1.0",
        "autotune_output_tokens_total 5.0",
        'autotune_slo_met_total{class="default"} 1.0',
        "control_regime{",
    ):
        assert line in text
    assert "autotune_knob_token_budget 256.0" in text and "autotune_prefill_tokens_total 50.0" in text
    served.llm.engine_core.shutdown()
    assert "autotune_up 0.0" in path.read_text()


def test_a_model_of_diffusion_keeps_its_own_scheduler(folder: Path) -> None:
    """vLLM picks it where it makes the configuration, and only if nobody has taken the slot."""
    config = EngineArgs(
        model=str(folder), load_format="dummy", dtype="float32", scheduler_cls=Scheduler
    ).create_engine_config()
    assert unfit(config) is None and picked(config).__name__ in ("Scheduler", "AsyncScheduler")
    vars(config)["diffusion_config"] = {"canvas_length": 8}
    for concurrent, name in ((False, "DiffusionScheduler"), (True, "DiffusionAsyncScheduler")):
        config.scheduler_config.async_scheduling = concurrent
        assert picked(config).__name__ == name and config.scheduler_config.scheduler_cls is Scheduler
    assert unfit(config) == "it has a diffusion_config"


def test_a_model_whose_prompts_cannot_be_cut_is_left_alone(folder: Path) -> None:
    """A prompt above the token budget would wait for ever, and everything behind it."""
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
    ).create_engine_config()
    assert unfit(config) == "chunked prefill is off, so no prompt may be longer than a step"


def test_fewer_at_once_than_vllm_has_room_for_are_a_ceiling(serve: Callable[..., Served]) -> None:
    served = serve({**SLO, "controller": "static"}, max_num_active_seqs=3)
    assert served.engine.knobs.max_batch_size == served.engine.limits.max_batch_size == 3
    with heard(served) as records:
        for _ in range(8):
            served.add(10, 4)
        assert len(served.run()) == 8
    assert max(step.running for step in records.steps) == 3


def test_it_steers_the_scheduler_of_another_tool(serve: Callable[..., Served]) -> None:
    served = serve({**SLO, "base": f"{__name__}.ByAnotherTool"})
    served.add(20, 3)
    served.run()
    assert isinstance(served.scheduler, ByAnotherTool) and served.scheduler.budgets >= 3
    assert served.scheduler.steering is not None


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "there is no SLO; set AUTOTUNE_SLO"),
        ({**SLO, "off": True}, "it is switched off"),
        (SLO, r"it is version 0.99.1, and this was made for"),
        (SLO, "the scheduler has no max_num_active_reqs"),
        ({**SLO, "base": f"{__name__}.KeepsItsOrder"}, "it cannot be steered: AttributeError('FCFS it is')"),
    ],
)
def test_else_vllm_runs_untouched(
    serve: Callable[..., Served], section: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.autotune"), "warning", lambda text, *more: said.append(text % more))
    if "version" in says:
        monkeypatch.setattr("vllm.__version__", "0.99.1")
    if "has no" in says:
        monkeypatch.setattr("autotune.engines.vllm.scheduler.missing", lambda scheduler: ["max_num_active_reqs"])
    served = serve(section)
    assert len(said) == 1 and said[0].startswith("not ") and says in said[0]
    assert said[0].endswith("vLLM schedules as it would without autotune")
    assert served.scheduler.policy == SchedulingPolicy.FCFS
    served.add(20, 3)
    assert [tokens for _, _, tokens in served.run().values()] == [3]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"slo": "ttft=500"}, "autotune: slo is 'ttft=500'"),
        ({**SLO, "classes": ["chat"]}, "autotune: classes is 'chat'; it must be NAME:SLO"),
        ({**SLO, "controller": "magic"}, "autotune: .*magic"),
        ({**SLO, "profile": "nowhere.yaml"}, r"autotune: .*nowhere\.yaml"),
        (
            {"slo": "tpot=1s", "reject_late": True},
            "autotune: reject_late is on, but nothing is late by slo tpot=1000ms@99%",
        ),
        ({**SLO, "log": "/nowhere/d.jsonl"}, "autotune: log: /nowhere/d.jsonl cannot be written"),
        ({**SLO, "metrics": "/nowhere/a.prom"}, "autotune: metrics is '/nowhere/a.prom', which cannot be written"),
        ({**SLO, "pinned": {"budget": 3}}, "autotune: .*budget"),
        ({**SLO, "base": "nowhere.Class"}, r"autotune: base is 'nowhere\.Class'"),
        ({**SLO, "base": "autotune.engines.vllm.Scheduler"}, "base is .*; it must be a scheduler class of vLLM's"),
    ],
)
def test_what_cannot_be_read_ends_it_at_its_start(serve: Callable[..., Served], section: object, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        serve(section)
    assert "\n" not in str(raised.value)


def test_it_starts_from_a_profile(serve: Callable[..., Served]) -> None:
    root = Path(__file__).parents[2]
    with pytest.warns(UserWarning, match="the controller starts from its knobs"):
        served = serve({"profile": str(root / "profiles" / "cpu-2core-tiny.yaml")})
    assert served.engine.slos["default"].ttft_ms and served.engine.knobs.token_budget <= 256
    served.add(20, 3)
    assert len(served.run()) == 1


def test_classes_are_those_of_a_profile_whose_slo_counts(serve: Callable[..., Served], tmp_path: Path) -> None:
    measured = load_profile(Path(__file__).parents[2] / "profiles" / "cpu-2core-tiny.yaml")
    chat = RequestClass("chat", measured.slo, 2.0)
    save_profile(measured.model_copy(update={"classes": (chat,)}), tmp_path / "p.yaml")
    with pytest.warns(UserWarning, match="the controller starts from its knobs"):
        served = serve({"profile": str(tmp_path / "p.yaml")})
        assert served.engine.slos == {"default": measured.slo, "chat": measured.slo}
        assert set(serve({**SLO, "profile": str(tmp_path / "p.yaml")}).engine.slos) == {"default"}


def test_a_wait_window_sleeps(serve: Callable[..., Served]) -> None:
    served = serve({**SLO, "pinned": {"max_wait_ms": 400, "max_batch_size": 2}})
    prepare = served.scheduler.steering.prepare
    calls = 0

    def counted() -> float:
        nonlocal calls
        calls += 1
        return float(prepare())

    served.scheduler.steering.prepare = counted
    with heard(served) as records:
        served.add(20, 1)
        cpu, begun = time.thread_time(), time.monotonic()
        served.run()
        cpu, took = time.thread_time() - cpu, time.monotonic() - begun
    (record,) = records.requests
    assert record.queue_time is not None and 0.399 <= record.queue_time < 0.5
    assert calls < 500 and cpu < 0.5 * took
    with heard(served) as records:  # a full batch does not wait
        served.add(20, 1)
        served.llm.step()
        served.add(20, 1)
        served.run()
    assert len(records.requests) == 2 and all(r.queue_time is not None and r.queue_time < 0.2 for r in records.requests)


def test_calls_from_other_threads_do_not_meet_the_steps(serve: Callable[..., Served]) -> None:
    served = serve({**SLO, "reject_late": True})
    over = threading.Event()
    errors: list[BaseException] = []

    def meddle() -> None:
        try:
            while not over.is_set():
                served.engine.view()
                served.control.status()
                served.control.set(token_budget=64)
                served.control.resume()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=meddle)
    thread.start()
    for number in range(200):
        served.add(10 + number, 5)
    assert len(served.run()) == 200
    over.set()
    thread.join()
    assert not errors
    engine = served.engine
    served.control.kill()
    served.add(5, 1)
    served.run()
    with pytest.raises(EngineClosedError, match="vLLM is not tuned any more"):
        engine.set_knobs(token_budget=32)
    assert json.loads(served.control.latest(1)[0].as_json())["action"] == "detach"


def test_a_session_that_goes_on_with_further_input_is_vllms_alone(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops at the end of each turn and is the same request afterwards, which nothing here knows of."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.autotune"), "warning", lambda text, *more: said.append(text % more))
    served = serve({**SLO, "reject_late": True}, SlowExecutor)
    served.add(40, 20)
    served.llm.step()
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)

    def chunk(more: bool) -> Request:
        return Request("session", [5] * 20, params, None, resumable=more, block_hasher=None)

    served.scheduler.add_request(chunk(True))
    assert said and said[0].startswith("not tuned any more: request session goes on with further input")
    assert served.scheduler.steering is None and served.control.status().ended
    served.scheduler.add_request(chunk(True))  # before the first turn has stopped
    assert [tokens for _, _, tokens in served.run().values()] == [20]
    for _ in range(10):
        served.llm.step()
    served.scheduler.add_request(chunk(False))
    for _ in range(3):
        served.llm.step()
    assert not served.scheduler.requests and not served.scheduler.waiting and served.scheduler.fault is None


def test_what_a_reset_of_the_caches_preempts_waits_once(serve: Callable[..., Served]) -> None:
    """Between two steps, as ``/pause`` and ``/reset_prefix_cache`` do, while a prompt yields to one with an earlier deadline."""
    section = {"slo": "ttft=60s,tpot=1s", "classes": ["batch:ttft=600s"], "reject_late": True}
    served = serve({**section, "pinned": {"token_budget": 48, "chunk_size": 48}}, SlowExecutor)
    scheduler = served.scheduler
    served.add(200, 3, request_class="batch")
    served.llm.step()
    served.add(60, 3)
    assert served.llm.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.running
    for _ in range(2):
        served.llm.step()
        names = [request.request_id for request in (*scheduler.running, *scheduler.waiting)]
        assert len(names) == len(set(names)) == 2
    assert sorted(tokens for _, _, tokens in served.run().values()) == [3, 3]
    assert not scheduler.requests and scheduler.fault is None and not scheduler.steering.waiting


def test_who_was_preempted_with_its_first_token_on_its_way_is_not_rejected_for_it(serve: Callable[..., Served]) -> None:
    served = serve(
        {"slo": "ttft=60ms", "reject_late": True}, OverlappingExecutor, async_scheduling=True, max_num_seqs=2
    )
    scheduler = served.scheduler
    served.control.pause()
    long, short = served.add(40, 60), served.add(40, 5)
    served.llm.step()
    request = scheduler.requests[short]
    assert request.num_output_placeholders == 1 and not request.output_token_ids
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)  # as vLLM does in a step for which the pool has no block
    scheduler.steering.settings.set_knobs(served.engine.knobs.with_(max_batch_size=1))
    while not request.output_token_ids:
        served.llm.step()
    assert request.status.name == "PREEMPTED"
    time.sleep(0.1)  # its TTFT is over
    scheduler.steering.settings.set_knobs(served.engine.knobs.with_(max_batch_size=2))
    ended = {name: (reason, tokens) for name, (reason, _, tokens) in served.run().items()}
    assert ended == {long.partition("-")[0]: ("length", 60), short.partition("-")[0]: ("length", 5)}
    assert scheduler.fault is None


def test_a_model_whose_images_cannot_be_cut_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image above the chunk size would be cut all the same, and its first part not see the rest."""
    config = EngineArgs(model=str(folder), load_format="dummy", dtype="float32").create_engine_config()
    config.scheduler_config.disable_chunked_mm_input = True
    assert unfit(config) is None, "there are no images"
    monkeypatch.setattr(type(config.model_config), "is_multimodal_model", property(lambda model: True))
    assert unfit(config) == "disable_chunked_mm_input is on, so no image may be longer than a chunk"


def prioritized(served: Served, *priorities: int, output: int = 2) -> list[str]:
    """Their ids in the order in which they end; the first has begun when the others come."""
    params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
    ended = []
    for number, priority in enumerate(priorities):
        served.llm.add_request(str(number), {"prompt_token_ids": [5] * 20}, params, priority=priority)
        if not number:
            served.llm.step()
    while served.llm.has_unfinished_requests():
        ended += [one.request_id for one in served.llm.step() if one.finished]
    return ended


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["0", "1", "2"]), ("priority", ["0", "2", "1"])])
def test_priorities_count_where_they_do_in_vllm(serve: Callable[..., Served], policy: str, order: list[str]) -> None:
    served = serve({**SLO, "controller": "static"}, max_num_seqs=1, scheduling_policy=policy)
    assert prioritized(served, 0, 0, -1) == order


def test_who_runs_is_preempted_by_its_priority(serve: Callable[..., Served]) -> None:
    """The least important first; of equals the newest."""
    served = serve({**SLO, "controller": "static"}, scheduling_policy="priority")
    params = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
    for number, priority in enumerate((5, -3, 5, 0)):
        served.llm.add_request(str(number), {"prompt_token_ids": [5] * 20}, params, priority=priority)
        served.llm.step()
    running = sorted(served.scheduler.running, key=lambda request: request.priority, reverse=True)
    assert [request.request_id.partition("-")[0] for request in running] == ["2", "0", "3", "1"]
    served.scheduler.steering.give_back_priorities()
    assert sorted(request.priority for request in served.scheduler.running) == [-3, 0, 5, 5]


def test_a_step_that_never_lands_shifts_no_other(serve: Callable[..., Served]) -> None:
    """As when vLLM goes on after a fault of a step."""
    served = serve({**SLO, "controller": "static"})
    steering = served.scheduler.steering
    with heard(served) as records:
        served.add(100, 5)
        served.llm.step()
        steering._plans.append((object(), None))
        served.add(70, 5)
        served.run()
    assert sum(step.prefill_tokens for step in records.steps) == 170 and not steering._plans


def urgent_behind_a_long_prompt(serve: Callable[..., Served]) -> Served:
    section = {"slo": "ttft=60s", "classes": ["urgent:ttft=5s"], "reject_late": True, "controller": "static"}
    served = serve(section, max_num_batched_tokens=64)
    served.add(1900, 2)
    for _ in range(2):
        served.llm.step()
    served.add(60, 2, request_class="urgent")
    return served


def test_prompts_do_not_yield_where_vllm_counts_adapters(serve: Callable[..., Served]) -> None:
    for adapters, yields in ((None, 1), (object(), 0)):
        served = urgent_behind_a_long_prompt(serve)
        steering = served.scheduler.steering
        served.scheduler.lora_config = adapters
        steering._may_yield = Steering(served.scheduler, steering.clock, lambda names: None)._may_yield
        steering.prepare()
        assert len(steering._yielding) == yields
        steering.put_back()
        served.scheduler.lora_config = None
        served.run()


def test_prompts_go_on_while_vllm_begins_nothing(serve: Callable[..., Served]) -> None:
    served = urgent_behind_a_long_prompt(serve)
    served.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    with heard(served) as records:
        for _ in range(20):
            served.llm.step()
        assert sum(step.prefill_tokens > 0 for step in records.steps) >= 15
        served.scheduler.set_pause_state(PauseState.UNPAUSED)
        served.run()
    assert [r.request_class for r in records.requests] == ["urgent", "default"]


def test_who_waits_elsewhere_stays_there(serve: Callable[..., Served]) -> None:
    """A queue that other versions have, for requests that lack something."""
    served = serve({**SLO, "controller": "static"}, max_num_seqs=1)
    for _ in range(4):
        served.add(20, 2)
    scheduler = served.scheduler
    served.llm.step()
    scheduler.skipped_waiting = create_request_queue(SchedulingPolicy.PRIORITY)
    moved = next(iter(scheduler.waiting))
    scheduler.waiting.remove_requests([moved])
    scheduler.skipped_waiting.add_request(moved)
    scheduler.steering.set_admission(AdmissionPolicy())
    scheduler.steering.set_admission(None)
    assert list(scheduler.skipped_waiting) == [moved] and moved not in list(scheduler.waiting)
    assert len(scheduler.waiting) == 2
    del scheduler.skipped_waiting


def test_a_look_at_the_prefix_cache_reports_nothing(serve: Callable[..., Served]) -> None:
    """To a router that asked for every reuse of a block."""
    served = serve({**SLO, "controller": "static"}, enable_prefix_caching=True)
    served.add(100, 2)
    served.run()
    manager = served.scheduler.kv_cache_manager
    told: list[object] = []
    manager.enable_kv_cache_events = True
    manager.coordinator.emit_cached_block_events = lambda *args: told.append(args)
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, detokenize=False, extra_args={"kv_cache_report_mode": "full"}
    )
    served.llm.add_request("again", {"prompt_token_ids": [5] * 100}, params)
    assert not told
    served.run()
    assert len(told) == 1
