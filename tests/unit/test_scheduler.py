"""The scheduler by hand: exact plans for exact situations."""

from __future__ import annotations

from math import inf

import pytest

from runtime.knobs import Knobs
from runtime.llm.plan import StepPlan
from runtime.ordering import ordering_of
from runtime.records import FinishReason, LimitedBy
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.unit.scheduler_world import BLOCK, World

WIDE = Knobs(max_batch_size=100, max_wait_ms=0, token_budget=100, chunk_size=100)


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.sequence.request.id, c.start, c.count) for c in plan.chunks]


def world(knobs: Knobs = WIDE, **kwargs: object) -> World:
    made = World(kv_blocks=100, **kwargs)  # type: ignore[arg-type]
    made.set_knobs(knobs)
    return made


class Budget:
    """A step policy that gives every step the same."""

    tokens = 20

    def budget(self, view: SchedulerView) -> int:
        return self.tokens


def last(w: World) -> StepPlan:
    w.step()
    return w.executor.plans[-1]


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    w = world(WIDE.with_(token_budget=10))
    w.add([1] * 4, 9)
    assert chunks(last(w)) == [("r1", 0, 4)]
    w.add([2] * 30, 9)
    plan = last(w)
    assert plan.n_decode == 1 and plan.decode_context == 5 and chunks(plan) == [("r2", 0, 9)]
    assert plan.limited_by is LimitedBy.BUDGET
    w.add([3] * 3, 9)
    assert chunks(last(w)) == [("r2", 9, 9)], "a prompt begun goes before a new one"


def test_a_more_urgent_prompt_begins_and_those_in_progress_behind_it_yield_the_step() -> None:
    w = world(WIDE.with_(token_budget=10))
    w.add([1] * 30)
    assert chunks(last(w)) == [("r1", 0, 10)]
    w.add([2] * 4, priority=1)
    plan = last(w)
    assert chunks(plan) == [("r2", 0, 4)] and plan.limited_by is LimitedBy.BUDGET
    plan = last(w)
    assert plan.n_decode == 1 and chunks(plan) == [("r1", 10, 9)], "nothing more urgent begins, so it has the step"


@pytest.mark.parametrize("by_chunk", [False, True])
def test_what_those_that_begin_leave_of_a_step_budget_goes_to_prompts_in_progress_whose_whole_chunk_fits(
    by_chunk: bool,
) -> None:
    w = world(WIDE.with_(token_budget=100, chunk_size=8), by_chunk=by_chunk)
    budget = Budget()
    w.core.settings.set_policy(budget)
    for number, tokens in enumerate((30, 30, 11)):
        w.add([number] * tokens)
    assert chunks(last(w)) == [("r1", 0, 8), ("r2", 0, 8), ("r3", 0, 4)]
    w.add([3] * 4, priority=1)
    w.add([4] * 2, priority=1)
    plan = last(w)
    assert chunks(plan) == [("r4", 0, 4), ("r5", 0, 2), ("r1", 8, 8)] and plan.limited_by is LimitedBy.BUDGET
    w.add([5] * 3, priority=1)
    assert chunks(last(w)) == [("r6", 0, 3), ("r1", 16, 8), ("r3", 4, 7)], "r2's eight do not fit, r3's seven do"
    w.add([6] * 9, priority=1)
    budget.tokens = 64
    plan = last(w)
    assert chunks(plan) == [("r7", 0, 8), ("r1", 24, 6), ("r2", 8, 8)] and plan.limited_by is LimitedBy.CHUNK
    w.core.settings.set_policy(None)
    w.add([7] * 4, priority=2)
    assert chunks(last(w)) == [("r8", 0, 4)], "where knobs alone say how long a step is, who begins has it short"


def test_prompts_in_progress_are_computed_by_the_ordering() -> None:
    w = world(WIDE.with_(token_budget=10))
    w.add([1] * 30)
    w.step()
    w.add([2] * 15, priority=1)
    assert chunks(last(w)) == [("r2", 0, 10)]
    w.add([3] * 15)
    assert chunks(last(w)) == [("r2", 10, 5), ("r1", 10, 5)], "both in progress, so neither yields"


def test_no_prompt_yields_to_one_that_cannot_begin() -> None:
    """For want of blocks, and of a slot: whatever is in progress goes on."""
    for knobs, tokens in (
        (WIDE.with_(token_budget=10), 85 * BLOCK),
        (WIDE.with_(token_budget=10, max_batch_size=1), 4),
    ):
        w = world(knobs)
        w.add([1] * (20 * BLOCK))
        w.step()
        w.add([2] * tokens, priority=1)
        assert chunks(last(w)) == [("r1", 10, 10)]


def test_a_new_ordering_holds_for_prompts_in_progress() -> None:
    w = world(WIDE.with_(token_budget=10))
    w.add([1] * 30)
    w.step()
    w.add([2] * 15, priority=1)
    assert chunks(last(w)) == [("r2", 0, 10)]
    w.scheduler.reorder(ordering_of("fcfs"))
    assert chunks(last(w)) == [("r1", 10, 10)]


def test_chunk_size_bounds_one_sequence_and_leaves_room_for_others() -> None:
    w = world(WIDE.with_(token_budget=20, chunk_size=6))
    w.add([1] * 15)
    w.add([2] * 15)
    plan = last(w)
    assert chunks(plan) == [("r1", 0, 6), ("r2", 0, 6)]
    assert plan.limited_by is LimitedBy.CHUNK


def test_knobs_hold_at_the_very_next_step() -> None:
    w = world(WIDE.with_(chunk_size=4))
    w.add([1] * 40)
    assert chunks(last(w)) == [("r1", 0, 4)]
    w.set_knobs(WIDE.with_(chunk_size=7))
    plan = last(w)
    assert chunks(plan) == [("r1", 4, 7)] and plan.epoch == w.core.settings.epoch == 2
    w.set_knobs(WIDE.with_(chunk_size=7))
    assert w.core.settings.epoch == 2, "nothing changed, so the epoch stays"


def test_lowering_the_batch_size_drains() -> None:
    w = world()
    for _ in range(6):
        w.add([1, 2], 5)
    w.step()
    w.set_knobs(WIDE.with_(max_batch_size=2))
    w.add([3], 2)
    plan = last(w)
    assert plan.n_decode == 6 and not plan.chunks and plan.limited_by is LimitedBy.SLOTS
    w.drain()
    assert all(r.reason is FinishReason.LENGTH for r in w.records.values())


def test_slots_are_bounded_by_the_token_budget_too() -> None:
    w = world(WIDE.with_(token_budget=3))
    for _ in range(5):
        w.add([1], 9)
    assert len(last(w).chunks) == 3
    plan = last(w)
    assert plan.n_decode == 3 and not plan.chunks


def test_wait_window_counts_from_arrival_and_decodes_go_on() -> None:
    w = world(WIDE.with_(max_wait_ms=50))
    w.add([1] * 4, 50)
    outcome = w.step()
    assert outcome.record is None and outcome.wake_at == pytest.approx(0.05)
    w.now = outcome.wake_at
    assert chunks(last(w)) == [("r1", 0, 4)]
    w.add([2] * 4)
    arrived = w.now
    plan = last(w)
    assert plan.n_decode == 1 and not plan.chunks and plan.limited_by is LimitedBy.WAIT
    assert plan.wake_at == pytest.approx(arrived + 0.05)
    w.now = plan.wake_at
    assert chunks(last(w)) == [("r2", 0, 4)]


@pytest.mark.parametrize(
    ("knobs", "prompt"),
    [(WIDE.with_(max_wait_ms=50, token_budget=8), 8), (WIDE.with_(max_wait_ms=50, max_batch_size=1), 2)],
    ids=["fills the budget", "fills the slots"],
)
def test_wait_window_ends_when_the_step_is_full(knobs: Knobs, prompt: int) -> None:
    w = world(knobs)
    w.add([1] * prompt)
    assert chunks(last(w)) == [("r1", 0, prompt)]


def test_wait_window_never_holds_the_preempted() -> None:
    w = World(kv_blocks=8, prefix=False)
    w.set_knobs(WIDE)
    w.add([1] * 12, 16)
    w.add([2] * 12, 16)
    while not w.scheduler.preemptions:
        w.step()
    w.set_knobs(WIDE.with_(max_wait_ms=5000))
    w.add([3], 1)
    while len(w.records) < 2:
        assert w.step().record is not None, "held although it had run before"
    assert w.now < 5
    assert w.records["r2"].preemptions == 1


def test_preemption_takes_the_newest_and_recomputes_what_it_had_said() -> None:
    w = World(kv_blocks=6, prefix=False)
    w.set_knobs(WIDE)
    first, second = w.add([1] * 8, 12), w.add([2] * 8, 12)
    while not w.scheduler.preemptions:
        w.step()
    assert second.preemptions == 1 and first.preemptions == 0
    assert second.target == 8 + second.generated and not second.blocks
    w.drain()
    assert w.records["r2"].output_tokens == 12


def test_admission_leaves_a_block_of_growth_for_every_decode() -> None:
    w = World(kv_blocks=6, prefix=False)
    w.set_knobs(WIDE)
    w.add([1] * 8, 9)
    w.step()
    w.add([2] * 12, 1)  # needs 3 of the 4 free blocks; the decode takes one, and one must stay for it
    plan = last(w)
    assert not plan.chunks and plan.limited_by is LimitedBy.KV
    w.drain()


def test_by_chunk_a_prompt_has_the_blocks_of_its_chunks_and_others_leave_it_the_rest() -> None:
    w = World(kv_blocks=20, by_chunk=True)
    w.set_knobs(WIDE.with_(chunk_size=6))
    first, second = w.add([1] * 40), w.add([2] * 41)
    assert chunks(last(w)) == [("r1", 0, 6)] and second.state == "waiting", "11 blocks, and 10 are promised"
    assert (len(first.blocks), w.scheduler.kv.free, w.scheduler.free_blocks) == (2, 18, 10)
    assert w.steps[-1].kv_free_blocks == w.core.view(w.now).kv_free_blocks == 10
    third = w.add([3] * 40, priority=1)
    assert chunks(last(w)) == [("r3", 0, 6)] and (len(first.blocks), len(third.blocks)) == (2, 2)


def test_by_chunk_a_chunk_that_finds_no_block_takes_those_of_the_newest_prompt_even_of_the_same_step() -> None:
    w = World(kv_blocks=13, by_chunk=True)
    w.set_knobs(WIDE.with_(chunk_size=2))
    w.add([1] * 4, 40)
    w.step()
    older = w.add([2] * 18)
    w.step()
    newer = w.add([3] * 18, priority=1)
    for start in range(0, 16, 2):
        plan = last(w)
        assert ("r3", start, 2) in chunks(plan) and not plan.preemptions
    assert (older.computed, newer.computed, w.scheduler.kv.free) == (16, 16, 2)
    urgent = w.add([4], 2, priority=2)
    plan = last(w)  # one of the two blocks is for the decode, the other for r3, which goes first: there is none for r2
    assert chunks(plan) == [("r2", 16, 2)] and plan.preemptions == 1 and plan.limited_by is LimitedBy.KV
    assert (newer.state, newer.blocks, newer.preemptions) == ("waiting", [], 1)
    assert urgent.state == "waiting" and w.scheduler.kv.free == 4, "nobody begins in such a step"
    w.drain()


def test_by_chunk_prompts_of_one_step_share_what_it_computes() -> None:
    w = World(kv_blocks=20, by_chunk=True)
    w.set_knobs(WIDE)
    w.add([1] * 18)
    w.add([1] * 22)
    assert chunks(last(w)) == [("r1", 0, 18), ("r2", 16, 6)]
    whole = World(kv_blocks=20)
    whole.set_knobs(WIDE)
    whole.add([1] * 18)
    whole.add([1] * 22)
    assert chunks(last(whole)) == [("r1", 0, 18), ("r2", 0, 22)]


def test_prefix_is_shared_while_its_owner_still_runs() -> None:
    w = world()
    owner = w.add([1] * 10, 9)
    w.step()
    sharer = w.add([1] * 10, 9)
    plan = last(w)
    assert chunks(plan) == [("r2", 8, 2)]
    assert sharer.blocks[:2] == owner.blocks[:2] and sharer.blocks[2] != owner.blocks[2]
    w.drain()
    assert w.records["r2"].cached_tokens == 8


def test_at_least_one_token_is_computed_of_a_prompt_that_is_known_entirely() -> None:
    w = world()
    w.add([1] * 8, 2)
    w.drain()
    w.add([1] * 8, 2)
    assert chunks(last(w)) == [("r2", 4, 4)]
    w.drain()


def test_output_is_shared_as_a_prefix_too() -> None:
    w = world()
    sequence = w.add([1] * 6, 8)
    w.drain()
    said = [*sequence.request.prompt, *sequence.output]
    assert len(said) == 14
    w.add([*said, 7, 7], 2)
    assert chunks(last(w)) == [("r2", 12, 4)]
    w.drain()


def test_unfinished_blocks_are_never_found() -> None:
    w = world(WIDE.with_(chunk_size=6))
    w.add([1] * 16, 3)
    w.step()
    w.cancel(w.live[0])  # six tokens computed: one full block
    w.add([1] * 16, 3)
    assert chunks(last(w)) == [("r2", 4, 6)]


def test_nothing_a_failed_request_wrote_is_found() -> None:
    w = world(WIDE.with_(chunk_size=8))
    w.add([1] * 16, 3)
    w.step()
    w.executor.fail = lambda s: True
    w.step()
    assert w.records["r1"].reason is FinishReason.ERROR and "poisoned" in w.records["r1"].cause
    assert w.scheduler.kv.cached == 0
    w.executor.fail = lambda s: False
    w.add([1] * 16, 3)
    assert chunks(last(w)) == [("r2", 0, 8)]
    w.drain()


def test_a_failed_decode_keeps_the_tokens_it_had() -> None:
    w = world()
    w.add([1] * 4, 9)
    w.add([2] * 4, 9)
    w.step()
    w.step()
    w.executor.fail = lambda s: s.request.id == "r1"
    w.step()
    assert w.records["r1"].output_tokens == 2 and len(w.records["r1"].token_times) == 2
    w.drain()
    assert w.records["r2"].output_tokens == 9


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    w = world()
    w.add([1], 2)
    w.step()
    w.executor.stop = lambda s: True
    w.step()
    assert w.records["r1"].reason is FinishReason.STOP and w.records["r1"].output_tokens == 2


def test_token_times_belong_to_the_steps_that_made_them() -> None:
    w = world()
    w.add([1] * 4, 4)
    w.step()
    w.add([2] * 4, 3)
    w.drain()
    assert w.records["r1"].token_times == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert w.records["r2"].token_times == pytest.approx([0.02, 0.03, 0.04])


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    w = World(kv_blocks=4)
    with pytest.raises(ValueError, match=r"prompt \(10\) \+ max_tokens \(8\) is 18 tokens; the KV pool holds 16"):
        w.add([1] * 10, 8)
    w.added = 0
    w.add([1] * 10, 7)  # the last token needs no KV
    w.drain()


def test_least_slack_follows_the_tightest_slo() -> None:
    w = world()
    w.scheduler.slack.slos.update({"default": SLO(ttft_ms=500, tpot_ms=50), "gaps": SLO(itl_ms=30)})
    assert w.core.view(0.0).least_slack == inf
    w.add([1] * 4, 9)
    assert w.core.view(0.1).least_slack == pytest.approx(0.4)
    w.step()  # first token at 0.01; the second is due at 0.06
    assert w.core.view(0.01).least_slack == pytest.approx(0.05)
    w.step()  # at 0.02; the third is due at 0.11
    assert w.core.view(0.02).least_slack == pytest.approx(0.09)
    w.add([2] * 4, 9, request_class="gaps")
    w.step()
    w.step()  # at 0.04
    assert w.core.view(0.04).least_slack == pytest.approx(0.03)
    w.drain()
    assert w.core.view(9.0).least_slack == inf


@pytest.mark.parametrize("policy", [{}, {"ordering": "fair"}])
def test_tenants_share_under_fair_order(policy: dict[str, str]) -> None:
    w = world(WIDE.with_(max_batch_size=1), **policy)
    for _ in range(5):
        w.add([1] * BLOCK, 1, tenant="greedy")
    w.add([2] * BLOCK, 1, tenant="modest")
    w.drain()
    rank = [r.tenant for r in sorted(w.records.values(), key=lambda r: r.finished)].index("modest")
    assert rank == (1 if policy else 5)


def test_who_is_late_for_good_no_longer_holds_up_the_others() -> None:
    w = world()
    w.scheduler.slack.slos["default"] = SLO(tpot_ms=20)
    w.add([1] * 4, 90)
    w.step()
    w.now += 0.1  # five token times behind
    assert w.core.view(w.now).decode_slack == pytest.approx(-0.08)
    w.now += 1.0
    w.add([2] * 4, 90)
    w.step()
    assert w.core.view(w.now).decode_slack == pytest.approx(0.02)
    w.drain()
