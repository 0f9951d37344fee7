"""Steps that overlap one deep: the same outputs and records as without, whatever happens in mid-flight."""

from __future__ import annotations

import random
from itertools import pairwise
from math import isfinite
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import DeviceError, RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import StepPlan, StepResult
from runtime.llm.prefill_rate import RateSource
from runtime.llm.scheduler import Scheduler
from runtime.ordering import ORDERINGS
from runtime.records import FinishReason
from runtime.request import Request, SamplingParams
from runtime.shared.ceilings import StepLoad
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.examples import examples
from tests.unit.late_executor import POISON, VENOM, LateExecutor, LateWorld
from tests.unit.scheduler_world import BLOCK, chain

_STEMS = [[1] * 9, [1] * 9 + [2] * 7, [2, 1] * 6, []]
prompts = st.builds(
    lambda stem, tail: [*stem, *tail] or [3],
    st.sampled_from(_STEMS),
    st.lists(st.sampled_from([1, 2, 3, 3, 3, 3, POISON, VENOM]), max_size=9),
)
events = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 18), st.sampled_from([1.0, 1.0, 1.0, 1.3])),
    st.tuples(st.just("add"), prompts, st.integers(1, 18), st.just(1.0)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(
        st.just("knobs"),
        st.builds(
            Knobs,
            st.integers(1, 12),
            st.sampled_from([0, 0, 15]),
            st.integers(1, 40),
            st.integers(1, 20),
            st.sampled_from([0, 0, 1, 4]),
        ),
    ),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("timeout"), prompts, st.integers(1, 18), st.floats(0, 0.2)),
    st.tuples(st.just("budget"), st.sampled_from([None, 0, 3, 12])),
    st.tuples(st.just("admission"), st.sampled_from([None, "reject", "relegate"])),
)


class Budget:
    """A step policy, which has to have its view."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, view: SchedulerView) -> int:
        assert view.running + view.waiting > 0
        assert all(isfinite(left) for _, left in view.token_deadlines)
        return self.tokens


class Rate(RateSource):
    prefill_rate = 400.0


def add(world: LateWorld, *args: Any, **fields: Any) -> None:
    name = f"r{len(world.sequences)}"
    try:
        world.add(*args, **fields)
    except RejectedError:
        assert name not in world.sequences


def play(world: LateWorld, script: list[tuple[Any, ...]]) -> LateWorld:
    for what, *rest in script:
        if what == "add":
            prompt, max_tokens, penalty = rest
            if len(prompt) + max_tokens <= world.scheduler.most_request_tokens:
                add(world, prompt, max_tokens, penalty)
        elif what == "timeout":
            prompt, max_tokens, seconds = rest
            if len(prompt) + max_tokens <= world.scheduler.most_request_tokens:
                add(world, prompt, max_tokens, expires=world.now + seconds)
        elif what == "budget":
            world.core.settings.policy = None if rest[0] is None else Budget(rest[0])
        elif what == "admission":
            policy = None if rest[0] is None else AdmissionPolicy(late=rest[0])
            world.core.set_admission(policy, source=Rate())
        elif what == "cancel" and world.live:
            world.cancel(world.live[rest[0] % len(world.live)])
        elif what == "knobs":
            world.set_knobs(rest[0])
        elif what == "step":
            for _ in range(rest[0]):
                if world.step().record is None:
                    world.executor.now += 0.01
    world.drain()
    return world


@settings(max_examples=examples(3), suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(events, min_size=10, max_size=60),
    blocks=st.integers(10, 26),
    ordering=st.sampled_from(sorted(ORDERINGS)),
    prefix=st.booleans(),
    drafts=st.booleans(),
    worth=st.sampled_from([BLOCK, 2 * BLOCK, 256]),
)
def test_outputs_are_the_same_with_and_without(
    script: list[tuple[Any, ...]], blocks: int, ordering: str, prefix: bool, drafts: bool, worth: int
) -> None:
    """Each run is held against what had to come of each request; so both gave the same."""
    for overlaps in (False, True):
        world = LateWorld(
            overlaps, kv_blocks=blocks, ordering=ordering, prefix=prefix, drafts=drafts, worth_waiting=worth
        )
        world.scheduler.slack.slos["default"] = SLO(ttft_ms=80, tpot_ms=25, itl_ms=40)
        play(world, script)


@pytest.mark.parametrize(("overlaps", "drafts"), [(False, False), (True, False), (True, True)])
def test_a_long_life_under_pressure(overlaps: bool, drafts: bool) -> None:
    """``drafts``: in half of the settings, so that steps with drafts and steps that overlap follow each other."""
    dice = random.Random(5)
    world = LateWorld(overlaps, kv_blocks=13, drafts=drafts, worth_waiting=BLOCK)
    script: list[tuple[Any, ...]] = []
    for _ in range(900):
        roll = dice.random()
        if roll < 0.5:
            tail = [dice.choice([1, 2, *[3] * 30, POISON]) for _ in range(dice.randrange(1, 9))]
            penalty = 1.3 if dice.random() < 0.05 else 1.0
            script.append(("add", [*dice.choice(_STEMS), *tail], dice.randrange(4, 28), penalty))
        elif roll < 0.56:
            script.append(("cancel", dice.randrange(99)))
        elif roll < 0.6:
            sizes = dice.randrange(1, 14), 0, dice.randrange(2, 48), dice.randrange(1, 24)
            script.append(("knobs", Knobs(*sizes, draft_tokens=dice.choice([0, 3]) if drafts else 0)))
        else:
            script.append(("step", dice.randrange(1, 12)))
    play(world, script)
    reasons = {record.reason for record in world.records.values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR, FinishReason.CANCELLED}
    assert world.scheduler.preemptions > 5, "the pool was never tight"
    assert sum(record.cached_tokens for record in world.records.values()) > 50, "prefixes were never shared"
    assert (world.executor.fed_on_device > (100 if drafts else 500)) is overlaps
    accepted = sum(step.accepted for step in world.steps)
    assert sum(step.drafted for step in world.steps) >= accepted and (accepted > 100) is drafts
    assert (world.wasted > 20) is overlaps, "no stop was found late"
    if overlaps:
        assert world.executor.held_back > 5


def test_the_next_step_is_launched_before_the_last_is_collected() -> None:
    world = LateWorld(True, kv_blocks=20)
    world.add([1, 2, 3], 6)
    order: list[str] = []
    launch, collect = world.executor.launch, world.executor.collect

    def launched(plan: StepPlan) -> None:
        order.append(f"launch {plan.step}")
        launch(plan)

    def collected() -> StepResult:
        order.append(f"collect {world.executor.steps[0].plan.step}")
        return collect()

    world.executor.launch, world.executor.collect = launched, collected  # type: ignore[method-assign]
    assert world.step().record is not None
    assert order == ["launch 0", "launch 0", "collect 0"]  # the prompt, and the first decode step
    world.step()
    assert order[3:] == ["launch 1", "collect 0"]
    world.drain()


def test_a_finish_by_length_is_known_ahead_and_wastes_nothing() -> None:
    world = LateWorld(True, kv_blocks=40)
    lengths = [1, 2, 3, 5, 8]
    for at, length in enumerate(lengths):
        world.add([2, 2, at + 1], length)
    world.drain()
    stopped_early = sum(record.reason is FinishReason.STOP for record in world.records.values())
    ended_by_length = len(lengths) - stopped_early
    assert ended_by_length >= 3
    assert world.wasted <= stopped_early


def test_a_stop_found_late_wastes_one_row() -> None:
    """And its token is nobody's: neither in the output nor counted as sampled."""
    for seed in range(1, 60):
        world = LateWorld(True, kv_blocks=40)
        world.add([seed, 2], 30)
        world.drain()
        [record] = world.records.values()
        if record.reason is FinishReason.STOP:
            assert world.wasted == 1
            assert [step.decodes for step in world.steps][-1] == 1 and world.steps[-1].sampled == 0
            return
    raise AssertionError("nothing stopped early")


@pytest.mark.parametrize(("token", "has"), [(POISON, 2), (VENOM, 0)])
@pytest.mark.parametrize("max_tokens", [1, 3, 9])
@pytest.mark.parametrize("beside", [0, 2])
def test_a_row_that_fails_is_not_counted(token: int, has: int, max_tokens: int, beside: int) -> None:
    """Its first token, its last one, or another, when the step behind is under way."""
    for start in range(1, 4):
        world = LateWorld(True, kv_blocks=40)
        for at in range(beside):
            world.add([start, at], 12)
        world.add([start, token], max_tokens)
        world.drain()
        record = world.records[f"r{beside}"]
        if record.reason is FinishReason.ERROR:
            assert record.output_tokens == has and "poisoned" in record.cause
            assert sum(step.failed for step in world.steps) == 1


def test_what_a_prompt_in_mid_flight_has_not_been_seen_to_write_is_not_shared() -> None:
    """Whose request ends between commit and settle: what its last chunk wrote may not be finite."""
    scheduler = Scheduler(kv_blocks=40, block_size=BLOCK)
    knobs = Knobs(8, 0, 8, 8)
    prompt = tuple(range(30))

    def request(name: str) -> Request:
        return Request(name, prompt, SamplingParams(), 4, 0.0, block_hashes=chain(list(prompt)))

    first = scheduler.add(request("a"))
    done = StepResult(ends=(1.0,))
    plan = scheduler.schedule(0.0, knobs)
    scheduler.settle(scheduler.commit(plan, 0.0), done)
    unsettled = scheduler.commit(scheduler.schedule(1.0, knobs), 1.0)
    assert first.computed == 16
    scheduler.schedule(1.5, knobs)
    scheduler.finish(first, FinishReason.REJECTED, 1.5)
    second = scheduler.add(request("b"))
    scheduler.settle(unsettled, StepResult(ends=(2.0,)))
    scheduler.schedule(2.0, knobs)
    assert second.cached == 8
    scheduler.check_integrity()


def test_ceilings_that_memory_lowers_are_kept_behind_the_step_in_flight() -> None:
    world = LateWorld(True, kv_blocks=60)
    for at in range(6):
        world.add([3, 3, at], 12)
    for _ in range(3):
        world.step()
    assert world.executor.steps and world.scheduler.running == 4  # two have stopped
    collect = world.executor.collect
    lowered: list[int] = []

    def out_of_memory() -> StepResult:
        world.executor.collect = collect  # type: ignore[method-assign]
        return collect()._replace(oom=[StepLoad(4, 4, 0)], fitted=[StepLoad(2, 2, 0), StepLoad(2, 2, 0)])

    world.executor.collect = out_of_memory  # type: ignore[method-assign]
    while world.core.has_work:
        world.step()
        lowered.append(world.core.settings.effective_limits.max_batch_size)
    assert min(lowered) < 4
    world.drain()
    assert world.scheduler.preemptions > 0


def test_a_request_cancelled_in_mid_flight_gets_no_token_more() -> None:
    world = LateWorld(True, kv_blocks=40)
    first, second = world.add([3, 3, 3], 20), world.add([3, 3], 20)
    for _ in range(3):
        world.step()
    assert world.executor.steps, "nothing is in flight"
    had = list(first.output)
    world.cancel(first)
    before = len(world.steps)
    world.step()
    assert first.output == had and world.steps[before].decodes == 2 and world.steps[before].sampled == 1
    assert world.records["r0"].output_tokens == len(had)
    assert second.state != "finished" or second.request.id in world.records
    world.drain()


def test_a_prompt_cancelled_in_mid_flight_gives_its_blocks_back() -> None:
    world = LateWorld(True, kv_blocks=40)
    world.set_knobs(Knobs(8, 0, 8, 4))
    sequence = world.add([3] * 30, 4)
    world.step()
    assert world.executor.steps and sequence.state == "prefill"
    world.cancel(sequence)
    assert world.scheduler.kv.free == world.scheduler.kv.total
    world.add([3] * 30, 4)  # finds what was collected of it, and no more
    world.drain()
    assert world.records["r1"].cached_tokens <= 8


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on() -> None:
    for where in ("launch", "collect"):
        world = LateWorld(True, kv_blocks=40)
        world.add([3, 3], 5)
        world.step()
        plainly = getattr(world.executor, where)

        def broken(*args: Any, plainly: Any = plainly, where: str = where, world: LateWorld = world) -> Any:
            setattr(world.executor, where, plainly)
            if where == "collect":
                plainly()
            raise RuntimeError("the device is out of sorts")

        setattr(world.executor, where, broken)
        while world.core.has_work:
            world.step()
        assert world.records["r0"].reason is FinishReason.ERROR
        assert "out of sorts" in world.records["r0"].cause
        sequence = world.add([1, 1], 2)
        while world.core.has_work:
            world.step()
        assert world.records["r1"].reason is not FinishReason.ERROR and sequence.output


def test_a_lost_device_is_not_contained() -> None:
    world = LateWorld(True, kv_blocks=40)
    world.add([3, 3], 5)

    def lost() -> StepResult:
        raise DeviceError("cuda:0 cannot be used any more")

    world.executor.collect = lost  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        world.core.step(0.0)


def test_nothing_is_launched_behind_a_step_in_trouble() -> None:
    world = LateWorld(True, kv_blocks=40)
    world.add([3, 3], 6)
    world.executor.in_trouble = True
    world.step()
    assert not world.executor.steps
    world.executor.in_trouble = False
    world.step()
    assert len(world.executor.steps) <= 1
    world.drain()


class Tardy(LateExecutor):
    """The host comes to look 4 ms after the device was done: it was launching the next step."""

    def collect(self) -> StepResult:
        result = super().collect()
        done = result.ends[-1]
        self.now = done + 0.004
        return result._replace(ends=(self.now,), computed_at=done)


def test_a_step_takes_what_the_device_took_and_tokens_come_when_the_host_has_them() -> None:
    executor, scheduler = Tardy(True), Scheduler(kv_blocks=50, block_size=BLOCK)
    core = EngineCore(scheduler, executor, knobs=Knobs(4, 0, 64, 64), limits=KnobLimits(), output=OutputProcessor())
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=6, ignore_eos=True), 6, 0.0)
    core.add(request)
    outcomes = []
    while core.has_work:
        outcomes.append(core.step(executor.now))
    records = [outcome.record for outcome in outcomes if outcome.record is not None and outcome.record.decodes]
    assert len(records) == 5
    assert [round(record.duration, 6) for record in records[1:]] == [0.01] * 4
    assert all(later.start == sooner.end for sooner, later in pairwise(records))
    [(_, ended)] = [finished for outcome in outcomes for finished in outcome.finished]
    assert ended.finished == pytest.approx(records[-1].end + 0.004)
