"""The controller of a batcher: ceilings where calls fit the SLO, and no window that does not pay; in virtual time."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path
from statistics import median

import pytest

import autotune
from autotune.control.controllers.batching import BatchingController
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.registry import CONTROLLERS, OF_BATCHERS
from runtime import Batcher, batch
from runtime.batching.item import Call, Item
from runtime.batching.strategies import Adaptive, Dynamic, Strategy
from runtime.knobs import Knobs
from runtime.records import LimitedBy, StepRecord
from runtime.slo import SLO
from tests.contract.contract_of_controllers import explained
from tests.unit.batching_control_world import BATCHER_LIMITS, ControlledBatcher
from tests.unit.batching_world import CAPACITY, SLO_400, knobs, latency, poisson, share
from tests.waiting import until


def served(
    strategy: Strategy, start: Knobs, load: float, *, seconds: float = 12, controlled: bool = True
) -> tuple[float, ControlledBatcher]:
    """The share on time after the first third, and the batcher afterwards."""
    batcher = ControlledBatcher(strategy, start, SLO_400)
    found = batcher.serve(poisson(load * CAPACITY, seconds, seed=3), controlled=controlled)
    found.records = [record for record in found.records if record.arrival > seconds / 3]
    if batcher.control is not None:
        explained(batcher.control)
    return share(found, SLO_400), batcher


@pytest.mark.parametrize("strategy", [Adaptive, Dynamic])
def test_a_ceiling_that_is_too_low_is_raised_to_what_the_target_allows(strategy: type[Strategy]) -> None:
    start = knobs(size=6, wait_ms=0)
    without, _ = served(strategy(), start, 0.9, controlled=False)
    kept, batcher = served(strategy(), start, 0.9)
    assert without < 0.7 and kept > 0.995
    most = batcher.knobs.max_batch_size
    assert 32 < most <= 90  # two calls of 20 + 2·90 ms are 400 ms
    assert batcher.knobs.token_budget == start.token_budget and batcher.knobs.chunk_size == start.chunk_size


def test_calls_that_cannot_be_on_time_become_shorter() -> None:
    start = knobs(size=4096, wait_ms=390)  # calls of some 150 items, of more than 300 ms
    without, _ = served(Dynamic(), start, 1.0, controlled=False)
    kept, batcher = served(Dynamic(), start, 1.0, seconds=24)
    assert without < 0.3 and kept > 0.97
    assert batcher.knobs.max_batch_size <= 90 and batcher.knobs.max_wait_ms == 0


def test_a_fixed_window_goes_and_one_that_is_a_ceiling_stays() -> None:
    slow, plain = ControlledBatcher(Dynamic(), knobs(wait_ms=50), SLO_400), knobs(wait_ms=50)
    load = poisson(0.3 * CAPACITY, 10, seed=1)
    found = slow.serve(load)
    assert slow.knobs.max_wait_ms == 0 and latency(found.records[-500:], 50) < 0.045
    priced = ControlledBatcher(Adaptive(call_price_s=inf), knobs(), SLO_400)
    alone = ControlledBatcher(Adaptive(call_price_s=inf), knobs(), SLO_400)
    calls = len(priced.serve(poisson(0.1 * CAPACITY, 10, seed=1)).calls)
    assert calls == len(alone.serve(poisson(0.1 * CAPACITY, 10, seed=1), controlled=False).calls) < 60
    assert priced.knobs.max_wait_ms == knobs().max_wait_ms != plain.max_wait_ms


def test_a_window_stays_where_calls_run_beside_others() -> None:
    with (
        Batcher(list, slo="e2e=1s", strategy="dynamic", max_wait_ms=3, replicas=2) as several,
        autotune.control(several, interval_s=0.001) as control,
    ):
        for i in range(60):
            assert several(i) == i
        assert several.knobs.max_wait_ms == 3 and len(control.decisions) > 1
        assert (several.workers, several.slots) == (2, 2)


def test_cost_is_what_the_budget_is_turned_by() -> None:
    def price(call: Call) -> float:
        return 0.020 + 0.0005 * call.cost

    batcher = ControlledBatcher(Adaptive(), knobs(size=4096, budget=64), SLO_400)
    batcher.serve(poisson(37, 25, seed=3, cost=lambda rng: rng.choice((1, 10, 100))), price)
    assert 200 < batcher.knobs.token_budget <= 360  # a call of 360 takes 200 ms
    assert batcher.knobs.max_batch_size == 4096


def test_nothing_is_left_of_a_burst() -> None:
    batcher = ControlledBatcher(Adaptive(), knobs(), SLO_400)
    items: list[Item] = []
    for start, seconds, load in ((0.0, 6.0, 0.05), (6.0, 6.0, 1.3), (12.0, 8.0, 0.05)):
        items += poisson(load * CAPACITY, seconds, seed=5, start=start)
    found = batcher.serve(items)
    before = latency([r for r in found.records if r.arrival < 6], 50)
    after = [r.e2e for r in found.records if r.arrival > 14 and r.e2e is not None]
    assert median(after) < 1.1 * before and before == pytest.approx(0.022, rel=0.05)


def test_calls_that_follow_no_model_are_not_trusted() -> None:
    dice = random.Random(1)
    start = knobs(size=8, wait_ms=0)
    batcher = ControlledBatcher(Dynamic(), start, SLO_400)
    batcher.serve(poisson(100, 20, seed=2), lambda call: dice.choice((0.001, 0.005, 0.2)))
    assert batcher.control is not None
    regimes = {decision.regime for decision in batcher.control.decisions}
    assert "fallback" in regimes and batcher.knobs.max_batch_size <= 16
    explained(batcher.control)


def step_of(n: int, seconds: float, start: float = 0.0) -> StepRecord:
    return StepRecord(
        start, start + seconds, 1, 0, 0, n, n, 0, 0, n, 0, 0, 0, 0, 0, 0, 0, LimitedBy.DEMAND
    )  # fmt: skip


@pytest.mark.parametrize("first", [5e-5, 1e-3, 0.02])
def test_a_first_call_far_too_short_is_forgotten(first: float) -> None:
    dice = random.Random(1)
    made = BatchingController(SLO_400, knobs(size=64, wait_ms=0))
    for seconds in (0.02, first):
        made.observe_step(step_of(1, seconds))
    for number in range(100):
        n = 1 if number < 2 else dice.randint(1, 32)
        made.observe_step(step_of(n, (0.02 + 0.001 * n) * dice.gauss(1, 0.03)))
        if number == 3:
            assert made.decide(0.0, made.start, BATCHER_LIMITS).regime == "learning", "of four calls"
        if number in (30, 99):
            assert made.predict(16, 16) == pytest.approx(0.036, rel=0.05)


def test_a_model_of_which_a_coefficient_would_be_negative_is_judged_by_what_it_predicts() -> None:
    """Times that fall with the size: no price can say that."""
    dice = random.Random(1)
    made = BatchingController(SLO_400, knobs(size=64, wait_ms=0))
    errors = []
    for _ in range(600):
        n = dice.randint(1, 32)
        seconds = (0.08 - 0.0024 * n) * dice.gauss(1, 0.02)
        errors.append(abs(1 - made.predict(n, n) / seconds))
        made.observe_step(step_of(n, seconds))
    said = made.decide(0.0, made.start, BATCHER_LIMITS)
    assert sum(errors[-200:]) / 200 > 0.4
    assert said.regime == "fallback" and said.evidence["model_error"] > 0.25


def test_a_target_that_one_item_misses_is_said() -> None:
    batcher = ControlledBatcher(Dynamic(), knobs(size=4, wait_ms=0), SLO(e2e_ms=15))
    batcher.serve(poisson(150, 10, seed=2))
    assert batcher.control is not None and batcher.knobs.max_batch_size > 4
    (told, *_) = [d.cause for d in batcher.control.decisions if d.regime == "infeasible"]
    assert told.startswith("an item alone takes 2") and told.endswith(
        "ms, so 15 ms cannot be met: maximizing throughput"
    )


def test_operators_have_the_last_word() -> None:
    batcher = ControlledBatcher(Dynamic(), knobs(size=6, wait_ms=50), SLO_400)
    load = poisson(0.9 * CAPACITY, 8, seed=3)
    batcher.serve(load, pinned={"max_wait_ms": 50}, bounds={"max_batch_size": (1, 24)})
    assert batcher.knobs.max_batch_size == 24 and batcher.knobs.max_wait_ms == 50


def test_which_controller_a_batcher_gets() -> None:
    batcher = ControlledBatcher(Adaptive(), knobs(), SLO_400)
    with autotune.control(batcher) as control:
        assert isinstance(control.controller, BatchingController)
    with autotune.control(batcher, controller="predictive") as control:
        assert isinstance(control.controller, PredictiveController)
    with pytest.raises(
        ValueError,
        match=r"controller is 'best'; it must be one of aimd, .*, batching, module:Class .*, or a Controller",
    ):
        autotune.control(batcher, controller="best")


def test_what_batch_makes_can_be_controlled() -> None:
    @batch(slo="e2e=1s", strategy="dynamic", max_wait_ms=5, memory_limit_bytes=1 << 30, measure_bytes=lambda: 1 << 20)
    def same(items: list[int]) -> list[int]:
        return items

    with autotune.control(same, interval_s=0.001) as control:
        assert isinstance(control.controller, BatchingController)
        # it is dynamic still, with a bound of its memory around it
        until(lambda: same(3) == 3 and same.batcher.knobs.max_wait_ms == 0)
    same.close()


@pytest.mark.parametrize("name", [*CONTROLLERS, *OF_BATCHERS])
def test_every_controller_takes_a_batcher(name: str) -> None:
    """The reference says which controls what."""
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "knobs.md").read_text()
    assert f"| `{name}` | {'engines, ' * (name in CONTROLLERS)}batchers |" in reference
    with Batcher(list, slo="e2e=1s") as batcher, autotune.control(batcher, controller=name) as attached:
        assert list(batcher.map([1, 2])) == [1, 2] and not attached.status().ended
