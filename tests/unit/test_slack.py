"""How long until a promise is broken: the same whether followed from the first request on or from now on."""

from __future__ import annotations

import random

from runtime.knobs import Knobs
from runtime.llm.slack import SlackTracker
from runtime.slo import SLO
from tests.unit.scheduler_world import World

SLOS = {
    "default": SLO(ttft_ms=300, tpot_ms=500), "gaps": SLO(itl_ms=30), "whole": SLO(e2e_ms=2000, tpot_ms=400),
    "first": SLO(ttft_ms=100),
}  # fmt: skip


def told(slack: SlackTracker, world: World) -> tuple[object, ...]:
    decodes = world.scheduler.decodes
    dues = slack.dues(world.now, decodes.step, decodes.last_end or world.now)
    return round(slack.fixed(world.now), 9), slack.pace, sorted((target, round(left, 9)) for target, left in dues)


def test_who_asks_late_is_told_what_who_asked_all_along_is_told() -> None:
    dice = random.Random(2)
    world = World(kv_blocks=16, seed=1)
    world.set_knobs(Knobs(10, 0, 32, 12))
    scheduler = world.scheduler
    scheduler.slack.slos.update(SLOS)
    assert not scheduler.slack.following, "nobody has asked"
    world.core.view(world.now)
    assert scheduler.slack.following
    seen = set()
    for _ in range(2000):
        if dice.random() < 0.3 and len(world.live) < 30:
            prompt = [dice.randrange(3) for _ in range(dice.randrange(1, 14))]
            world.add(prompt, dice.randrange(1, 24), request_class=dice.choice([*SLOS, "unknown"]))
        elif dice.random() < 0.05 and world.live:
            world.cancel(dice.choice(world.live))
        world.step()
        late = SlackTracker(SLOS)
        late.follow((*scheduler.waiting, *scheduler.prefills), scheduler.decodes)
        assert told(late, world) == told(scheduler.slack, world)
        seen.add(repr(told(late, world)))
    assert scheduler.preemptions > 20 and len(seen) > 500, "there was too little to follow"
