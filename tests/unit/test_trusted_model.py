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


class Machine:
    """Runs steps of ``decodes`` with ``context`` tokens in all beside one chunk of a fresh prompt; ``made`` learns from them."""

    def __init__(self) -> None:
        self.made = TrustedModel()
        self._now = 0.0

    def step(self, decodes: int, context: int, prefill: int = 0, times: float = 1.0, *, between: float = 0.0) -> None:
        """A step that takes an H200's time, ``times`` as long; a share ``between`` of that passes before the next one begins."""
        step = features(decodes, context, prefill)
        seconds = h200(step) * times
        self.made.observe(
            StepRecord(
                self._now, self._now + (1 - between) * seconds, 1, decodes, context, int(prefill > 0), prefill, prefill,
                step.prefill_attention, decodes, decodes, 0, 0, 1, 0, 0, 8192, LimitedBy.BUDGET,
            )
        )  # fmt: skip
        self._now += seconds


def features(decodes: int, context: int, prefill: int = 0) -> StepFeatures:
    return StepFeatures(decodes, context, prefill, prefill, prefill * (prefill + 1) // 2)


def played(noise: float, stalls: float, *, factor: float = 1.8, seed: int = 1) -> tuple[TrustedModel, dict[int, float]]:
    """The model, and predicted/true at each of 3,000 steps, of which the middle thousand take ``factor`` times as long."""
    dice = random.Random(seed)
    machine, found = Machine(), {}
    for i in range(3000):
        decodes, prefill = dice.randint(20, 60), dice.choice([0, 0, 128, 512])
        speed = factor if i in SLOW else 1.0
        step = features(decodes, 600 * decodes, prefill)
        found[i] = machine.made.model.predict(step) / (h200(step) * speed)
        noisy = max(0.3, dice.gauss(1, noise)) * (10 if dice.random() < stalls else 1)
        machine.step(decodes, 600 * decodes, prefill, speed * noisy)
    return machine.made, found


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


def test_slow_moments_without_a_prompt_leave_what_is_known_of_prompts() -> None:
    """A step with a prompt in twenty, and moments of 15 steps twice as long: on a shared CPU there is one a second or so. Such
    changes, each of which is found, once went into what was known of prompts one on top of the other: after an hour it predicted
    a million times what they take."""
    dice = random.Random(5)
    machine, slow, worst = Machine(), 0, 1.0
    made, prompt = machine.made, features(2, 600, 512)
    for i in range(20_000):
        prefill = 512 if i % 20 == 0 else 0
        if not prefill and not slow and dice.random() < 0.02:
            slow = 15
        slow = 0 if prefill else max(0, slow - 1)
        machine.step(2, 600, prefill, dice.gauss(1, 0.03) * (2 if slow else 1))
        if i > 500 and prefill:
            ratio = made.model.predict(prompt) / h200(prompt)
            worst = max(worst, ratio, 1 / ratio)
    assert made.changes > 100 and worst < 1.3


def test_what_was_assumed_of_prompts_is_undone_where_it_would_not_show() -> None:
    """Decodes get slower little by little, which is learned, and fast again at once, a change, four times before a prompt
    comes. What is known of prompts then lies below the time of decodes alone, which a step with a prompt is predicted to take at
    least: that it took no less said nothing, and many times the prompt tokens seemed to fit in a step for good."""
    dice, machine = random.Random(0), Machine()
    made = machine.made

    def observe(prefill: int, speed: float = 1.0) -> None:
        machine.step(32, 16_000, prefill, speed * dice.gauss(1, 0.01))

    for number in range(400):
        observe(512 * (number % 4 == 0) + 256 * (number % 8 == 0))
    fit = made.model.most_prefill(32, 16_000, 0.05)
    for _ in range(4):
        for number in range(1500):
            observe(0, 2 ** (number / 1500))
        for _ in range(60):
            observe(0)
    assert made.changes >= 4
    observe(512)
    assert made.model.most_prefill(32, 16_000, 0.05) == pytest.approx(fit, rel=0.1)


@pytest.mark.parametrize("prompt", [8, 64, 128])
def test_a_slowdown_seen_in_decodes_alone_stays_assumed_of_prompts_until_a_step_tells(prompt: int) -> None:
    """The first prompt since then is so small that its step takes as long as its decodes do, whatever prompts cost."""
    machine = Machine()
    made = machine.made

    def observe(prefill: int, times: float) -> None:
        machine.step(128, 128_000, prefill, times)

    for number in range(600):
        observe((256, 512, 1024, 2048)[number // 6 % 4] * (number % 6 == 0), 1.0)
    before = made.model.most_prefill(128, 128_000, 0.05)
    for _ in range(60):
        observe(0, 2.0)
    assert made.changes == 1
    assumed = made.model.most_prefill(128, 128_000, 0.05)
    assert assumed < 0.5 * before
    for number in range(12):
        observe(prompt * (number % 6 == 0), 2.0)
    assert made.model.most_prefill(128, 128_000, 0.05) == pytest.approx(assumed, rel=0.1)
    for _ in range(4):
        observe(2048, 2.0)  # these tell
    assert made.model.most_prefill(128, 128_000, 0.05) < 0.6 * before


def test_the_hosts_time_between_steps_is_part_of_what_they_take() -> None:
    """A fifth of each step, as where a host delivers the tokens of many sequences before it plans the next step."""
    machine = Machine()
    for number in range(200):
        decodes = 20 + number % 40
        machine.step(decodes, 600 * decodes, between=0.2)
    step = features(decodes, 600 * decodes)
    assert machine.made.model.predict(step) == pytest.approx(h200(step), rel=0.02)
