"""How fast prompts are said to be computed: who waits for a slot is told of the wait, who has one is not."""

from __future__ import annotations

import random

import pytest

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import STALE_S, PrefillRate
from runtime.records import LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures
from tests.fakes import Records
from tests.unit.control_world import Formula


def steady(step: StepFeatures) -> float:
    return 0.02 + 1e-4 * (step.decodes + step.prefill_tokens)


class Steps:
    """A rate that is told of steps, one after the other from 0 s on."""

    def __init__(self) -> None:
        self.rate, self.now = PrefillRate(), 0.0

    def step(self, seconds: float, prompt: int, limited: LimitedBy, times: int = 1, *, budget: int = 512) -> None:
        for _ in range(times):
            end, attention = self.now + seconds, prompt * (prompt + 1) // 2
            self.rate.observe(StepRecord(
                self.now, end, 1, 4, 400, min(prompt, 1), prompt, prompt, attention, 4, 4, 1, 500, 99, 0, 0, budget, limited
            ))  # fmt: skip
            self.now = end

    def seconds(self, work: float, *, begins: bool = False) -> float:
        return self.rate.seconds_for(work, self.now, begins=begins)


def test_full_steps_say_how_fast_prompts_are_computed() -> None:
    steps = Steps()
    steps.step(0.05, 500, LimitedBy.BUDGET, 40)
    assert steps.rate.per_second(steps.now) == pytest.approx(10_000)
    assert steps.seconds(1_000) == pytest.approx(0.1)
    assert steps.seconds(1_200) == pytest.approx(0.15), "whole steps"


@pytest.mark.parametrize("limited", [LimitedBy.SLOTS, LimitedBy.KV])
def test_who_waits_for_a_slot_is_told_how_long_others_have_waited(limited: LimitedBy) -> None:
    steps = Steps()
    steps.step(0.05, 500, limited, 40)
    steps.step(0.02, 0, limited, 50)
    assert steps.seconds(500) == pytest.approx(0.1, rel=0.6), "a second's tokens, in two seconds by now"
    for seconds in (10, 100, 1_000, 100_000):
        steps.step(1.0, 0, limited, seconds - round(steps.now) if seconds > steps.now else 0)
        assert 0.02 * seconds < steps.seconds(500) < 0.2 * seconds, "it grows as the wait does, and no faster"


def test_who_has_a_slot_is_not() -> None:
    steps = Steps()
    steps.step(0.05, 508, LimitedBy.BUDGET, 40)
    steps.step(0.02, 0, LimitedBy.SLOTS, 150)
    assert steps.seconds(500) > 0.15
    assert steps.seconds(500, begins=True) == pytest.approx(0.05, rel=0.05)
    steps.step(0.02, 30, LimitedBy.DEMAND)
    assert steps.seconds(500) == pytest.approx(0.05, rel=0.05), "nothing holds anybody back any more"
    steps.step(0.02, 0, LimitedBy.SLOTS)
    assert steps.seconds(500) <= 0.1, "nor did it since"


def test_a_step_that_its_slots_leave_half_empty_says_nothing_of_how_fast_prompts_are_computed() -> None:
    steps = Steps()
    steps.step(0.05, 20, LimitedBy.SLOTS, 40)
    assert steps.seconds(2_000) == pytest.approx(5.0)
    assert steps.seconds(2_000, begins=True) == 0
    steps.step(0.05, 508, LimitedBy.SLOTS, 40)
    assert steps.seconds(2_000, begins=True) == pytest.approx(0.2), "a full one does, whatever it is called"


def test_steps_in_which_decodes_leave_prompts_no_room_are_time_of_prompts_for_all() -> None:
    steps = Steps()
    for _ in range(60):
        steps.step(0.03, 0, LimitedBy.BUDGET, 2)
        steps.step(0.04, 500, LimitedBy.BUDGET)
    for begins in (False, True):
        assert steps.rate.per_second(steps.now, begins=begins) == pytest.approx(5_000, rel=0.01)


def test_nothing_is_known_for_long() -> None:
    steps = Steps()
    assert steps.seconds(1e6) == 0
    steps.step(0.05, 0, LimitedBy.SLOTS, 40)
    assert steps.seconds(1e6) == 0, "no prompt was computed yet"
    steps.step(0.05, 500, LimitedBy.BUDGET, 40)
    steps.now += STALE_S + 0.01
    assert steps.seconds(1e6) == 0


@pytest.mark.parametrize(("slots", "streams", "rate"), [(4, 3, 1), (8, 7, 1), (8, 6, 2), (16, 14, 2)])
def test_long_streams_that_hold_most_slots_lock_nobody_out(slots: int, streams: int, rate: int) -> None:
    dice, now = random.Random(1), 3.0
    arrivals = [Arrival(0.5 * n, 400, 5_000, ((n, 400),)) for n in range(streams)]
    while (now := now + dice.expovariate(rate)) < 120:
        prompt = dice.choice([50, 900])
        arrivals.append(Arrival(now, prompt, 20, ((len(arrivals), prompt),)))

    def served(admission: AdmissionPolicy | None) -> list[RequestRecord]:
        engine = SimulatedEngine(
            Formula(steady), kv_tokens=10**6, slo="ttft=1s", knobs=Knobs(slots, 0, 512, 512), limits=KnobLimits(),
            admission=admission,
        )  # fmt: skip
        heard = Records()
        engine.subscribe(heard)
        engine.serve(arrivals)
        engine.run()
        return heard.requests

    met = [sum(map(SLO(ttft_ms=1_000).met, served(policy))) for policy in (None, AdmissionPolicy())]
    assert met[1] >= 0.95 * met[0]
    assert max((r.retry_after_s or 0.0 for r in served(AdmissionPolicy())), default=0.0) < 30
