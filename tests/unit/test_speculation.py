"""Drafted tokens from the plan to the client: what is accepted, where it stops, and what it may take from others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.engine import Engine
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import StepPlan, StepResult, Token
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason, StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.serving.metrics import ServingMetrics
from runtime.slo import SLO
from tests.fakes import EOS, FakeExecutor, FakeModel, Records
from tests.unit.scheduler_world import World

TEXT = "one two three one two four one two three one two five"


def says(sequence: Any) -> int:
    """The next byte of :data:`TEXT`, and then the end."""
    ids = [*TEXT.encode(), EOS]
    return ids[min(len(sequence.output), len(ids) - 1)]


class Verifying(FakeExecutor):
    """Verifies drafts: samples behind each as if it were the token before."""

    verifies_drafts = True

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        found = super().execute(plan, now, until)
        tokens, failed, accepted = list(found.tokens), list(found.failed), []
        for draft in plan.drafts:
            try:
                run = self.verified(draft.sequence, draft.drafted)
            except Exception as error:
                failed.append((draft.sequence, error))
                continue
            tokens += [Token(draft.sequence, token) for token in run]
            accepted.append((draft.sequence, len(run) - 1))
        return found._replace(tokens=tokens, failed=failed, accepted=accepted)

    def verified(self, sequence: Sequence, drafted: Seq[int]) -> list[int]:
        behind = SimpleNamespace(request=sequence.request, output=list(sequence.output))
        run = []
        for guess in (*drafted, None):
            run.append(self.sample(cast(Any, behind)))
            behind.output.append(run[-1])
            if run[-1] != guess:
                break
        return run


@contextmanager
def speculating(each: int, sample: Any = says, **options: Any) -> Iterator[tuple[Engine, Records, Verifying]]:
    executor, heard = Verifying(sample), Records()
    knobs = options.get("limits", KnobLimits()).clamp(Knobs(draft_tokens=each))
    with Engine(FakeModel(), executor=executor, knobs=knobs, **{"kv_tokens": 1024, **options}) as engine:
        engine.subscribe(heard)
        yield engine, heard, executor
    engine._core.scheduler.check_integrity()
    assert engine.view().kv_free_blocks == engine.view().kv_total_blocks, "blocks were lost"


# -- what comes out ---------------------------------------------------------------------------------------------------------


def behind(stop: str) -> int:
    """How many tokens there are with the first ``stop`` in the text."""
    return TEXT.index(stop) + len(stop)


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({}, len(TEXT) + 1, FinishReason.STOP),
        ({"max_tokens": 33}, 33, FinishReason.LENGTH),
        ({"max_tokens": 34}, 34, FinishReason.LENGTH),
        ({"max_tokens": 1}, 1, FinishReason.LENGTH),
        ({"stop": "two three one tw"}, behind("two three one tw"), FinishReason.STOP),
        ({"stop": "hree one two f"}, behind("hree one two f"), FinishReason.STOP),
        ({"stop": "r one two t"}, behind("r one two t"), FinishReason.STOP),
        ({"stop_token_ids": [ord("u")]}, TEXT.index("u") + 1, FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": 60}, 60, FinishReason.LENGTH),
    ],
)
def test_answers_are_the_same_and_end_where_they_did(params: dict[str, Any], tokens: int, reason: FinishReason) -> None:
    found = []
    for each in (0, 1, 4, 16):
        with speculating(each) as (engine, heard, _):
            given = {"max_tokens": 100, **params}
            done = engine.submit("x", **given).result(timeout=30)
            events = list(engine.stream("x", **given))
        found.append((done.text, done.token_ids, done.finish_reason, [event.text for event in events]))
        assert [event.token_id for event in events] == list(done.token_ids)
        assert "".join(event.text for event in events) == done.text
        assert [event.finish_reason for event in events] == [None] * (tokens - 1) + [reason]
        assert len(done.token_ids) == tokens and done.finish_reason is reason
        for record in heard.requests:
            assert len(record.token_times) == record.output_tokens == tokens
            assert list(record.token_times) == sorted(record.token_times)
        assert sum(step.sampled for step in heard.steps) == 2 * tokens
        accepted = sum(step.accepted for step in heard.steps)
        assert sum(step.decodes for step in heard.steps) == 2 * (tokens - 1) - accepted
        if not each:
            assert not accepted and not any(step.drafted for step in heard.steps)
        elif tokens > 40:
            assert accepted > 10 and min(each, 8) <= max(step.accepted for step in heard.steps) <= each
    assert all(one == found[0] for one in found)


def test_accepted_tokens_come_at_the_end_of_their_step() -> None:
    with speculating(4) as (engine, heard, _):
        metrics = ServingMetrics(engine)
        record = engine.submit("x", max_tokens=60).result(timeout=30).record
        exposed = generate_latest(metrics.registry).decode()
    drafted, accepted = sum(step.drafted for step in heard.steps), sum(step.accepted for step in heard.steps)
    assert f"drafted_tokens_total {drafted}.0" in exposed and f"accepted_tokens_total {accepted}.0" in exposed
    assert drafted > accepted > 0
    ends = {step.end for step in heard.steps}
    assert set(record.token_times) <= ends and len(set(record.token_times)) < len(record.token_times)


def test_a_draft_that_fails_fails_its_request_alone() -> None:
    def fails(sequence: Any) -> int:
        if len(sequence.output) == 30 and sequence.request.id == "bad":
            raise ValueError("no such token")
        return says(sequence)

    with speculating(4, fails) as (engine, heard, _):
        good, bad = (engine.submit("x", max_tokens=50, request_id=name) for name in ("good", "bad"))
        assert len(good.result(timeout=30).token_ids) == 50
        with pytest.raises(Exception, match="no such token"):
            bad.result(timeout=30)
        assert len(bad.token_ids) <= 30 and bad.token_ids == good.token_ids[: len(bad.token_ids)]
    assert heard.of["bad"].reason is FinishReason.ERROR


def test_a_knob_turned_holds_from_the_next_step() -> None:
    with speculating(0) as (engine, heard, _):

        def turn(record: StepRecord) -> None:
            engine.set_knobs(draft_tokens=[0, 0, 3, 3, 1][min(len(heard.steps) // 4, 4)])

        heard.act = turn
        engine.submit("x", max_tokens=50).result(timeout=30)
    for step in heard.steps:
        assert step.drafted <= [0, 3, 1][min(step.epoch, 2)]
    assert {step.epoch for step in heard.steps if step.drafted} == {1, 2}


def test_an_executor_that_does_not_verify_is_given_no_drafts() -> None:
    executor = FakeExecutor(says)
    knobs = Knobs(draft_tokens=4)
    with Engine(cast(Any, FakeModel()), executor=executor, kv_tokens=1024, knobs=knobs) as engine:
        engine.submit("x", max_tokens=60).result(timeout=30)
    assert not any(plan.drafts for plan in executor.plans)


# -- what it takes ----------------------------------------------------------------------------------------------------------


class Always:
    """Drafts as many tokens as it may."""

    def begin_step(self) -> None:
        pass

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        return (1,) * most

    def forget(self, sequence: Sequence) -> None:
        pass


def scheduler(blocks: int, count: int, *, prompt: int = 8, output: int = 40, size: int = 4, **slos: SLO) -> Scheduler:
    """``count`` sequences that have just begun to decode."""
    made = Scheduler(kv_blocks=blocks, block_size=size, drafter=Always(), slos=slos)
    for i in range(count):
        made.add(Request(str(i), (i,) * prompt, SamplingParams(), output, 0.0))
    plan = made.schedule(0.0, Knobs(64, 0, 1024, 1024))
    assert len(plan.chunks) == count
    made.update(plan, StepResult((1.0,)))
    return made


def drafts(plan: StepPlan) -> list[int]:
    return [len(draft.drafted) for draft in plan.drafts]


def test_prompts_go_before_drafts() -> None:
    made = scheduler(200, 3)
    made.add(Request("new", (9,) * 20, SamplingParams(), 5, 0.0))
    for budget, left in ((23, []), (24, [1]), (28, [4, 1]), (99, [4, 4, 4])):
        other = scheduler(200, 3)
        other.add(Request("new", (9,) * 20, SamplingParams(), 5, 0.0))
        plan = other.schedule(1.0, Knobs(64, 0, budget, 1024, 4))
        assert plan.prefill_tokens == 20 and drafts(plan) == left
        assert plan.n_decode == 3 - len(left) == len(plan.decode_rows())
    plan = made.schedule(1.0, Knobs(64, 0, 1024, 1024, 4), budget=25)
    assert drafts(plan) == [2], "a step's own budget holds as well"


def test_a_step_samples_no_more_rows_than_there_is_memory_for() -> None:
    """Each drafted token has a row of logits; prompts in progress count as if they sampled."""
    for rows, prompts, wanted in ((3, 0, []), (4, 0, [1]), (9, 0, [4, 2]), (9, 1, [4, 1]), (99, 0, [4, 4, 4])):
        made = scheduler(200, 3)
        made.most_sampled = rows
        for i in range(prompts):
            made.add(Request(f"new {i}", (9,) * 20, SamplingParams(), 5, 0.0))
        assert drafts(made.schedule(1.0, Knobs(64, 0, 1024, 1024, 4))) == wanted


def test_an_engine_is_bounded_by_its_ceiling() -> None:
    with speculating(4, limits=KnobLimits(max_batch_size=4)) as (engine, heard, _):
        engine.submit("x", max_tokens=50).result(timeout=30)
    assert max(step.drafted for step in heard.steps) == 3


def test_drafts_take_no_block_that_a_decode_may_need() -> None:
    for blocks, wanted in ((6, [3, 3]), (8, [3, 3]), (9, [7, 3]), (10, [9, 3]), (11, [9, 7]), (12, [9, 9])):
        made = scheduler(blocks, 2, output=16)  # 8 prompt tokens each: two blocks, and a third for what is to come
        plan = made.schedule(1.0, Knobs(64, 0, 1024, 1024, 9))
        assert made.preemptions == 0
        assert made.kv.free >= min(2, blocks - 6), "one for each decode is left, where there is one"
        assert drafts(plan) == wanted, blocks
        made.update(plan, StepResult((2.0,), accepted=[(plan.drafts[0].sequence, 2)]))
        made.check_integrity()
        first, second = made.decodes
        assert (first.generated, second.generated) == (4, 2)
        assert (len(first.blocks), len(second.blocks)) == (3, 3), "wrong drafts give their blocks back"


def test_sequences_keep_their_place_and_end_in_it() -> None:
    """The newest is preempted, however often those before it were set aside."""
    made = scheduler(100, 3, output=6)
    order = [s.request.id for s in made.decodes]
    for step in range(2):
        plan = made.schedule(1.0 + step, Knobs(64, 0, 1024, 1024, 1))
        some = [(plan.drafts[0].sequence, 1)] if step == 0 else [(draft.sequence, 1) for draft in plan.drafts[1:]]
        finished = made.update(plan, StepResult((2.0 + step,), accepted=some))
        assert not finished and [s.request.id for s in made.decodes] == order
        assert made.decodes.newest().request.id == "2"
    plan = made.schedule(3.0, Knobs(64, 0, 1024, 1024))  # 4 tokens each
    assert plan.n_decode == 3 and not plan.drafts and plan.decode_rows() == tuple(made.decodes)
    assert not made.update(plan, StepResult((4.0,)))
    finished = made.update(made.schedule(4.0, Knobs(64, 0, 1024, 1024, 8)), StepResult((5.0,)))
    assert [record.id for _, record in finished] == order
    for _, record in finished:
        assert record.output_tokens == len(record.token_times) == 6
    assert list(finished[0][1].token_times) == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    assert list(finished[1][1].token_times) == [1.0, 2.0, 3.0, 3.0, 4.0, 5.0]


def test_deadlines_of_tokens_follow_what_was_accepted() -> None:
    made = scheduler(100, 2, default=SLO(tpot_ms=100))
    made.followed(made.slack)
    plan = made.schedule(1.0, Knobs(64, 0, 1024, 1024, 3))
    made.update(plan, StepResult((1.1,), accepted=[(plan.drafts[0].sequence, 3), (plan.drafts[1].sequence, 1)]))
    [(target, left)] = made.slack.token_deadlines(1.1, made.decodes.step, 1.1)
    assert target == 0.1 and left == pytest.approx(1.0 + 3 * 0.1 - 1.1), "the second has 3 tokens since 1.0"
    fresh = scheduler(100, 2, default=SLO(tpot_ms=100)).slack
    fresh.follow((), made.decodes)
    [(_, again)] = fresh.token_deadlines(1.1, made.decodes.step, 1.1)
    assert again == pytest.approx(left)


def test_a_small_pool_makes_fewer_drafts_and_preempts_as_often() -> None:
    """Drafts cost nobody a block: a pool that is short without them is hardly shorter with them."""
    preemptions = []
    for each in (0, 4):
        world = World(kv_blocks=14, drafts=True)
        world.core.settings.set_knobs(Knobs(6, 0, 64, 64, each))
        for i in range(12):
            world.add([i % 3, 1, 2, 1, 2, 1, 2], 12)
        world.drain()
        preemptions.append(world.scheduler.preemptions)
        assert bool(sum(step.drafted for step in world.steps)) == bool(each)
    assert 0 < preemptions[1] <= 2 * preemptions[0]


# -- where steps overlap ----------------------------------------------------------------------------------------------------


class Overlapping(Verifying):
    """Gives its results one step late, if it is asked to."""

    overlaps = True
    in_trouble = False

    def __init__(self, sample: Any = says) -> None:
        super().__init__(sample)
        self.flying: list[StepResult] = []

    def needs_tokens(self, plan: StepPlan) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        assert not plan.drafts, "a step with drafts is run as a whole"
        self.flying.append(self.execute(plan, 0.0, 0.0))

    def collect(self) -> StepResult:
        return self.flying.pop(0)


def test_steps_that_may_draft_do_not_overlap() -> None:
    texts = []
    for each in (0, 4):
        executor = Overlapping()
        heard: list[StepRecord] = []
        core = EngineCore(
            Scheduler(kv_blocks=64, drafter=cast(Any, Always())), cast(Any, executor), knobs=Knobs(draft_tokens=each),
            output=OutputProcessor([EOS]),
        )  # fmt: skip
        row = core.add(Request("r", (1, 2), SamplingParams(), 20, 0.0))
        other = core.add(Request("s", (1, 2, 3), SamplingParams(), 9, 0.0))
        now = time.monotonic()
        while core.has_work:
            outcome = core.step(now)
            now = max(now, outcome.end)
            heard += [outcome.record] if outcome.record is not None else []
        core.scheduler.check_integrity()
        assert any(step.drafted for step in heard) == bool(each)
        assert [step.start for step in heard] == sorted(step.start for step in heard)
        texts.append((row.output, other.output))
    assert texts[0] == texts[1] and len(texts[0][0]) == 20


def test_drafts_begin_while_a_step_is_in_flight() -> None:
    executor = Overlapping()
    core = EngineCore(
        Scheduler(kv_blocks=64, drafter=cast(Any, Always())), cast(Any, executor), output=OutputProcessor([EOS])
    )
    row = core.add(Request("r", (1, 2), SamplingParams(), 30, 0.0))
    now, drafted = time.monotonic(), []
    for step in range(100):
        if not core.has_work:
            break
        core.settings.set_knobs(core.settings.knobs.with_(draft_tokens=3 if 5 < step < 12 else 0))
        outcome = core.step(now)
        now = max(now, outcome.end)
        core.scheduler.check_integrity()
        drafted.append(outcome.record.drafted if outcome.record is not None else 0)
    assert row.output == list(TEXT.encode()[:30]) and row.state == "finished"
    assert not any(drafted[:6]) and any(drafted[6:13]) and not any(drafted[13:])


def test_a_knob_turned_while_a_step_is_planned_ahead_launches_no_drafts() -> None:
    """From another thread, between the question whether steps may hold drafts and the plan."""
    executor = Overlapping()
    scheduler = Scheduler(kv_blocks=64, drafter=cast(Any, Always()))
    core = EngineCore(scheduler, cast(Any, executor), output=OutputProcessor([EOS]))
    speculates = scheduler.speculates

    def turned(knobs: Knobs) -> bool:
        found = speculates(knobs)
        if executor.flying:
            core.settings.set_knobs(knobs.with_(draft_tokens=3))
        return found

    scheduler.speculates = turned  # type: ignore[method-assign]
    row = core.add(Request("r", (1, 2), SamplingParams(), 30, 0.0))
    drafted = 0
    for now in range(100):
        if now % 4 == 0:
            core.settings.set_knobs(core.settings.knobs.with_(draft_tokens=0))
        record = core.step(float(now)).record
        drafted += record.drafted if record is not None else 0
        core.scheduler.check_integrity()
    assert row.output == list(TEXT.encode()[:30]) and drafted
