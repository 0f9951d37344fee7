"""Slow bands: found where a cliff is met again and again, and not where a machine slows down."""

from __future__ import annotations

import math

from autotune.control.controllers.predictive.slow_bands import SlowBands


def walk(bands: SlowBands, decodes: list[int], ratio: float = 1.0, cliff: range = range(0)) -> None:
    for n in decodes:
        bands.saw(n, ratio * (10 if n in cliff else 1))


UP_AND_DOWN = [*range(20, 56), *range(55, 20, -1)]


def test_a_cliff_met_twice_is_found_and_room_ends_below_it() -> None:
    bands = SlowBands()
    walk(bands, UP_AND_DOWN, cliff=range(48, 64))
    assert bands.room == math.inf, "once may be the machine"
    walk(bands, UP_AND_DOWN, cliff=range(48, 64))
    assert bands.room == 47 and bands.slow(48) and not bands.slow(47)


def test_a_machine_that_slows_down_is_not_one() -> None:
    bands = SlowBands()
    walk(bands, UP_AND_DOWN)
    walk(bands, UP_AND_DOWN, ratio=5)
    walk(bands, UP_AND_DOWN)
    walk(bands, UP_AND_DOWN, ratio=5)
    assert bands.room == math.inf and not any(bands.slow(n) for n in range(64))


def test_stalls_are_not_one() -> None:
    bands = SlowBands()
    for number, n in enumerate(UP_AND_DOWN * 20):
        bands.saw(n, 10 if number % 37 == 0 else 1)
    assert bands.room == math.inf


def test_a_model_that_was_scaled_meanwhile_changes_nothing() -> None:
    bands = SlowBands()
    walk(bands, UP_AND_DOWN, cliff=range(48, 64))
    bands.rescaled(10)
    walk(bands, UP_AND_DOWN, ratio=0.1, cliff=range(48, 64))
    assert bands.room == 47


def test_it_is_forgotten_when_the_cliff_is_gone() -> None:
    bands = SlowBands()
    walk(bands, UP_AND_DOWN * 2, cliff=range(48, 64))
    assert bands.room == 47
    walk(bands, [*range(40, 56)] * 5)
    assert bands.room == math.inf
    walk(bands, UP_AND_DOWN * 2, cliff=range(48, 64))
    bands.clear()
    assert bands.room == math.inf
