"""Faults while steps overlap: a step that raises when it is launched or collected, memory that runs out, a device that is lost, a
request that is cancelled in mid-flight, a listener that raises. Whoever was not in the step gets what had to come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import DeviceError, EngineClosedError, RejectedError, RequestCancelledError, StepFailedError
from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.engine import Engine
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import StepResult
from runtime.llm.scheduler import Scheduler
from runtime.llm.stream import Stream
from runtime.ordering import ORDERINGS
from runtime.records import FinishReason, StepRecord
from runtime.request import Request, SamplingParams
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.transfer import Readback
from tests.examples import examples
from tests.fakes import FakeModel, Records
from tests.unit.executor_harness import prompts, tiny
from tests.unit.late_executor import EOS, FaultyExecutor, LateWorld, next_token
from tests.unit.scheduler_world import BLOCK
from tests.unit.test_overlap import events, play

FAILS = ("launch", "collect")
BOTH = pytest.mark.parametrize("where", FAILS)


def faulty(world: LateWorld) -> FaultyExecutor:
    assert isinstance(world.executor, FaultyExecutor)
    return world.executor


# -- the core -------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(3), suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(events, min_size=10, max_size=60),
    faults=st.dictionaries(st.integers(0, 60), st.sampled_from([*FAILS, "oom"]), min_size=1, max_size=12),
    blocks=st.integers(10, 26),
    ordering=st.sampled_from(sorted(ORDERINGS)),
    prefix=st.booleans(),
    drafts=st.booleans(),
)
def test_whatever_fails_the_others_get_what_had_to_come(
    script: list[tuple[Any, ...]], faults: dict[int, str], blocks: int, ordering: str, prefix: bool, drafts: bool
) -> None:
    for overlaps in (False, True):
        play(
            LateWorld(
                overlaps,
                kv_blocks=blocks,
                ordering=ordering,
                prefix=prefix,
                drafts=drafts,
                faults=faults,
                worth_waiting=BLOCK,
            ),
            script,
        )


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_long_life_of_faults(overlaps: bool) -> None:
    """Every kind of them, often enough to meet every other event."""
    kinds = dict(zip(range(5, 9000, 19), ("launch", "oom", "collect") * 200, strict=False))
    world = LateWorld(overlaps, kv_blocks=20, faults=kinds)
    script: list[tuple[Any, ...]] = []
    for turn in range(300):
        stem = [[1] * 9, [1] * 9 + [2] * 7, [2, 1] * 6][turn % 3]
        script += [("add", [*stem, turn % 5 + 1], 6 + turn % 17, 1.0), ("step", 1 + turn % 4)]
        if turn % 11 == 0:
            script.append(("cancel", turn))
    play(world, script)
    executor = faulty(world)
    causes = {record.cause for record in world.records.values() if record.reason is FinishReason.ERROR}
    for what in ("launched", "collected"):
        assert sum(f"cannot be {what}" in cause for cause in causes) > 5
    assert sum(record.reason is FinishReason.CANCELLED for record in world.records.values()) > 5
    assert sum(record.completed for record in world.records.values()) > 50
    assert sum(step.failed for step in world.steps) == sum(
        record.reason is FinishReason.ERROR for record in world.records.values()
    )
    assert executor.begun > 300 and (executor.fed_on_device > 30) is overlaps


@BOTH
def test_who_was_not_in_the_step_is_served_on(where: str) -> None:
    """One prompt comes while the step in trouble is in flight."""
    world = LateWorld(True, kv_blocks=40, faults={3: where})
    struck = [world.add([3, 3, 3], 20), world.add([3, 3], 20)]
    for _ in range(3):
        world.step()
    assert bool(world.executor.steps) == (where == "collect"), "else it has not even begun"
    late = world.add([1, 1], 6)
    world.drain()
    assert [world.records[s.request.id].reason for s in struck] == [FinishReason.ERROR] * 2
    assert late not in faulty(world).struck and late.output


def test_two_steps_in_a_row_that_raise() -> None:
    """The one in flight when it is collected, and the one behind it, which was launched before that was known."""
    for second in FAILS:
        world = LateWorld(True, kv_blocks=40, faults={3: "collect", 4: second})
        world.add([3, 3, 3], 20)
        for _ in range(3):
            world.step()
        world.add([2, 2, 2], 6)  # in the second alone
        world.step()
        world.step()
        world.add([1, 1], 3)
        world.drain()
        causes = [world.records[f"r{at}"].cause for at in range(3)]
        assert "step 3 cannot be collected" in causes[0]
        assert f"step 4 cannot be {'launched' if second == 'launch' else 'collected'}" in causes[1]
        assert not causes[2]


@BOTH
def test_a_request_cancelled_while_its_step_is_about_to_fail(where: str) -> None:
    """It is told that it was cancelled, once, and gives its blocks back once."""
    world = LateWorld(True, kv_blocks=40, faults={3: where})
    first, second = world.add([3, 3, 3], 20), world.add([3, 3], 20)
    for _ in range(3):
        world.step()
    assert world.executor.steps or where == "launch"
    world.cancel(first)
    had = list(first.output)
    world.drain()
    assert world.records["r0"].reason is FinishReason.CANCELLED and first.output == had
    assert world.records["r1"].reason is FinishReason.ERROR and second in faulty(world).struck


@BOTH
def test_what_a_failed_step_wrote_of_a_prompt_is_not_shared(where: str) -> None:
    world = LateWorld(True, kv_blocks=40, faults={1: where})
    world.set_knobs(Knobs(8, 0, 8, 8))
    prompt = [3] * 40
    world.add(prompt, 4)
    world.step(), world.step()
    assert world.records["r0"].reason is FinishReason.ERROR
    world.add(prompt, 4)  # a row that reads rubbish fails the run
    world.drain()
    assert world.records["r1"].cached_tokens <= 8, "the first chunk was whole"


def test_memory_that_runs_out_changes_no_output_and_lowers_the_ceilings() -> None:
    lowered = []
    for overlaps in (False, True):
        world = LateWorld(overlaps, kv_blocks=60, faults={4: "oom", 5: "oom", 9: "oom"})
        for at in range(8):
            world.add([3, 3, at + 1], 14)
        least = 10**9
        while world.core.has_work:
            world.step()
            least = min(least, world.core.settings.effective_limits.max_batch_size)
        lowered.append(least)
        world.drain()
    assert max(lowered) <= 4


@pytest.mark.parametrize("fault", ["lost", "lost late"])
def test_a_lost_device_leaves_every_request_to_be_ended(fault: str) -> None:
    """By whoever runs the core, once: none has been told of its end, and the blocks come back."""
    world = LateWorld(True, kv_blocks=40, faults={4: fault})
    sequences = [world.add([3, 3, at + 1], 30) for at in range(4)]
    with pytest.raises(DeviceError, match="the device is lost"):
        for _ in range(9):
            world.step()
    left = [s for s in sequences if s.request.id not in world.records]
    assert len(left) >= 2
    for sequence in left:
        record = world.core.finish(sequence, FinishReason.ERROR, world.now, "the engine stopped")
        assert record is not None
        assert record.output_tokens == len(record.token_times) == len(sequence.output), "what nobody got does not count"
    assert world.scheduler.kv.free == world.scheduler.kv.total and not world.scheduler.has_work
    world.scheduler.check_integrity()


def test_a_device_lost_while_steps_overlap_is_not_tried_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the executor of models: the error shows when results are read, with the next step in flight."""
    wait, calls = Readback.wait, []

    def late(self: Readback) -> list[torch.Tensor]:
        calls.append(self)
        if len(calls) == 4:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return wait(self)

    monkeypatch.setattr(Readback, "wait", late)
    executor = TorchExecutor(tiny(), kv_blocks=40, block_size=8, overlaps=True)
    core = EngineCore(Scheduler(kv_blocks=40, block_size=8), executor, knobs=Knobs(), output=OutputProcessor())
    for at, prompt in enumerate(prompts([5, 9])):
        core.add(Request(str(at), tuple(prompt), SamplingParams(max_tokens=20, ignore_eos=True), 20, 0.0))
    with pytest.raises(DeviceError, match="device-side assert triggered"):
        for _ in range(9):
            core.step(1.0)
    assert len(calls) == 4, "something was run again"


# -- the engine and its thread --------------------------------------------------------------------------------------------


class Timed(FaultyExecutor):
    """On the clock of the engine."""

    def collect(self) -> StepResult:
        return super().collect()._replace(ends=(time.monotonic(),))


@contextmanager
def serving(faults: Mapping[int, str]) -> Iterator[tuple[Engine, Timed, Records]]:
    """An engine whose steps overlap; whatever happened in it, nothing is left when it is closed."""
    executor, heard = Timed(True, faults), Records()
    model = FakeModel(tokenizer=None, eos_token_ids=(EOS,))
    engine = Engine(model, executor=executor, kv_tokens=1024, block_size=4)
    engine.subscribe(heard)
    try:
        yield engine, executor, heard
    finally:
        engine.close(drain=False)
    assert executor.wrong is None
    view = engine.view()
    assert view.running == view.waiting == 0 and view.kv_free_blocks == view.kv_total_blocks
    engine._core.scheduler.check_integrity()
    ids = [record.id for record in heard.requests]
    assert len(ids) == len(set(ids)), "a request ended twice"


def answer(prompt: list[int], most: int) -> tuple[int, ...]:
    """What must come of it; none of these prompts fails."""
    output: list[int] = []
    while len(output) < most and (not output or output[-1] != EOS):
        token = next_token(tuple(prompt), output)
        assert token is not None
        output.append(token)
    return tuple(output)


def long_prompts(count: int) -> list[list[int]]:
    """Whose answers go on for thirty tokens."""
    found = [[3, a, b] for a in range(9, 250) for b in range(3) if len(answer([3, a, b], 30)) == 30]
    return found[:count]


@BOTH
def test_an_engine_goes_on_behind_a_step_that_raised(where: str) -> None:
    with serving({6: where}) as (engine, executor, _):
        streams = [engine.submit(prompt, max_tokens=30) for prompt in long_prompts(3)]
        said = []
        for stream, prompt in zip(streams, long_prompts(3), strict=True):
            try:
                assert stream.result(timeout=30).token_ids == answer(prompt, 30)
            except StepFailedError as error:
                said.append(str(error))
                assert list(stream.token_ids) == list(answer(prompt, 30))[: len(stream.token_ids)]
        assert said and all("step 6 cannot be" in text for text in said)
        assert engine.generate([[1, 1, 1]], max_tokens=5)[0].token_ids == answer([1, 1, 1], 5)
        assert engine.error is None and executor.fed_on_device > 0


@pytest.mark.parametrize("fault", ["lost", "lost late"])
def test_an_engine_on_a_lost_device_closes_and_everybody_is_told(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving({6: fault}) as (engine, _, heard):
        submitted = threading.Event()
        heard.act = lambda record: submitted.wait(10)  # or the fault may come before the last of them
        streams = [engine.submit(prompt, max_tokens=30) for prompt in long_prompts(3)]
        submitted.set()
        for stream in streams:
            with pytest.raises(EngineClosedError, match="the device is lost") as raised:
                stream.result(timeout=30)
            assert isinstance(raised.value.__cause__, DeviceError)
        engine.close()
        assert isinstance(engine.error, DeviceError)
        with pytest.raises(RejectedError, match="the engine stopped: the device is lost"):
            engine.submit([1])
        assert {record.reason for record in heard.requests} == {FinishReason.ERROR} and len(heard.requests) == 3
    assert "the engine closes: the device is lost" in caplog.text


def test_a_request_cancelled_with_its_step_in_flight_gets_no_token_more() -> None:
    with serving({}) as (engine, executor, heard):
        first, second = long_prompts(2)
        flying: list[int] = []

        def act(record: StepRecord) -> None:
            if len(heard.steps) == 8:
                flying.append(len(executor.steps))
                engine.cancel("first")

        heard.act = act
        streams: list[Stream] = [
            engine.submit(first, max_tokens=30, request_id="first"),
            engine.submit(second, max_tokens=30, request_id="second"),
        ]
        assert streams[1].result(timeout=30).token_ids == answer(second, 30)
        assert flying == [1], "no step was in flight"
        with pytest.raises(RequestCancelledError):
            streams[0].result(timeout=30)
        assert tuple(streams[0].token_ids) == answer(first, 30)[: len(streams[0].token_ids)]
        assert heard.of["first"].reason is FinishReason.CANCELLED
        assert heard.of["first"].output_tokens == len(streams[0].token_ids) < 30


@pytest.mark.parametrize("what", ["on_step", "on_request"])
def test_a_listener_that_raises_is_cut_off_and_no_step_is_lost(what: str, caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Records):
        def on_step(self, record: StepRecord) -> None:
            super().on_step(record)
            if what == "on_step" and len(self.steps) == 5:
                raise ValueError("of a listener")

        def on_request(self, record: Any) -> None:
            super().on_request(record)
            if what == "on_request":
                raise ValueError("of a listener")

    with serving({}) as (engine, executor, heard):
        broken, behind = Raises(), Records()
        engine.subscribe(broken)
        engine.subscribe(behind)
        with caplog.at_level(logging.WARNING):
            found = [engine.submit(prompt, max_tokens=30) for prompt in [[9, 9], *long_prompts(2)]]
            tokens = [stream.result(timeout=30).token_ids for stream in found]
        assert tokens == [answer(prompt, 30) for prompt in [[9, 9], *long_prompts(2)]]
        engine.view()  # all that was told has been heard
        assert behind.steps == heard.steps and behind.requests == heard.requests and len(heard.requests) == 3
        assert len(broken.steps) < len(heard.steps) and "will hear no more" in caplog.text
        assert executor.fed_on_device > 20


@pytest.mark.parametrize("drain", [False, True])
def test_closing_with_a_step_in_flight(drain: bool) -> None:
    with serving({}) as (engine, executor, heard):
        flying: list[int] = []

        def act(record: StepRecord) -> None:
            if len(heard.steps) == 8:
                flying.append(len(executor.steps))
                engine.close(drain=drain)  # on the engine's thread: it returns at once

        heard.act = act
        streams = [engine.submit(prompt, max_tokens=30) for prompt in long_prompts(1)]
        for stream in streams:
            with suppress(RequestCancelledError):
                stream.result(timeout=30)
        engine.close()
        assert flying == [1] and not executor.steps, "a step was left behind"
        assert {record.reason for record in heard.requests} == {FinishReason.LENGTH if drain else FinishReason.ERROR}
        assert len(heard.requests) == len(streams) and len(streams[0].token_ids) == (30 if drain else 8)
