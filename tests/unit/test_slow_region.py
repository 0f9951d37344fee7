"""A number of decodes from which steps take far longer: found by how it begins, and by nothing else."""

from __future__ import annotations

import math

from autotune.control.controllers.predictive.constants import AGE
from autotune.control.controllers.predictive.trusted_model import SlowRegion


def walk(region: SlowRegion, decodes: list[int], cliff: range = range(0), off: float = 0.0, noise: float = 0.0) -> None:
    """Steps of so many decodes each; those in ``cliff`` take ten times as long."""
    for n in decodes:
        region.saw(n, off + (math.log(10) if n in cliff else 0.0), noise)


UP_AND_DOWN = [*range(30, 60), *range(60, 30, -1)]


def test_what_begins_twice_at_the_same_number_is_a_slow_region() -> None:
    region = SlowRegion()
    walk(region, UP_AND_DOWN, range(48, 64))
    assert region.max_decodes == math.inf, "once is no proof"
    walk(region, UP_AND_DOWN, range(48, 64))
    assert region.max_decodes == 47
    assert region.saw(48, 0.0, 0.0) and not region.saw(47, 0.0, 0.0)


def test_a_machine_that_becomes_slower_as_a_whole_has_none() -> None:
    region = SlowRegion()
    for off in (
        0.0,
        math.log(5),
        0.0,
        math.log(5),
    ):  # it changes between the same two steps, but they are not the usual ones
        walk(region, UP_AND_DOWN * 3, off=off)
    assert region.max_decodes == math.inf


def test_noise_and_a_stall_in_many_crossings_are_no_region() -> None:
    region = SlowRegion()
    for stalled in [True] + [False] * 4 + [True]:
        walk(region, [40, 41, 50], range(50, 51) if stalled else range(0))
    assert region.max_decodes == math.inf
    noisy = SlowRegion()
    walk(noisy, [40, 50] * 10, range(50, 51), noise=0.7)
    assert noisy.max_decodes == math.inf, "where steps are as far off without any reason"


def test_a_model_that_was_scaled_meanwhile_is_no_region_either() -> None:
    region = SlowRegion()
    for _ in range(4):
        region.saw(40, math.log(10), 0.0)
        region.rescaled(10)
        region.saw(50, math.log(10), 0.0)
        region.saw(40, 0.0, 0.0)
        region.rescaled(0.1)
    assert region.max_decodes < math.inf, "ten times as long as the step before, by the new scale"
    calm = SlowRegion()
    for _ in range(4):
        calm.saw(40, math.log(10), 0.0)
        calm.rescaled(10)
        calm.saw(50, 0.0, 0.0)
    assert calm.max_decodes == math.inf


def test_it_is_forgotten_and_the_lowest_counts() -> None:
    region = SlowRegion()
    walk(region, [40, 50] * 2, range(48, 64))
    walk(region, [20, 30] * 2, range(24, 32))
    assert region.max_decodes == 23
    walk(region, [10] * AGE)
    assert region.max_decodes == math.inf
