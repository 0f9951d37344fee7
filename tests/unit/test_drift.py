"""The speed that references show: a drift is followed, chance is not."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from autotune.profiling.drift import Drift, ReferenceStep

NOISE = 0.03


def references(slower: Callable[[float], float], seed: int, count: int = 15) -> list[ReferenceStep]:
    """One each four seconds, of half a second times ``slower``, with noise."""
    rng = random.Random(seed)
    return [ReferenceStep(4.0 * i, 0.5 * slower(4.0 * i) * math.exp(rng.gauss(0, NOISE))) for i in range(count)]


def worst(slower: Callable[[float], float], seed: int) -> float:
    """How far off the pace is, relatively to the middle one, at the worst of many times."""
    drift = Drift(references(slower, seed))
    times = [2.0 + i for i in range(53)]
    middle = statistics.median(slower(t) for t in times) / statistics.median(drift.at(t) for t in times)
    return max(abs(drift.at(t) * middle / slower(t) - 1) for t in times)


def test_where_references_scatter_by_chance_the_speed_hardly_moves() -> None:
    off = [worst(lambda t: 1.0, seed) for seed in range(20)]
    assert statistics.median(off) < NOISE / 3  # the references themselves are off by two standard deviations
    assert max(off) < 2 * NOISE


def test_a_drift_is_followed() -> None:
    off = [worst(lambda t: 1.0 + 0.4 * t / 56, seed) for seed in range(20)]
    # unfollowed it is off by 20%, seven times the noise
    assert statistics.median(off) < 2 * NOISE and max(off) < 3.5 * NOISE


def test_a_machine_that_slows_down_once_is_slower_from_then_on() -> None:
    for seed in range(10):
        drift = Drift(references(lambda t: 1.0 if t < 30 else 1.5, seed))
        assert drift.at(48) / drift.at(12) == pytest.approx(1.5, rel=2 * NOISE)


def test_references_are_reported_as_they_were() -> None:
    drift = Drift([ReferenceStep(0.0, 2.0), ReferenceStep(1.0, 1.0), ReferenceStep(2.0, 3.0)])
    assert drift.unevenness == 3.0
    assert drift.at(0.0) == pytest.approx(1.0) and drift.at(-5.0) == pytest.approx(1.0)
    assert drift.at(1.0) == pytest.approx(0.5) and drift.at(9.0) == pytest.approx(1.5)  # three are too few to tell
    assert Drift([ReferenceStep(3.0, 0.25)]).at(7.0) == 1.0


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_a_reference_of_a_clock_that_was_set_back_is_passed_over(bad: float) -> None:
    drift = Drift(
        [ReferenceStep(0.0, bad), *(ReferenceStep(float(i), 0.5) for i in range(1, 6)), ReferenceStep(6.0, bad)]
    )
    assert drift.unevenness == 1.0 and drift.at(0.0) == drift.at(6.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no reference took any time"):
        Drift([ReferenceStep(0.0, bad)])


def test_references_at_one_time_or_all_alike_are_no_trouble() -> None:
    assert Drift([ReferenceStep(1.0, 0.5)] * 6).at(1.0) == 1.0
    assert Drift([ReferenceStep(float(i), 0.5) for i in range(6)]).at(2.5) == pytest.approx(1.0)
