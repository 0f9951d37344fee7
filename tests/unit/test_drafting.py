"""How many tokens the predictive controller has drafted: more while steps wait for memory, fewer when they compute."""

from __future__ import annotations

import pytest

from autotune import control
from autotune.control.controllers.predictive.drafting import Drafting, probability_of
from autotune.simulate import SimulatedEngine
from autotune.workload import parse_workload
from runtime.knobs import KnobLimits, Knobs
from runtime.records import LimitedBy, StepRecord
from tests.unit.simulated_cases import RunMachine

MEMORY = RunMachine(base=5e-3, chunk=0.0, token=1e-6, context=1e-8, pair=0.0, overlap=False)
"""A further token takes next to nothing."""
COMPUTE = RunMachine(base=1e-4, chunk=0.0, token=2e-3, context=1e-8, pair=0.0, overlap=False)
"""A step takes what its tokens take."""


def step(decodes: int, drafted: int, accepted: int, prefill: int = 0) -> StepRecord:
    return StepRecord(
        0.0, 0.01, 1, decodes, decodes * 100, int(prefill > 0), prefill, prefill, 0, decodes + accepted, decodes, 0, 0, 100,
        0, 0, 2048, LimitedBy.DEMAND, 0, drafted, accepted,
    )  # fmt: skip


def taught(each: int, right: float, decodes: int = 10, share: float = 1.0) -> Drafting:
    made = Drafting(each)
    for _ in range(300):
        drafted = int(decodes * each * share)
        made.step(step(decodes, drafted, round(drafted * right)))
    return made


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_probability_of_one_token_follows_from_the_share_that_was_right(probability: float, count: int) -> None:
    share = sum(probability**i for i in range(1, count + 1)) / count
    assert probability_of(share, count) == pytest.approx(probability, abs=1e-6)


def test_memory_bound_steps_take_more_drafts_and_compute_bound_ones_fewer() -> None:
    more, why = taught(3, 0.5).choose(100.0, 16, 10, lambda further: 0.01)
    assert more == 4 and why == "drafts 4: 50% of drafted tokens are right, and steps have time for more (memory-bound)"
    fewer, why = taught(3, 0.5).choose(100.0, 16, 10, lambda further: 1e-4 + 1e-3 * (10 + further))
    assert fewer == 2 and "take longer than they bring (compute-bound)" in why
    same, why = taught(3, 0.5).choose(100.0, 3, 10, lambda further: 0.01)
    assert same == 3 and why == "drafts 3: 50% of drafted tokens are right"
    assert taught(3, 0.02).choose(100.0, 16, 10, lambda further: 0.01)[0] == 3, "more would bring nothing"


def test_it_knows_nothing_without_drafts() -> None:
    made = Drafting(2)
    for _ in range(100):
        made.step(step(10, 0, 0))
    assert made.choose(9.0, 16, 10, lambda further: 0.01) == (2, "drafts 2: too few yet to tell")
    for _ in range(100):
        made.step(
            step(10, 4, 2, prefill=100)
        )  # where prompts leave little room: right or wrong, but not how many there can be
    assert made.right == pytest.approx(0.5)


def test_it_stops_and_tries_again_after_a_minute() -> None:
    made = taught(1, 0.1)
    slow = lambda further: 1e-4 + 1e-3 * (10 + further)  # noqa: E731
    assert made.choose(100.0, 16, 10, slow)[0] == 0
    made.each = 0
    made.step(step(10, 0, 0))
    assert made.choose(130.0, 16, 10, slow) == (0, "no drafts: they took longer than they brought")
    assert made.choose(161.0, 16, 10, slow) == (1, "drafts 1: tried again")
    made.each = 1
    assert made.choose(162.0, 16, 10, slow) == (1, "drafts 1: too few yet to tell")
    assert made.choose(162.0, 0, 10, slow)[0] == 0, "the engine allows none"


def served(machine: RunMachine, start: int, *, rate: float) -> tuple[list[int], list[str]]:
    """``draft_tokens`` after each decision of the predictive controller, and what those that changed it said."""
    knobs = Knobs(64, 0, 2048, 2048, start)
    engine = SimulatedEngine(machine, kv_tokens=1 << 17, knobs=knobs, limits=KnobLimits(), acceptance=0.7)
    load = parse_workload("poisson:prompt=30,output=300").at_rate(rate)
    with control(engine, slo="ttft=5s,tpot=500ms", interval_s=1.0) as attached:
        engine.serve(load.arrivals(3, duration=60.0))
        engine.run()
        decisions = list(attached.decisions)
    return [int(d.new["draft_tokens"]) for d in decisions], [d.cause for d in decisions]


@pytest.mark.slow
def test_the_controller_turns_it_up_on_a_machine_that_waits_for_memory() -> None:
    counts, causes = served(MEMORY, 2, rate=4.0)
    assert max(counts) >= 5 and any("memory-bound" in cause for cause in causes)


def test_the_controller_turns_it_down_on_a_machine_that_computes() -> None:
    counts, causes = served(COMPUTE, 6, rate=0.8)
    assert min(counts) <= 2 and any("compute-bound" in cause for cause in causes)


def test_the_controller_leaves_it_off_where_it_starts_off() -> None:
    counts, causes = served(MEMORY, 0, rate=4.0)
    assert set(counts) <= {0} and not any("draft" in cause for cause in causes)
