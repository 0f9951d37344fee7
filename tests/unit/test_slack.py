"""How long until an SLO is violated: the same whether followed from the first request on or from now on."""

from __future__ import annotations

import random
from math import inf

import pytest

from runtime.knobs import Knobs
from runtime.llm.slack import SlackTracker
from runtime.slo import SLO
from tests.unit.scheduler_world import Whole, World

SLOS = {
    "default": SLO(ttft_ms=300, tpot_ms=500), "gaps": SLO(itl_ms=30), "whole": SLO(e2e_ms=2000, tpot_ms=400),
    "first": SLO(ttft_ms=100),
}  # fmt: skip


def told(slack: SlackTracker, world: World) -> tuple[object, ...]:
    token_deadlines = slack.token_deadlines(world.now, world.scheduler.decodes.step, world.now)
    return (
        round(slack.fixed(world.now), 9),
        round(slack.pending(world.now), 9),
        slack.step_time_target,
        sorted((target, round(left, 9)) for target, left in token_deadlines),
    )


def test_who_asks_late_is_told_what_who_asked_all_along_is_told() -> None:
    dice = random.Random(2)
    world = World(kv_blocks=16, seed=1)
    world.set_knobs(Knobs(10, 0, 32, 12))
    scheduler = world.scheduler
    scheduler.slack.slos.update(SLOS)
    world.core.settings.policy = Whole()
    seen = set()
    for number in range(2000):
        if dice.random() < 0.3 and len(world.live) < 30:
            prompt = [dice.randrange(3) for _ in range(dice.randrange(1, 14))]
            world.add(prompt, dice.randrange(1, 24), request_class=dice.choice([*SLOS, "unknown"]))
        elif dice.random() < 0.05 and world.live:
            world.cancel(dice.choice(world.live))
        world.step()
        assert scheduler.slack.following or not number
        assert told(scheduler.followed(SlackTracker(SLOS)), world) == told(scheduler.slack, world)
        seen.add(repr(told(scheduler.slack, world)))
    assert scheduler.preemptions > 20 and len(seen) > 500, "there was too little to follow"


def test_what_is_due_first_of_prompts_leaves_out_the_answers_of_those_that_decode() -> None:
    world = World(kv_blocks=100)
    slack = world.scheduler.slack
    slack.slos.update(SLOS)
    world.core.settings.policy = Whole()
    world.add([1] * 4, 20, request_class="whole")
    assert world.scheduler.followed(slack).pending(world.now) == pytest.approx(2.0)
    world.step()
    world.now += 1
    assert slack.pending(world.now) == inf
    assert slack.fixed(world.now) < 1
    world.add([2] * 4, 3, request_class="first")
    assert slack.pending(world.now) == pytest.approx(0.1)


def test_a_gap_counts_from_the_latest_step_whether_or_not_others_decoded_in_it() -> None:
    world = World(kv_blocks=100)
    world.scheduler.slack.slos.update(SLOS)
    world.core.settings.policy = Whole()
    world.add([1] * 4, 3, request_class="gaps")
    world.drain()
    world.now += 60
    world.add([2] * 4, 3, request_class="gaps")
    world.step()
    assert world.core.view(world.now).token_deadlines == ((0.03, pytest.approx(0.03)),), "not from a minute ago"


def test_nothing_is_kept_of_a_target_that_nobody_has_any_more() -> None:
    world = World(kv_blocks=100)
    slack = world.scheduler.slack
    world.core.settings.policy = Whole()
    for number in range(20):
        slack.slos["default"] = SLO(tpot_ms=500 + number)
        world.add([1] * 4, 3)
        world.step()
        assert slack.step_time_target < inf
        world.drain()
    assert not slack._tpot
    world.add([1] * 4, 30)
    world.step()
    world.now += 60  # it is late for good
    assert slack.token_deadlines(world.now, world.scheduler.decodes.step, world.now) == () and not slack._tpot
    world.drain()


def test_only_who_asks_in_every_step_has_them_followed() -> None:
    world = World(kv_blocks=100)
    world.scheduler.slack.slos.update(SLOS)
    first = world.add([1] * 4, 90)
    world.step()
    slack, before = world.scheduler.slack, world.core.view(world.now)
    assert before.decode_slack < 1 and before.step_time_target == 0.5, "who looks now and then is told all the same"
    assert not slack.following
    world.core.settings.policy = Whole()
    world.step()
    world.add([2] * 4, 90, request_class="gaps")
    world.step()
    assert slack.following and slack.step_time_target == 0.5
    followed = world.core.view(world.now)
    world.core.settings.policy = None
    world.step()
    assert not slack.following and slack.step_time_target == inf and not slack.token_deadlines(world.now, 0, 0.0), (
        "nothing is kept of them"
    )
    assert (
        {target for target, _ in world.core.view(world.now).token_deadlines}
        == {target for target, _ in followed.token_deadlines}
        == {0.5, 0.03}
    )
    world.cancel(first)
    assert [target for target, _ in world.core.view(world.now).token_deadlines] == [0.03]
    world.core.settings.policy = Whole()
    world.step()
    assert slack.following and slack.step_time_target == inf
    world.drain()
    assert world.core.view(world.now).least_slack == inf
