"""A model that is scaled at once when the machine changes speed, and not when a step stalls."""

from __future__ import annotations

import random

import pytest

from autotune.control.controllers.predictive.trusted_model import TrustedModel
from runtime.records import LimitedBy, StepRecord
from runtime.step_model import StepFeatures
from tests.tiers import slow_but_for
from tests.unit.control_world import h200

SLOW = range(1000, 2000)


def played(noise: float, stalls: float, *, factor: float = 1.8, seed: int = 1) -> tuple[TrustedModel, dict[int, float]]:
    """The model, and predicted/true at each of 3,000 steps, of which the middle thousand take ``factor`` times as long."""
    dice = random.Random(seed)
    made, now, found = TrustedModel(), 0.0, {}
    for i in range(3000):
        decodes, prefill = dice.randint(20, 60), dice.choice([0, 0, 128, 512])
        step = StepFeatures(decodes, 600 * decodes, prefill, prefill, prefill * (prefill + 1) // 2)
        true = h200(step) * (factor if i in SLOW else 1)
        seconds = true * max(0.3, dice.gauss(1, noise)) * (10 if dice.random() < stalls else 1)
        found[i] = made.model.predict(step) / true
        made.observe(
            StepRecord(
                now, now + seconds, 1, decodes, 600 * decodes, int(prefill > 0), prefill, prefill, step.prefill_attention,
                decodes, decodes, 0, 0, 1, 0, 0, 8192, LimitedBy.BUDGET,
            )
        )  # fmt: skip
        now += seconds
    return made, found


@pytest.mark.parametrize(("noise", "stalls"), [(0.0, 0.0), (0.02, 0.0), (0.02, 0.01), (0.1, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("factor", [1.8, 0.5])
def test_a_change_of_speed_is_followed_within_ten_steps(noise: float, stalls: float, factor: float) -> None:
    made, found = played(noise, stalls, factor=factor)
    assert 2 <= made.changes <= 4
    for change in (SLOW.start, SLOW.stop):
        after = [found[i] for i in range(change + 12, change + 60)]
        assert sum(after) / len(after) == pytest.approx(1, abs=0.2)
    assert found[SLOW.start] == pytest.approx(1 / factor, rel=0.3), "it did change"


@pytest.mark.parametrize(
    ("noise", "stalls"), slow_but_for(((0.02, 0.02), (0.3, 0.0)), [(0.0, 0.0), (0.1, 0.0), (0.02, 0.02), (0.3, 0.0)])
)
def test_noise_and_stalls_are_no_change(noise: float, stalls: float) -> None:
    changes = sum(played(noise, stalls, factor=1.0, seed=seed)[0].changes for seed in range(3))
    assert changes <= (12 if noise == 0.3 else 1)


def test_the_hosts_time_between_steps_is_part_of_what_they_take() -> None:
    """A fifth of each step, as where a host delivers the tokens of many sequences before it plans the next step."""
    made, now = TrustedModel(), 0.0
    for number in range(200):
        decodes = 20 + number % 40
        busy = h200(step := StepFeatures(decodes, 600 * decodes, 0, 0, 0))
        made.observe(
            StepRecord(
                now,
                now + 0.8 * busy,
                1,
                decodes,
                600 * decodes,
                0,
                0,
                0,
                0,
                decodes,
                decodes,
                0,
                0,
                1,
                0,
                0,
                8192,
                LimitedBy.DEMAND,
            )
        )
        now += busy
    assert made.model.predict(step) == pytest.approx(busy, rel=0.02)
