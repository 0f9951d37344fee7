"""A learner that begins with what a profile knows: right at once on the same machine, and not for long wrong on another."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import control, load_profile, save_profile
from autotune.control.attach import warm_model
from autotune.control.controllers.predictive import PredictiveController
from autotune.cost.model import CostModel, fit_cost_model
from autotune.profile import Profile, SimulationFacts
from autotune.profile.serving import serving_cost, serving_speed
from autotune.simulate.scenario import Scenario
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.step_model import Knowledge, StepFeatures, StepLearner
from tests.sample_profile import sample_profile
from tests.unit.control_world import SimulatedEngine, h200, poisson, slow_cpu
from tests.unit.test_cost_model import measured
from tests.unit.test_step_model import draw, errors

pytestmark = pytest.mark.unit

Hardware = Callable[[StepFeatures], float]


def warm(hardware: Hardware) -> StepLearner:
    facts = fit_cost_model(measured(hardware)).facts.learner
    assert facts is not None
    return StepLearner.warm_start(
        Knowledge(facts.unit_s, facts.decode, facts.decode_covariance, facts.mixed, facts.mixed_covariance)
    )


@pytest.mark.parametrize("hardware", [h200, slow_cpu])
def test_it_knows_the_machine_before_the_first_step(hardware: Hardware) -> None:
    learner = warm(hardware)
    assert learner.ready
    found = errors(learner, hardware, random.Random(1))
    assert statistics.median(found) < 0.06 and found[int(0.9 * len(found))] < 0.25
    dice = random.Random(2)
    for _ in range(300):
        step = draw(dice)
        learner.observe(step, hardware(step) * dice.gauss(1, 0.02))
    assert statistics.median(errors(learner, hardware, dice)) < 0.06  # and what it sees does not spoil it


@pytest.mark.parametrize("factor", [1.8, 1 / 1.8])
@pytest.mark.parametrize("hardware", [h200, slow_cpu])
@pytest.mark.parametrize("mixed", [0.0, 0.4])
def test_a_stale_one_is_outgrown_within_a_second(hardware: Hardware, factor: float, mixed: float) -> None:
    learner, dice, now, steps = warm(hardware), random.Random(3), 0.0, 0
    while now < 1.0 or steps < 16:
        step = draw(dice, mixed)
        step = step if step.decodes else step._replace(decodes=8, decode_context=2000)
        seconds = factor * hardware(step) * dice.gauss(1, 0.02)
        learner.observe(step, seconds)
        now, steps = now + seconds, steps + 1
    seen = []
    for _ in range(200):
        step = draw(dice, mixed)
        if step.decodes and bool(step.prefill_tokens) <= bool(mixed):
            seen.append(abs(learner.predict(step) / (factor * hardware(step)) - 1))
    assert statistics.median(seen) < 0.12


def test_one_stall_at_the_start_is_not_believed_for_long() -> None:
    learner, dice = warm(h200), random.Random(4)
    for number in range(40):
        step = draw(dice)
        learner.observe(step, h200(step) * (10 if number == 6 else 1))
    assert statistics.median(errors(learner, h200, dice)) < 0.1


def test_knowledge_goes_from_learner_to_learner() -> None:
    dice, taught = random.Random(5), StepLearner()
    for _ in range(300):
        step = draw(dice)
        taught.observe(step, slow_cpu(step))
    learner = StepLearner.warm_start(taught.knowledge)
    for _ in range(50):
        step = draw(dice)
        assert learner.predict(step) == pytest.approx(taught.predict(step))


def test_what_was_never_seen_stays_unknown() -> None:
    """A calibration without prompts: the mixed piece begins cold."""
    taught = StepLearner(warm_up=0)
    for n in range(1, 60):
        taught.observe(StepFeatures(n, 100 * n, 0, 0, 0), 0.01 + 1e-4 * n)
    learner = StepLearner.warm_start(taught.knowledge)
    assert learner.predict(StepFeatures(30, 3000, 0, 0, 0)) == pytest.approx(0.013, rel=0.02)
    dice = random.Random(6)
    for _ in range(40):
        step = draw(dice, 1.0)
        learner.observe(step, slow_cpu(step))
    assert statistics.median(errors(learner, slow_cpu, dice)) < 0.2


def test_nonsense_is_refused() -> None:
    known = Knowledge(0.01, [1.0] * 3, [[1.0] * 3] * 3, [1.0] * 5, [[1.0] * 5] * 5)
    for bad, words in (
        (known._replace(decode=[1.0]), "1 coefficients"),
        (known._replace(mixed=[1.0, 1, 1, 1, math.nan]), "numbers of at least 0"),
        (known._replace(decode=[-1.0, 1, 1]), "numbers of at least 0"),
        (known._replace(unit_s=0.0), "unit_s is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            StepLearner.warm_start(bad)


def profile_of(hardware: Hardware, path: Path) -> Path:
    facts = fit_cost_model(measured(hardware)).facts
    save_profile(sample_profile({"balanced": Knobs(64, 0, 2048, 2048)}).model_copy(update={"cost_model": facts}), path)
    return path


def test_control_with_a_profile_begins_warm(tmp_path: Path) -> None:
    path = profile_of(h200, tmp_path / "mine.yaml")
    loaded = load_profile(path)
    assert loaded.cost_model is not None
    step = StepFeatures(32, 32 * 500, 512, 512, 512 * 513 // 2)
    assert CostModel(loaded.cost_model).predict(step) == pytest.approx(h200(step), rel=0.03)
    engine = SimulatedEngine(h200)
    with control(engine, slo="ttft=500ms,tpot=30ms", profile=path) as attached:
        assert isinstance(attached.controller, PredictiveController)
        assert attached.controller.model.ready
        engine.play(poisson(15, 2, 1000, 200, seed=1))
        assert attached.controller.model.error < 0.15
    assert warm_model(None) is None
    assert warm_model(loaded.model_copy(update={"cost_model": None})) is None


def test_a_machine_found_faster_while_it_served_is_predicted_faster(tmp_path: Path) -> None:
    """One place corrects the calibration; the simulator and the controller both go by it."""
    loaded = load_profile(profile_of(h200, tmp_path / "mine.yaml"))
    facts = SimulationFacts(trials=8, cpu_seconds=1.0, pareto=3, goodput_error=0.1, speed=2.0)
    quick, plain = (
        loaded.model_copy(update={"simulation": s}) for s in (facts, facts.model_copy(update={"speed": 1.0}))
    )
    dice = random.Random(9)
    for _ in range(20):
        step = draw(dice)
        assert serving_cost(plain).predict(step) == pytest.approx(2 * serving_cost(quick).predict(step))
        assert Scenario.of(quick).cost.predict(step) == serving_cost(quick).predict(step)
        slow, fast = warm_model(plain), warm_model(quick)
        assert slow is not None and fast is not None
        assert slow.predict(step) == pytest.approx(2 * fast.predict(step))
    assert quick.cost_model is not None
    more = quick.model_copy(update={"cost_model": quick.cost_model.model_copy(update={"serving_overhead_s": 4e-3})})
    for step in (StepFeatures(16, 16_000, 0, 0, 0, 0), StepFeatures(16, 16_000, 500, 500, 125_250, 1)):
        known, known_more = warm_model(quick), warm_model(more)
        assert known is not None and known_more is not None
        assert known_more.predict(step) == pytest.approx(known.predict(step) + 2e-3)  # at twice the speed
        assert serving_cost(more).predict(step) == pytest.approx(serving_cost(quick).predict(step) + 2e-3)
    written = quick.model_dump(mode="json")
    del written["simulation"]["speed"]  # as earlier files of this version are
    assert serving_speed(Profile.model_validate_json(json.dumps(written))) == 1.0


def test_no_first_step_is_as_long_as_the_knobs_allow(tmp_path: Path) -> None:
    """A slow machine, knobs wide open: with knowledge of it the first steps are as long as the target, and without they grow."""
    path = profile_of(slow_cpu, tmp_path / "mine.yaml")
    load = poisson(15, 4, 1000, 100, seed=2)
    slo = SLO(ttft_ms=2000, tpot_ms=300)
    wide = {"token_budget": 8192, "chunk_size": 8192, "max_batch_size": 64}

    def served(profile: Path | None) -> tuple[int, float]:
        """(requests that missed, longest gap between two tokens)."""
        engine = SimulatedEngine(slow_cpu, knobs=Knobs(64, 0, 8192, 8192))
        with control(engine, slo=slo, profile=profile, pinned=wide):
            records = engine.play(load)
        return sum(bool(slo.violated(r)) for r in records), max(max(r.itl) for r in records)

    (missed, gap), (missed_cold, gap_cold) = served(path), served(None)
    assert missed <= missed_cold <= 1.1 * missed
    assert max(gap, gap_cold) < 0.5, "the knobs allow steps of seconds"
