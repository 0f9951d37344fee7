"""What is believed of candidates: corrected by measurements, sure as far as the noise lets it be."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.profiling.posterior import Observation, Posterior, count_noise, repeat_noise


def posterior(simulated: list[float], apart: float = 3.0) -> Posterior:
    return Posterior(simulated, [[apart * i] for i in range(len(simulated))], quantum=0.005)


def test_an_error_common_to_all_changes_no_ranking() -> None:
    found = posterior([0.9, 0.8, 0.7])
    found.observe(Observation(0, -0.2))
    found.observe(Observation(1, -0.2))
    assert found.choice() == 0
    assert found.mean[2] == pytest.approx(0.5, abs=0.05)  # expected of one that was never measured


def test_measurements_overrule_the_simulation() -> None:
    found = posterior([0.9, 0.88])
    for _ in range(3):
        found.observe(Observation(0, -0.15))
        found.observe(Observation(1, 0.0))
    assert found.choice() == 1
    sure = found.sureness(1)
    assert sure.best > 0.95 and sure.regret < 0.005
    assert found.sureness(0).best < 0.05 and found.sureness(0).regret > 0.05
    assert found.sureness(0, beaten=[1]) == (0.975, 0.975, 0.0)  # whatever is expected of what it has beaten


def test_noise_makes_unsure() -> None:
    quiet, loud = posterior([0.9, 0.88]), posterior([0.9, 0.88])
    for found, spread in ((quiet, 0.002), (loud, 0.15)):
        for sign in (1, -1, 1, -1):
            found.observe(Observation(0, sign * spread))
            found.observe(Observation(1, sign * spread))
    assert loud.noise > 5 * quiet.noise
    assert quiet.sureness(0).best > loud.sureness(0).best
    assert quiet.sureness(0).regret < loud.sureness(0).regret


def test_settings_that_behave_alike_share_their_errors() -> None:
    near, far = posterior([0.9, 0.88, 0.88], apart=0.05), posterior([0.9, 0.88, 0.88], apart=5.0)
    for found in (near, far):
        for _ in range(3):
            found.observe(Observation(0, 0.0))
            found.observe(Observation(1, -0.2))
    assert near.mean[2] < far.mean[2]


def test_the_next_measurement_is_where_something_can_be_learned() -> None:
    found = posterior([0.9, 0.89, 0.3])
    found.observe(Observation(0, 0.0))
    index, gain = found.next([0, 1, 2])
    assert index == 1 and gain > 0.001  # the rival, not the hopeless one
    assert found.next([0, 2])[1] < gain
    for _ in range(12):
        found.observe(Observation(0, 0.0))
        found.observe(Observation(1, -0.1))
    assert found.next([0, 1, 2])[1] < 0.001  # nothing left worth a measurement


@pytest.mark.slow
def test_the_probability_is_that_of_draws_from_the_truth() -> None:
    """Worlds are drawn as the posterior supposes; in those, the choice is the best about as often as it says."""
    rng = np.random.default_rng(5)
    said, right = [], 0
    for _ in range(150):
        simulated = rng.uniform(0.8, 0.86, 4)
        truth = simulated + rng.normal(0, 0.1) + rng.normal(0, 0.03, 4)
        found = posterior(list(simulated))
        for index in (0, 1, 2, 3, 0, 1):
            found.observe(Observation(index, float(truth[index] - simulated[index] + rng.normal(0, 0.03))))
        choice = found.choice()
        said.append(found.sureness(choice).best)
        right += truth[choice] == truth.max()
    assert right / 150 == pytest.approx(np.mean(said), abs=0.12)


def test_noise_is_that_of_repeats_alone() -> None:
    assert repeat_noise([("a", 10.0), ("b", 20.0)]) is None
    assert repeat_noise([("a", 10.0), ("a", 10.0), ("b", 99.0)]) == 0.0
    assert repeat_noise([("a", 0.0), ("a", 0.0)]) == 0.0, "repeated, and nothing was served"
    assert repeat_noise([("a", 9.0), ("a", 11.0)]) == pytest.approx(0.1 * 2**0.5)


def test_runs_that_met_everything_show_no_noise() -> None:
    ceiling, seen = posterior([0.9, 0.88]), posterior([0.9, 0.88])
    for _ in range(6):
        ceiling.observe(Observation(0, 0.0, full=True))
        seen.observe(Observation(0, 0.0))
    assert seen.noise < 0.02 < ceiling.noise


def test_settings_beyond_the_ceiling_share_being_best() -> None:
    found = posterior([1.3, 1.3, 1.2])
    for index in (0, 1, 2):
        found.observe(Observation(index, 0.0, full=True))
    sure = found.sureness(0)
    assert sure.best == pytest.approx(1 / 3, abs=0.02) and sure.regret == pytest.approx(0.0, abs=1e-6)
    assert sure.unbeaten > 0.99, "nobody is better, though three are as good"


def test_a_share_of_few_requests_is_noisy_even_without_a_miss() -> None:
    assert count_noise(55, 55) == pytest.approx((1 / 54 / 55) ** 0.5)
    assert count_noise(90, 100) == pytest.approx((0.1 / (0.9 * 100)) ** 0.5)
    assert count_noise(0, 10) > 0.5 and count_noise(1, 1) == 1.0


def test_of_what_lies_beyond_the_ceiling_the_surer_is_expected_to_serve_more() -> None:
    """Both means are above 1; the draws, cut at the ceiling, are those of the posterior."""
    found = posterior([1.02, 1.02])
    found.observe(Observation(0, 0.0))
    for _ in range(8):
        found.observe(Observation(1, 0.0))
    assert found.mean.min() > 1 and found.expected(0) < found.expected(1) < 1 and found.choice() == 1
    for index in (0, 1):
        drawn = np.random.default_rng(1).normal(found.mean[index], found._cov[index, index] ** 0.5, 200_000)
        assert found.expected(index) == pytest.approx(drawn.clip(0, 1).mean(), abs=2e-4)


def test_a_step_of_the_hardware_is_expected_between_settings_that_are_nearly_alike() -> None:
    """One measured a little away leaves something to learn; one of the very same behaviour leaves nothing."""
    left = {}
    for apart in (0.0, 0.15):
        found = posterior([0.9, 0.9], apart=apart)
        for _ in range(4):
            found.observe(Observation(0, 0.0))
        left[apart] = found.next([1])[1]
    assert left[0.0] == pytest.approx(0.0, abs=1e-6) and left[0.15] > 0.004
