"""The trim: which way each kind of miss moves it, how far, and when it comes back."""

from __future__ import annotations

import math

import pytest

from autotune.control.controllers.trim import Trim


def unbudgeted(
    trim: Trim, *, slow: bool = False, late: bool = False, loaded: bool = True, relief: float = 0.0
) -> float:
    before = trim.value
    trim.unbudgeted(slow=slow, late=late, loaded=loaded, attainment=0.99, relief=relief)
    return trim.value / before - 1


def budgeted(trim: Trim, *, slow: bool = False, late: bool = False, loaded: bool = True) -> float:
    before = trim.value
    trim.budgeted(slow=slow, late=late, loaded=loaded, attainment=0.99)
    return trim.value / before - 1


def test_where_steps_have_budgets_a_late_first_token_outweighs_a_slow_pace() -> None:
    assert budgeted(Trim(), late=True) == pytest.approx(0.02)
    assert budgeted(Trim(), slow=True) == pytest.approx(-0.02)
    assert budgeted(Trim(), slow=True, late=True) == pytest.approx(0.02)


def test_where_knobs_alone_hold_a_slow_pace_outweighs_and_lateness_counts_as_far_as_larger_steps_help() -> None:
    assert unbudgeted(Trim(), slow=True, late=True, relief=1.0) == pytest.approx(-0.02)
    assert unbudgeted(Trim(), late=True, relief=0.0) == 0
    assert unbudgeted(Trim(), late=True, relief=0.5) == pytest.approx(0.01)


@pytest.mark.parametrize("move", [budgeted, unbudgeted])
def test_it_comes_back_under_load_and_no_further_than_where_it_began(move: object) -> None:
    trim = Trim()
    for _ in range(10):
        move(trim, slow=True)  # type: ignore[operator]
    low = trim.value
    move(trim, loaded=False)  # type: ignore[operator]
    assert trim.value == low < 0.9
    for _ in range(3000):
        move(trim)  # type: ignore[operator]
    assert trim.value == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize("move", [budgeted, unbudgeted])
def test_it_stays_in_its_bounds(move: object) -> None:
    trim = Trim()
    for _ in range(1000):
        move(trim, slow=True)  # type: ignore[operator]
    assert trim.value == 0.6
    for _ in range(1000):
        trim.budgeted(slow=False, late=True, loaded=True, attainment=0.99)
    assert trim.value == 4.0
    trim.clear()
    assert trim.value == 1.0


def test_what_a_burst_taught_is_forgotten_at_rest_and_what_slowness_taught_is_not() -> None:
    trim = Trim()
    for _ in range(200):
        budgeted(trim, late=True)
    assert trim.value == 4.0
    trim.rest(10)
    assert trim.value == pytest.approx(1 + 3 / math.e)
    trim.rest(100)
    assert trim.value == pytest.approx(1.0, abs=1e-3)
    for _ in range(10):
        budgeted(trim, slow=True)
    low = trim.value
    trim.rest(100)
    assert trim.value == low < 1
