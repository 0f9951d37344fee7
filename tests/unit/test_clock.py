"""Clocks never run backwards."""

from __future__ import annotations

import pytest

from runtime.clock import Clock, MonotonicClock, VirtualClock


def test_a_virtual_clock_stands_still_until_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert clock.advance(1.5) == clock.now() == 6.5
    assert clock.advance(0) == 6.5
    assert clock.advance_to(9.0) == clock.now() == 9.0
    assert clock.advance_to(2.0) == clock.now() == 9.0


def test_a_virtual_clock_refuses_to_run_backwards() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"^seconds is -1; a clock cannot run backwards$"):
        clock.advance(-1)
    assert clock.now() == 0.0


def test_the_machine_clock_never_falls() -> None:
    clock: Clock = MonotonicClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
