"""The online learner on hardware it was told nothing about."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from runtime.shared.least_squares import RecursiveLeastSquares
from runtime.step_model import StepFeatures, StepLearner
from tests.unit.control_world import h200 as overlapped

Hardware = Callable[[StepFeatures], float]


def additive(step: StepFeatures) -> float:
    tokens = step.decodes + step.prefill_tokens
    return 4e-3 + 9e-4 * tokens + 3e-7 * (step.decode_context + step.prefill_context) + 2e-7 * step.prefill_attention


def draw(dice: random.Random, share_mixed: float = 0.4) -> StepFeatures:
    decodes = dice.randrange(0, 200)
    context = decodes * dice.randrange(200, 2000)
    if dice.random() > share_mixed and decodes:
        return StepFeatures(decodes, context, 0, 0, 0)
    n, behind = dice.randrange(16, 2048), dice.choice([0, 0, dice.randrange(0, 3000)])
    return StepFeatures(decodes, context, n, n + behind, n * behind + n * (n + 1) // 2)


def errors(learner: StepLearner, hardware: Hardware, dice: random.Random, n: int = 400) -> list[float]:
    steps = [draw(dice) for _ in range(n)]
    return sorted(abs(learner.predict(s) / hardware(s) - 1) for s in steps)


@pytest.mark.parametrize("hardware", [overlapped, additive])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_unknown_hardware(hardware: Hardware, noise: float, seed: int) -> None:
    dice = random.Random(seed)
    learner = StepLearner()
    for _ in range(800):
        step = draw(dice)
        stall = 10 if noise and dice.random() < 0.01 else 1
        learner.observe(step, hardware(step) * stall * max(0.2, dice.gauss(1, noise)))
    found = errors(learner, hardware, dice)
    assert statistics.median(found) < (0.05 if noise < 0.1 else 0.08)
    assert found[int(0.9 * len(found))] < 0.25


def test_predicts_after_a_dozen_steps() -> None:
    dice = random.Random(4)
    learner = StepLearner()
    for _ in range(30):
        step = draw(dice)
        learner.observe(step, additive(step))
    assert learner.ready
    assert statistics.median(errors(learner, additive, dice)) < 0.1


def test_follows_a_change_of_speed_even_while_the_inputs_stand_still() -> None:
    dice = random.Random(5)
    learner = StepLearner()
    for _ in range(400):
        step = draw(dice)
        learner.observe(step, overlapped(step) * dice.gauss(1, 0.02))
    still = StepFeatures(64, 64 * 700, 0, 0, 0)
    for _ in range(20_000):  # constant inputs must not wind anything up
        learner.observe(still, overlapped(still) * dice.gauss(1, 0.02))
    assert statistics.median(errors(learner, overlapped, dice)) < 0.08
    for _ in range(300):
        learner.observe(still, 1.8 * overlapped(still) * dice.gauss(1, 0.02))
    assert learner.predict(still) == pytest.approx(1.8 * overlapped(still), rel=0.05)


def test_covariance_stays_bounded_and_coefficients_non_negative() -> None:
    dice = random.Random(6)
    rls = RecursiveLeastSquares(3)
    for i in range(50_000):
        x = [1.0, dice.random() if i < 1000 else 0.5, 0.25]
        rls.update(x, 2.0 + x[1] - 0.5 * x[2] + dice.gauss(0, 0.05))
        assert min(rls.coefficients) >= 0
    assert max(max(map(abs, row)) for row in rls.covariance()) < 1e3
    assert rls.predict([1.0, 0.5, 0.25]) == pytest.approx(2.375, abs=0.05)


def test_a_result_of_next_to_nothing_weighs_no_more_than_others() -> None:
    dice = random.Random(2)
    disturbed, other = RecursiveLeastSquares(3), RecursiveLeastSquares(3)
    for number in range(1200):
        x = [1.0, dice.random(), dice.random()]
        factor = 1.0 if number < 600 else 1.3
        y = factor * (1.0 + 0.5 * x[1] + 0.2 * x[2]) * dice.gauss(1, 0.02)
        for rls in (disturbed, other):
            rls.update(x, y)
        if number == 500:
            disturbed.update(x, 1e-3 * y)
        if number in (520, 700, 1199):
            still = [1.0, 0.5, 0.5]
            assert disturbed.predict(still) == pytest.approx(other.predict(still), rel=0.02)


def test_three_inputs_are_taken_in_as_any_number_of_them_is() -> None:
    class General(RecursiveLeastSquares):
        def _absorb_three(self, x: float, y: float, z: float) -> tuple[list[float], float]:
            return self._absorb([x, y, z])

    dice = random.Random(7)
    written_out, general = RecursiveLeastSquares(3), General(3)
    for i in range(3000):
        still = 400 < i < 1500  # in one direction little is learned, and what is known there is not forgotten
        x = [1.0, 0.5 if still else dice.random(), 0.25 if still else 2 * dice.random()]
        y = 1.0 + 0.7 * x[1] + 0.1 * x[2] + dice.gauss(0, 0.02)
        assert written_out.update(x, y) == pytest.approx(general.update(x, y), rel=1e-6, abs=1e-9)
    assert written_out.coefficients == pytest.approx(general.coefficients, rel=1e-6)
    for one, other in zip(written_out.covariance(), general.covariance(), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_change_of_speed_is_one_of_the_unit() -> None:
    """However small or large results have become: what is learned from then on is the same, bounds at 0 included."""
    dice = random.Random(3)
    other, made = RecursiveLeastSquares(3), RecursiveLeastSquares(3)
    for i in range(600):
        x = [1.0, dice.random(), 4 * dice.random()]
        # The third costs nothing, so that its coefficient is held at 0 half of the time.
        y = 1.0 + 0.3 * x[1] + dice.gauss(0, 0.1)
        scale = 1e-9 ** (i // 100) if i < 500 else 1e9
        if i and i % 100 == 0:
            made.rescale(1e-9 if i < 500 else 1e45)
        other.update(x, y)
        made.update(x, y * scale)
        assert [v / scale for v in made.coefficients] == pytest.approx(other.coefficients, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_impossible_times_are_ignored(bad: float) -> None:
    learner = StepLearner()
    for _ in range(50):
        learner.observe(StepFeatures(4, 400, 0, 0, 0), bad)
    assert learner.samples == 0 and learner.predict(StepFeatures(4, 400, 0, 0, 0)) == 0


@pytest.mark.parametrize("in_progress", [[], [(3000, 64)], [(0, 100), (4096, 256)], [(2048, 10_000)]])
def test_the_most_prompt_tokens_are_those_whose_step_takes_the_time(in_progress: list[tuple[int, int]]) -> None:
    dice = random.Random(2)
    learner = StepLearner()
    for _ in range(400):
        step = draw(dice)
        learner.observe(step, additive(step))
    decodes, context = 16, 16 * 700
    seconds = 3 * learner.predict(StepFeatures(decodes, context, 64, 64, 64 * 65 // 2))
    most = learner.most_prefill(decodes, context, seconds, in_progress)
    parts, left = [], int(most)
    for start, count in [*in_progress, (0, left)]:
        parts.append((start, min(count, left)))
        left -= parts[-1][1]
    parts = [(start, count) for start, count in parts if count]
    tokens = sum(count for _, count in parts)
    reads = sum(start + count for start, count in parts)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in parts)
    assert learner.predict(StepFeatures(decodes, context, tokens, reads, pairs)) == pytest.approx(seconds, rel=0.02)
    if in_progress and in_progress[-1][0]:
        assert most < learner.most_prefill(decodes, context, seconds), "its attention reads what was computed before"


def test_no_prompt_goes_on_in_a_time_that_reading_it_takes() -> None:
    dice = random.Random(2)
    learner = StepLearner()
    for _ in range(400):
        step = draw(dice)
        learner.observe(step, additive(step))
    bare = learner.predict(StepFeatures(4, 400, 1, 1, 1))
    assert learner.most_prefill(4, 400, 1.0001 * bare, [(10**9, 64)]) == 0
