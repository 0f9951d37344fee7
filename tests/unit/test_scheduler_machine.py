"""Random arrivals, cancels, knob changes, failures and time-outs, for thousands of steps; every rule checked each step."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.ordering import ORDERINGS
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.examples import examples
from tests.tiers import slow_but_for
from tests.unit.scheduler_world import BLOCK, World

# A few prompts with common beginnings: prefixes are shared all the time.
_STEMS = [[1] * 9, [1] * 9 + [2] * 7, [2, 1] * 6, []]
prompts = st.builds(
    lambda stem, tail: [*stem, *tail] or [0],
    st.sampled_from(_STEMS),
    st.lists(st.integers(0, 2), max_size=12),
)
knobs = st.builds(
    Knobs,
    max_batch_size=st.integers(1, 12),
    max_wait_ms=st.sampled_from([0, 0, 15, 200]),
    token_budget=st.integers(1, 40),
    chunk_size=st.integers(1, 20),
    draft_tokens=st.sampled_from([0, 0, 1, 2, 5]),
)


class FixedBudget:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, view: SchedulerView) -> int:
        assert view.running + view.waiting > 0
        return self.tokens


class Rate(RateSource):
    prefill_rate = 400.0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(12, 30),
        ordering=st.sampled_from(sorted(ORDERINGS)),
        prefix=st.booleans(),
        seed=st.integers(0, 99),
        drafts=st.booleans(),
        worth=st.sampled_from([BLOCK, 2 * BLOCK, 256]),
    )
    def start(self, blocks: int, ordering: str, prefix: bool, seed: int, drafts: bool, worth: int) -> None:
        self.world = World(
            kv_blocks=blocks, ordering=ordering, prefix=prefix, seed=seed, drafts=drafts, worth_waiting=worth
        )

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 18),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from("ab"),
        timeout=st.one_of(st.none(), st.floats(0, 0.3)),
        deadline=st.one_of(st.none(), st.floats(0, 9)),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        tenant: str,
        timeout: float | None,
        deadline: float | None,
    ) -> None:
        world = self.world
        fields: dict[str, object] = {"priority": priority, "tenant": tenant, "deadline": deadline}
        if timeout is not None:
            fields["expires"] = world.now + timeout
        if len(prompt) + max_tokens > world.scheduler.most_request_tokens:
            with pytest.raises(ValueError, match="the KV pool holds"):
                world.add(prompt, max_tokens, **fields)
            world.added -= 1
        else:
            world.add(prompt, max_tokens, **fields)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        world = self.world
        world.cancel(data.draw(st.sampled_from(world.live)))

    @rule(knobs=knobs)
    def turn_knobs(self, knobs: Knobs) -> None:
        self.world.set_knobs(knobs)

    @rule(budget=st.one_of(st.none(), st.integers(0, 20)))
    def change_policy(self, budget: int | None) -> None:
        self.world.core.settings.policy = None if budget is None else FixedBudget(budget)

    @rule(
        policy=st.sampled_from([None, AdmissionPolicy(late="relegate"), AdmissionPolicy(late="relegate", order=None)])
    )
    def change_admission(self, policy: AdmissionPolicy | None) -> None:
        self.world.scheduler.slack.slos.update(default=SLO(ttft_ms=60))
        self.world.core.set_admission(policy, source=Rate())
        self.world.scheduler.check_integrity()

    @rule(fail=st.sampled_from([0.0, 0.0, 0.2, 1.0]), stop=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 99))
    def change_luck(self, fail: float, stop: float, seed: int) -> None:
        dice = random.Random(seed)
        self.world.executor.fail = lambda s: dice.random() < fail
        self.world.executor.stop = lambda s: dice.random() < stop

    @rule()
    def empty_cache(self) -> None:
        kv = self.world.scheduler.kv
        kv.forget(range(kv.total))
        self.world.scheduler.check_integrity()

    @rule(times=st.integers(1, 12))
    def advance(self, times: int) -> None:
        for _ in range(times):
            outcome = self.world.step()
            if outcome.record is None:
                self.world.now = min(outcome.wake_at, self.world.now + 1)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(1), stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize(
    ("ordering", "drafts"),
    slow_but_for(
        (("deadline", 0), ("fair", 0), ("priority", 4)),
        [*((name, 0) for name in sorted(ORDERINGS)), ("priority", 4)],
    ),
)
def test_thousands_of_steps_under_pressure(ordering: str, drafts: int) -> None:
    """One long life with a small pool: everything happens, and it happens often."""
    dice = random.Random(ordering)
    world = World(kv_blocks=24, ordering=ordering, seed=1, drafts=bool(drafts), worth_waiting=BLOCK)
    for _ in range(5000):
        roll = dice.random()
        if roll < 0.25 and len(world.live) < 40:
            prompt = [*dice.choice(_STEMS), *(dice.randrange(3) for _ in range(dice.randrange(1, 14)))]
            expires = {"expires": world.now + dice.random()} if dice.random() < 0.1 else {}
            world.add(prompt, dice.randrange(1, 24), priority=dice.randrange(3), tenant=dice.choice("abc"), **expires)
        elif roll < 0.28 and world.live:
            world.cancel(dice.choice(world.live))
        elif roll < 0.30:
            sizes = dice.randrange(1, 14), dice.choice([0, 0, 20]), dice.randrange(2, 48), dice.randrange(1, 24)
            world.set_knobs(Knobs(*sizes, draft_tokens=dice.randrange(drafts + 1) if drafts else 0))
        elif roll < 0.32:
            world.core.settings.policy = dice.choice([None, None, FixedBudget(0), FixedBudget(9)])
        world.executor.fail = lambda s: dice.random() < 0.002
        world.executor.stop = lambda s: dice.random() < 0.02
        outcome = world.step()
        if outcome.record is None:
            world.now = min(outcome.wake_at, world.now + 0.05)
            assert outcome.wake_at > world.now - 0.05, "woken for nothing"
    world.drain()
    records = world.records.values()
    assert world.scheduler.preemptions > 20, "the pool was never tight"
    assert sum(r.cached_tokens for r in records) > 20 * BLOCK, "prefixes were never shared"
    assert {str(r.reason) for r in records} == {"length", "stop", "error", "cancelled", "timeout"}
    assert len(records) > 300
    assert {step.limited_by for step in world.steps} >= {"demand", "slots", "budget", "chunk", "kv"}
    if drafts:
        assert sum(step.drafted for step in world.steps) > 100 and sum(step.accepted for step in world.steps) > 20
