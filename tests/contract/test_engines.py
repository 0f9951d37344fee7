"""What every engine keeps that stands behind :class:`autotune.engines.Engine`: ours, the simulated one, a callable, vLLM's.

vLLM's, which steers vLLM's own scheduler, is there where vLLM's Python is; it needs neither a model nor vLLM's kernels.
tests/integration/test_vllm_agrees.py runs this file there, in every version, and test_vllm_engine.py in a whole vLLM.
A new engine joins by a line in :data:`ENGINES`. Every check asks ``capabilities``; none asks what kind of engine it has.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

import autotune
from autotune.control.decision_log import read_decisions
from autotune.engines import Engine, EngineSource, VirtualEngine, adapt, virtual, waiting
from autotune.engines.callable import CallableSource
from autotune.engines.own import OwnSource
from autotune.measure.evaluate import evaluate
from autotune.simulate.batcher import SimulatedBatcher
from autotune.workload import Arrival, parse_workload
from runtime import Batcher, EngineClosedError, LeaseError, RejectedError, batch
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.plan import StepPlan, StepResult
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.request import Sequence as Running
from runtime.slo import SLO, RequestClass
from runtime.tunable import Capabilities, Facts, SchedulerView, tile_on
from tests.fakes import FakeExecutor, FakeModel, Records
from tests.unit.simulated_profile import scenario

FAULTY = 9
"""Prompt tokens (of a callable: the input) of a request that fails wherever it is run."""

LIMITS = KnobLimits(max_batch_size=8, max_wait_ms=200, token_budget=64, chunk_size=32)
START = Knobs(max_batch_size=4, max_wait_ms=0, token_budget=32, chunk_size=16)
OTHER = Knobs(max_batch_size=3, max_wait_ms=1, token_budget=16, chunk_size=8, draft_tokens=2)
PATIENT = SLO(ttft_ms=30_000, e2e_ms=60_000)
OUTPUT = 4
GIVE_UP_S = 60.0


class _Failing:
    """``executor``, in whose steps a prompt of :data:`FAULTY` tokens fails."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        found = self._executor.execute(plan, now, until)
        bad = [chunk.sequence for chunk in plan.chunks if chunk.sequence.request.prompt_len == FAULTY]
        return cast(StepResult, found._replace(failed=[(one, ValueError("at fault")) for one in bad]))

    def release(self, sequence: Running) -> None:
        self._executor.release(sequence)


def _own(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
    model = cast(Any, FakeModel(tokenizer=None))
    source = OwnSource(model, executor=_Failing(FakeExecutor()), kv_tokens=4096, slo=PATIENT)
    return source.with_classes(classes).start(knobs, limits)


def _simulated(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
    engine = scenario(slo=PATIENT, classes=classes).start(knobs, limits)
    engine.core.executor = _Failing(engine.core.executor)
    return engine


def _callable(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
    def work(items: list[int]) -> list[Any]:
        return [ValueError("at fault") if item == FAULTY else item for item in items]

    # an input is its own cost, as a prompt is its own length
    slos = {"default": PATIENT, **{one.name: one.slo for one in classes}}
    options = {"strategy": "dynamic", "cost": int, "slo": slos}
    return CallableSource(work, list(range(1, 33)), options).start(knobs, limits)


def _simulated_callable(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
    slos = {"default": PATIENT, **{one.name: one.slo for one in classes}}
    first = Knobs(**{s.name: getattr(knobs if s.batcher else limits, s.name) for s in KNOBS})
    return SimulatedBatcher(
        lambda call: 0.001 * len(call.items), range(1, 33), strategy="dynamic", slo=slos, limits=limits, knobs=first,
        failure=lambda item: "at fault" if item.cost == FAULTY else "",
    )  # fmt: skip


ENGINES: dict[str, Callable[..., Engine]] = {
    "own": _own,
    "simulated": _simulated,
    "callable": _callable,
    "simulated callable": _simulated_callable,
}
if find_spec("vllm") is not None:
    from tests.vllm_fakes import vllm_engine
    from tests.vllm_outside import attached, in_scheduler

    def _vllm(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
        return vllm_engine(limits, knobs, slo=PATIENT, fail_on=FAULTY, classes=classes)

    def _vllm_scheduler(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
        return in_scheduler(limits, knobs, slo=PATIENT, fail_on=FAULTY, classes=classes)

    def _vllm_attached(limits: KnobLimits, knobs: Knobs, classes: Sequence[RequestClass] = ()) -> Engine:
        return attached(limits, knobs, slo=PATIENT, fail_on=FAULTY, classes=classes)

    ENGINES |= {"vllm": _vllm, "vllm scheduler": _vllm_scheduler, "vllm attached": _vllm_attached}


NOT_ITS_OWN: dict[str, dict[str, str]] = {
    "vllm scheduler": {"cause": "a step that fails passes vLLM's scheduler by: whoever runs vLLM has the error"},
    "vllm attached": {
        "cause": "a step that fails passes vLLM's scheduler by: whoever runs vLLM has the error",
        "weights": "whoever has made the engine has told it of no request classes, and control() of none but by an SLO",
    },
}
"""What no capability says and an engine cannot keep, for others hold it; with each the reason. All else holds for all."""


class World:
    """An engine at work, and everything it told."""

    def __init__(self, engine: Engine, kind: str = "own") -> None:
        self.engine, self.kind, self.heard = engine, kind, Records()
        self.can, self.lacks = engine.capabilities, NOT_ITS_OWN.get(kind, {})
        self._pause = waiting(engine)
        self._sent = 0
        self._handles: list[Any] = []  # a handle that nobody has ends its request
        engine.subscribe(self.heard)

    def submit(self, length: int = 5, output: int = OUTPUT, **options: Any) -> Any:
        """Of an LLM a prompt of ``length`` tokens like no other's; of a callable the input that costs as much."""
        self._sent += 1
        callable_ = self.engine.facts.callable is not None
        prompt = [length - 1] if callable_ else [(self._sent + i) % 200 for i in range(length)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        handle = self.engine.submit(prompt, params, **{"request_id": f"r{self._sent}", **options})
        self._handles.append(handle)
        return handle

    def until(self, done: Callable[[], object]) -> None:
        give_up = time.monotonic() + GIVE_UP_S
        while not done():
            assert time.monotonic() < give_up, "what was waited for never came"
            self._pause(0.002)

    def serve(self, *lengths: int) -> list[RequestRecord]:
        """Submit prompts of these lengths and wait until they have ended; their records in order."""
        names = [f"r{self._sent + i + 1}" for i in range(len(lengths))]
        for length in lengths:
            self.submit(length)
        self.until(lambda: self.heard.of.keys() >= set(names))
        return [self.heard.of[name] for name in names]


@pytest.fixture(params=ENGINES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    engine = ENGINES[request.param](LIMITS, START)
    try:
        yield World(engine, request.param)
    finally:
        engine.close(drain=False)


# -- what it says of itself -------------------------------------------------------------------------------------------------


def test_capabilities_and_facts_are_plain_data(world: World) -> None:
    engine, facts = world.engine, world.engine.facts
    assert isinstance(engine.capabilities, Capabilities) and isinstance(facts, Facts)
    assert engine.capabilities == engine.capabilities and asdict(engine.capabilities)["knobs"].keys() == {
        spec.name for spec in KNOBS
    }
    assert facts.engine and facts.version and facts.parallelism >= 1
    assert facts.kv_tokens % facts.block_size == 0 and facts.kv_tokens >= 1
    assert facts.model is None or facts.callable is None
    assert facts.tile == tile_on("" if facts.model is None else facts.model.device)


def test_capabilities_name_each_knob() -> None:
    with pytest.raises(ValueError, match="it must say what each of max_batch_size"):
        Capabilities({"max_batch_size": "live"})
    with pytest.raises(ValueError, match=r"knobs\['chunk_size'\] is 'later'; it must be one of live, restart, none"):
        Capabilities({**Capabilities.live().knobs, "chunk_size": cast(Any, "later")})


def test_it_starts_as_it_was_asked_to(world: World) -> None:
    engine = world.engine
    assert engine.limits == engine.effective_limits
    absent = {name: getattr(engine.limits, name) for name, effect in world.can.knobs.items() if effect == "none"}
    assert engine.limits == replace(LIMITS, **absent), "but for knobs that it lacks"
    live = [name for name, effect in world.can.knobs.items() if effect != "none"]
    assert all(getattr(engine.knobs, name) == getattr(START, name) for name in live)
    assert engine.epoch == 0
    with pytest.raises(ValueError, match=r"max_batch_size is 9; it must be .* between 1 and 8"):
        ENGINES[world.kind](LIMITS, START.with_(max_batch_size=9))


def test_the_view_is_that_of_the_engine(world: World) -> None:
    engine = world.engine
    before = engine.view()
    assert (before.running, before.waiting, before.decoding, before.waiting_tokens) == (0, 0, 0, 0)
    assert (before.knobs, before.epoch, before.effective_limits) == (engine.knobs, 0, engine.effective_limits)
    if engine.facts.callable is None:
        assert before.kv_total_blocks * engine.facts.block_size == engine.facts.kv_tokens
        assert before.kv_free_blocks == before.kv_total_blocks
    world.serve(5, 6, 7)
    engine.set_knobs(engine.knobs.with_(max_batch_size=2))
    world.until(lambda: not (engine.view().running or engine.view().waiting))
    after = engine.view()
    assert (after.knobs, after.epoch) == (engine.knobs, engine.epoch) == (before.knobs.with_(max_batch_size=2), 1)
    assert before.now <= after.now <= engine.clock.now()


# -- records ----------------------------------------------------------------------------------------------------------------


def test_every_record_adds_up(world: World) -> None:
    lengths = (3, 17, 5, 30, 11, 6, 4, 12)
    begun = world.engine.clock.now()
    records = world.serve(*lengths)
    world.until(lambda: sum(step.sampled for step in world.heard.steps) == sum(r.output_tokens for r in records))
    assert Counter(r.id for r in world.heard.requests) == {r.id: 1 for r in records}
    for record, length in zip(records, lengths, strict=True):
        assert record.completed and record.prompt_tokens == length
        assert record.scheduled is not None and record.token_times
        assert begun <= record.arrival <= record.scheduled <= record.token_times[0]
        assert list(record.token_times) == sorted(record.token_times) and record.token_times[-1] <= record.finished
        assert len(record.token_times) == record.output_tokens >= 1
        assert record.finished <= world.engine.clock.now()
        assert 0 == record.epoch_first == record.epoch_last
    steps = world.heard.steps
    assert sum(step.prefill_tokens for step in steps) == sum(lengths) - sum(r.cached_tokens for r in records)
    for earlier, later in pairwise(steps):
        assert earlier.start <= earlier.end <= later.end
    for step in steps:
        assert step.start <= step.end and step.steps == 1 and step.failed == 0
        assert step.decodes + step.chunks <= START.max_batch_size
        assert step.tokens <= step.budget_used <= START.token_budget


def test_a_record_says_whose_request_it_was(world: World) -> None:
    world.engine.set_slo(PATIENT)
    world.submit(tenant="t", request_class="default", request_id="mine")
    world.until(lambda: world.heard.requests)
    (record,) = world.heard.requests
    assert (record.id, record.tenant, record.request_class) == ("mine", "t", "default")


def test_who_unsubscribes_hears_no_more(world: World) -> None:
    other = Records()
    end = world.engine.subscribe(other)
    world.serve(5)
    world.until(lambda: other.requests)
    end()
    world.serve(5, 6)
    assert [r.id for r in other.requests] == ["r1"]
    end()  # again: nothing


def test_a_listener_that_raises_is_cut_off(world: World) -> None:
    class Broken(Records):
        def on_request(self, record: RequestRecord) -> None:
            super().on_request(record)
            raise ZeroDivisionError("of a listener")

    broken = Broken()
    world.engine.subscribe(broken)
    assert [r.completed for r in (*world.serve(5), *world.serve(6), *world.serve(7))] == [True] * 3
    assert len(broken.requests) == 1


# -- knobs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [spec.name for spec in KNOBS])
def test_a_knob_does_what_its_capability_says(world: World, name: str) -> None:
    engine, effect = world.engine, world.can.knobs[name]
    if effect == "none" and getattr(OTHER, name) > (most := getattr(engine.limits, name)):
        with pytest.raises(ValueError, match=f"{name} is {getattr(OTHER, name)}; it must be .* and {most} "):
            engine.set_knobs(engine.knobs.with_(**{name: getattr(OTHER, name)}))
        return
    wanted = engine.knobs.with_(**{name: getattr(OTHER, name)})
    if effect == "restart":
        with pytest.raises(ValueError, match=name):
            engine.set_knobs(wanted)
        assert engine.epoch == 0
        return
    epochs: list[int] = []

    def turn(record: StepRecord) -> None:  # between two steps
        if not epochs:
            epochs.append(engine.set_knobs(wanted))

    world.heard.act = turn
    world.serve(*[20] * 12)
    assert engine.knobs == wanted and engine.epoch == epochs[0] == engine.set_knobs(wanted)
    first, *others = world.heard.steps
    if effect == "live":
        assert epochs == [1] and first.epoch == 0 and {step.epoch for step in others} == {1}, "from the next step on"
    bound = engine.knobs
    held = first.decodes + first.chunks  # what ran at the change may go on
    for step in others:
        assert step.decodes + step.chunks <= max(bound.max_batch_size, held)
        assert step.tokens <= max(bound.token_budget, 20 if engine.facts.callable else 0)
        assert world.can.knobs["chunk_size"] == "none" or step.prefill_tokens <= step.chunks * bound.chunk_size


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_a_knob_out_of_limits_is_refused_by_name(world: World, spec: Any) -> None:
    engine, most = world.engine, getattr(world.engine.limits, spec.name)
    before = engine.knobs
    for value in (most + 1, spec.low - 1):
        with pytest.raises(ValueError, match=rf"{spec.name} is {value:g}.*; it must be .*between {spec.low:g} and "):
            engine.set_knobs(engine.knobs.with_(**{spec.name: value}))
    assert engine.knobs == before and engine.epoch == 0


def test_a_lease_shuts_others_out(world: World) -> None:
    engine = world.engine
    policies = AdmissionPolicy(), AdmissionPolicy(order=None)
    with engine.acquire("the first") as lease:
        with pytest.raises(LeaseError, match="the first controls this engine"):
            engine.acquire("the second")
        with pytest.raises(LeaseError):
            engine.set_knobs(engine.knobs.with_(max_batch_size=2))
        with pytest.raises(LeaseError):
            engine.set_step_policy(None)
        if world.can.admission:
            with pytest.raises(LeaseError):
                engine.set_admission(policies[0])
            engine.set_admission(policies[1], lease=lease)
        assert engine.epoch == 0 and engine.set_knobs(engine.knobs.with_(max_batch_size=2), lease=lease) == 1
        engine.set_step_policy(None, lease=lease)
    engine.acquire("the second").release()
    assert engine.set_knobs(engine.knobs.with_(max_batch_size=3)) == 2


# -- policies ---------------------------------------------------------------------------------------------------------------


class _Budget:
    def __init__(self, tokens: int, *, breaks: bool = False) -> None:
        self.tokens, self.breaks = tokens, breaks
        self.calls = 0

    def budget(self, view: SchedulerView) -> int:
        self.calls += 1
        if self.breaks:
            raise ZeroDivisionError("of a policy")
        return self.tokens


def test_a_step_policy_bounds_steps_or_is_refused(world: World) -> None:
    engine = world.engine
    if not world.can.step_budgets:
        with pytest.raises(ValueError, match="step"):
            engine.set_step_policy(_Budget(8))
        return
    policy = _Budget(8)
    engine.set_step_policy(policy)
    world.serve(5, 6, 7, 8)
    assert policy.calls >= len(world.heard.steps) >= 2
    assert all(step.budget_used <= 8 and step.tokens <= 8 for step in world.heard.steps)
    assert engine.epoch == 0, "a budget is not a knob"
    engine.set_step_policy(None)
    seen, calls = len(world.heard.steps), policy.calls
    world.serve(20, 21)
    assert policy.calls == calls and max(step.tokens for step in world.heard.steps[seen:]) > 8


def test_a_step_policy_that_raises_is_taken_off(world: World) -> None:
    if world.can.step_budgets:
        policy = _Budget(8, breaks=True)
        world.engine.set_step_policy(policy)
        assert all(r.completed for r in world.serve(5, 6))
        assert policy.calls == 1


def test_an_admission_policy_is_in_force_or_refused(world: World) -> None:
    engine = world.engine
    assert engine.admission is None
    policy = AdmissionPolicy()
    if not world.can.admission:
        with pytest.raises(ValueError, match=r"admission is AdmissionPolicy\(.*it must be None"):
            engine.set_admission(policy)
        engine.set_admission(None)
        assert engine.admission is None
        return
    engine.set_admission(policy)
    assert all(r.completed for r in world.serve(5, 6)), "with patience enough for all"
    world.until(lambda: engine.admission == policy)
    engine.set_admission(None)
    world.serve(5)
    world.until(lambda: engine.admission is None)


def test_slos_are_the_engines(world: World) -> None:
    engine = world.engine
    assert engine.slos == {"default": PATIENT}
    engine.set_slo(SLO(e2e_ms=5000))
    assert engine.slos["default"] == SLO(e2e_ms=5000)


def test_a_controller_that_is_switched_off_takes_its_slo_along(world: World) -> None:
    engine: Any = world.engine
    for before in ({"default": PATIENT}, {}):
        if not before:
            engine._put_slo("default", None)
        assert engine.slos == before
        attached = autotune.control(engine, slo="ttft=20s")
        assert engine.slos == {"default": SLO(ttft_ms=20_000)}
        assert all(r.completed for r in world.serve(5, 6))
        attached.kill()
        assert engine.slos == before
        assert all(r.completed for r in world.serve(5, 6))


def test_the_knobs_last_set_are_those_in_force_while_memory_lasts(world: World) -> None:
    engine = world.engine
    assert engine.wanted_knobs == engine.knobs
    engine.set_knobs(max_batch_size=2)
    assert engine.wanted_knobs == engine.knobs and engine.wanted_knobs.max_batch_size == 2


def test_weights_are_those_of_its_request_classes(world: World, tmp_path: Path) -> None:
    """A controller counts what each class lost by them. Classes of a callable have none."""
    assert dict(world.engine.weights) == {}
    classes = [RequestClass("chat", PATIENT), RequestClass("bulk", PATIENT, 0.25)]
    engine = ENGINES[world.kind](LIMITS, START, classes)
    weighs = engine.facts.callable is None and "weights" not in world.lacks
    other, log = World(engine, world.kind), tmp_path / "log.jsonl"
    try:
        assert dict(engine.weights) == ({"chat": 1.0, "bulk": 0.25} if weighs else {})
        with autotune.control(engine, slo=PATIENT, log=log):
            for name in ("chat", "bulk"):
                other.submit(request_class=name)
            other.until(lambda: len(other.heard.requests) == 2)
    finally:
        engine.close(drain=False)
    first, *_, last = read_decisions(log)
    assert first.evidence.get("weights") == ({"bulk": 0.25, "chat": 1.0} if weighs else None)
    assert {name: one["weight"] for name, one in last.evidence["outcomes"].items()} == {
        "bulk": 0.25 if weighs else 1.0,
        "chat": 1.0,
    }


# -- nothing is lost --------------------------------------------------------------------------------------------------------


def test_what_is_cancelled_has_one_record_and_the_rest_go_on(world: World) -> None:
    go_on = threading.Event()
    world.heard.act = lambda record: go_on.wait(GIVE_UP_S)  # at most one step is over while requests are cancelled
    handles = [world.submit(20) for _ in range(16)]
    for handle in handles[1::2]:
        handle.cancel()
    go_on.set()
    world.until(lambda: len(world.heard.requests) == 16)
    assert set(Counter(r.id for r in world.heard.requests).values()) == {1}
    reasons = [world.heard.of[f"r{i + 1}"].reason for i in range(16)]
    assert all(reason in (FinishReason.LENGTH, FinishReason.STOP) for reason in reasons[::2])
    assert set(reasons[1::2]) <= {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP}
    assert reasons.count(FinishReason.CANCELLED) >= 8 - START.max_batch_size, "all but those that the step held"
    for handle in handles:
        handle.cancel()  # of those that have ended: nothing
    assert all(r.completed for r in world.serve(5))


def test_who_cancels_all_there_is_is_told_of_all(world: World) -> None:
    """At once, though nothing is left to make a step for."""
    handles = [world.submit(20, output=50) for _ in range(4)]
    for handle in handles:
        handle.cancel()
    world.until(lambda: len(world.heard.requests) == 4)
    ended = {world.heard.of[f"r{i + 1}"].reason for i in range(4)}
    assert ended <= {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP}
    world.until(lambda: not (world.engine.view().running or world.engine.view().waiting))


@pytest.mark.parametrize("drain", [True, False])
def test_closing_loses_nothing(world: World, drain: bool) -> None:
    engine = world.engine
    for _ in range(12):
        world.submit(20)
    assert not engine.closed
    engine.close(drain)
    assert engine.closed
    assert Counter(r.id for r in world.heard.requests) == {f"r{i + 1}": 1 for i in range(12)}
    if drain:
        assert all(r.completed for r in world.heard.requests)
    with pytest.raises(RejectedError) as refused:
        world.submit(5)
    assert refused.value.reason == "closed"
    with pytest.raises(EngineClosedError):
        engine.set_knobs(engine.knobs.with_(max_batch_size=2))
    engine.close()
    engine.close(drain=False)


@pytest.mark.parametrize("drain", [True, False])
def test_a_listener_may_close_it(world: World, drain: bool) -> None:
    """It returns at once, and what was accepted ends all the same."""
    submitted = threading.Event()

    def close(record: StepRecord) -> None:
        submitted.wait(GIVE_UP_S)
        world.engine.close(drain)

    world.heard.act = close
    for _ in range(12):
        world.submit(20)
    submitted.set()
    world.until(lambda: len(world.heard.requests) >= 12)
    world.engine.close()
    assert Counter(r.id for r in world.heard.requests) == {f"r{i + 1}": 1 for i in range(12)}
    assert all(r.completed for r in world.heard.requests) or not drain


def test_a_fault_ends_one_request_or_the_engine(world: World) -> None:
    if not world.can.fault_isolation:
        handles = [world.submit(length) for length in (5, FAULTY, 6)]
        world.until(lambda: len(world.heard.requests) == 3)
        faulty = world.heard.of["r2"]
        assert faulty.reason is FinishReason.ERROR and faulty.cause
        assert "of the model" in faulty.cause or "cause" in world.lacks
        assert all(handle.done for handle in handles)
        with pytest.raises(RejectedError, match=r"the engine stopped: .*of the model"):
            world.submit(5)
        return
    records = world.serve(5, 6, FAULTY, 7, 8)
    assert [r.reason is FinishReason.ERROR for r in records] == [False, False, True, False, False]
    assert all(r.completed for r in records if r.prompt_tokens != FAULTY)
    assert "at fault" in records[2].cause
    assert sum(step.failed for step in world.heard.steps) == 1
    assert all(r.completed for r in world.serve(5, 6)), "it goes on"


# -- time -------------------------------------------------------------------------------------------------------------------


def test_time_is_virtual_where_it_says_so(world: World) -> None:
    engine = virtual(world.engine)
    assert (engine is not None) == world.can.virtual_time
    if engine is None:
        before = world.engine.clock.now()
        time.sleep(0.001)
        assert world.engine.clock.now() > before
        return
    world.submit()
    before = engine.clock.now()
    time.sleep(0.001)
    assert engine.clock.now() == before and not world.heard.steps, "nothing happens by itself"
    engine.wait(5.0)
    assert engine.clock.now() >= before + 5.0 and len(world.heard.requests) == 1
    _serves(engine, world.heard)


def _serves(engine: VirtualEngine, heard: Records) -> None:
    begun = engine.clock.now()
    arrivals = [Arrival(0.5 * i, 6 + i, 3, ((900 + i, 6 + i),)) for i in range(4)]
    report = engine.serve(arrivals, label="served")
    assert report.sent == 4 and not report.stopped and engine.run()
    times = [heard.of[f"served-{i}"].arrival - begun for i in range(4)]
    assert times == pytest.approx([0.0, 0.5, 1.0, 1.5])
    engine.serve([Arrival(0.0, 20, 3, ((990, 20),))], label="late")
    assert engine.cancel_all() == 1 and heard.of["late-0"].reason is FinishReason.CANCELLED
    engine.serve([Arrival(0.0, 20, 3, ((991, 20),))], label="later")
    assert engine.cancel_all(FinishReason.TIMEOUT, "too late") == 1
    assert (heard.of["later-0"].reason, heard.of["later-0"].cause) == (FinishReason.TIMEOUT, "too late")
    assert engine.run(stop=lambda: True) is False


# -- the rooms above know only that -------------------------------------------------------------------------------------------


def test_it_can_be_measured(world: World) -> None:
    load = parse_workload("poisson:prompt=6,output=3").at_rate(40.0)
    found = evaluate(world.engine, START.with_(max_batch_size=2), load, PATIENT, vocab_size=30, seed=1, duration=0.5)
    assert found.offered >= 5 and found.attainment == 1.0
    assert found.setting["max_batch_size"] == 2 and found.steps.steps > 0
    view = world.engine.view()
    assert view.running == view.waiting == 0


def test_it_can_be_controlled_by_its_live_knobs_alone(world: World) -> None:
    engine = world.engine
    before = engine.knobs
    with autotune.control(engine, slo=PATIENT, interval_s=0.001) as control:
        world.serve(*[12] * 12)
        world.until(lambda: control.status().attainment.met == 12)
        assert not control.status().ended
        with pytest.raises(LeaseError):
            engine.set_knobs(before)
    for name, effect in world.can.knobs.items():
        if effect != "live":
            assert getattr(engine.knobs, name) == getattr(before, name)
            with pytest.raises(ValueError, match=f"{name} is bounded or pinned; this engine"):
                autotune.control(engine, slo=PATIENT, pinned={name: 4})
    engine.acquire("who comes next").release()


class _Says:
    """An engine that says other things of itself."""

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self._engine = engine
        self.capabilities = capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"step_records": False}, "reports no steps"),
        ({"knobs": {spec.name: "restart" for spec in KNOBS}}, "no knob that can be turned while it runs"),
    ],
)
def test_what_gives_no_hold_is_not_controlled(world: World, says: dict[str, Any], why: str) -> None:
    told = Capabilities(**{"knobs": world.can.knobs, **says})
    with pytest.raises(ValueError, match=f"engine .*{why}, so there is nothing to control"):
        autotune.control(cast(Any, _Says(world.engine, told)), slo=PATIENT)
    world.engine.acquire("anybody").release()


def test_a_knob_that_takes_a_restart_is_never_turned(world: World) -> None:
    """The controller sees it, and leaves it."""
    told = Capabilities({**world.can.knobs, "max_wait_ms": "restart", "chunk_size": "restart"})
    before = world.engine.knobs
    with autotune.control(cast(Any, _Says(world.engine, told)), slo=PATIENT, interval_s=0.001, controller="aimd"):
        world.serve(*[12] * 12)
    after = world.engine.knobs
    assert (after.max_wait_ms, after.chunk_size) == (before.max_wait_ms, before.chunk_size)
    with pytest.raises(ValueError, match="chunk_size is bounded or pinned; this engine takes a restart for it"):
        autotune.control(cast(Any, _Says(world.engine, told)), slo=PATIENT, bounds={"chunk_size": (4, 8)})


def test_what_users_hand_over_is_adapted() -> None:
    @batch(slo="e2e=200ms")
    def same(items: Sequence[int]) -> Sequence[int]:
        return items

    with Batcher(lambda items: items) as batcher:
        assert adapt(batcher) is batcher
    assert adapt(same) is same.batcher
    same.close()
    with pytest.raises(
        ValueError, match=r"engine is a list; it must be a runtime\.Engine, a Batcher, a function under @batch"
    ):
        adapt(cast(Any, []))


# -- sources ------------------------------------------------------------------------------------------------------------------


def test_a_source_starts_engines_of_their_own() -> None:
    sources: list[EngineSource] = [scenario(), CallableSource(lambda items: items, ["a"])]
    for source in sources:
        assert source.model is None
        first, second = source.start(), source.start(limits=LIMITS, seed=3)
        first.set_knobs(first.knobs.with_(max_batch_size=7))
        assert (first.epoch, second.epoch) == (1, 0)
        assert second.limits == LIMITS and LIMITS.check(second.knobs)
        for engine in (first, second):
            engine.close()


@pytest.mark.slow
@pytest.mark.beside
def test_our_source_serves_a_real_model() -> None:
    source = OwnSource.load("tiny", dtype="float32", device="cpu").with_options(kv_tokens=2048, prefix_cache=False)
    model = source.model
    assert (model.name, model.dtype, model.device, model.random_weights) == ("tiny", "float32", "cpu", True)
    with source.start(START, LIMITS, seed=1) as engine:
        assert engine.facts.model == model
        assert (engine.facts.kv_tokens, engine.facts.block_size, engine.facts.prefix_cache) == (2048, 16, False)
        world = World(engine)
        records = world.serve(5, 17, 6, 9)
        assert all(r.completed and r.output_tokens == OUTPUT and not r.cached_tokens for r in records)
        assert engine.set_knobs(OTHER) == 1
        world.serve(5, 6)
        assert {step.epoch for step in world.heard.steps} == {0, 1}
