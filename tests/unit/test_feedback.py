"""The gain: which way each kind of miss moves it, how far, and when it comes back."""

from __future__ import annotations

import math

import pytest

from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.feedback import FeedbackGain, worth_missing


def unbudgeted(
    gain: FeedbackGain, *, slow: bool = False, late: bool = False, loaded: bool = True, relief: float = 0.0
) -> float:
    before = gain.value
    gain.unbudgeted(slow=slow, late=late, loaded=loaded, attainment=0.99, relief=relief)
    return gain.value / before - 1


def budgeted(
    gain: FeedbackGain, *, slow: bool = False, late: bool = False, loaded: bool = True, may_miss: float = 0.0,
    relief: float = 1.0,
) -> float:  # fmt: skip
    before = gain.value
    gain.budgeted(slow=slow, late=late, loaded=loaded, attainment=0.99, worth=may_miss, relief=relief)
    return gain.value / before - 1


def test_where_steps_have_budgets_a_late_first_token_outweighs_slow_steps() -> None:
    gain = FeedbackGain()
    assert budgeted(gain, slow=True) == pytest.approx(-0.02)
    assert budgeted(gain, slow=True) == pytest.approx(-0.02)
    assert budgeted(gain, slow=True, late=True) == pytest.approx(0.02)


def test_where_larger_steps_are_hardly_cheaper_a_late_first_token_makes_none_longer_than_the_target() -> None:
    """But brings shorter ones back to it."""
    gain = FeedbackGain()
    assert budgeted(gain, late=True, relief=0.2) == 0
    assert budgeted(gain, late=True, relief=0.3) == pytest.approx(0.02)
    assert budgeted(gain, slow=True, late=True, relief=0.2) == pytest.approx(-0.02)
    while gain.value >= 1:
        budgeted(gain, slow=True, relief=0.2)
    assert budgeted(gain, slow=True, late=True, relief=0.2) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("relief", "missed"), [(0.0, 0.01), (0.5, 0.01), (0.75, 0.03), (0.8, 0.04), (0.9, 0.05), (1.0, 0.05)]
)
def test_where_steps_have_budgets_more_may_miss_the_more_shorter_steps_cost(relief: float, missed: float) -> None:
    """It settles where as many miss as the way back says: of a hundred requests that share lowers it, the rest raise it."""
    gain = FeedbackGain()
    budgeted(gain, slow=True)
    assert budgeted(gain, may_miss=worth_missing(relief)) == pytest.approx(0.02 * missed)


def test_where_steps_have_budgets_and_late_requests_leave_nothing_makes_steps_longer_than_the_target() -> None:
    gain = FeedbackGain()
    assert budgeted(FeedbackGain(), late=True) == pytest.approx(0.02), "as long as none leaves"
    gain.shed()
    assert budgeted(gain, late=True) == 0 and gain.value == 1
    for _ in range(constants.WINDOW):
        gain.served_late()
    assert budgeted(gain, late=True) == pytest.approx(0.02), "none has left since so many were served"
    gain.shed()
    gain.clear()
    assert budgeted(gain, late=True) == pytest.approx(0.02), "what old targets taught"
    gain = FeedbackGain()
    gain.shed()
    gain.unbudgeted(slow=False, late=True, loaded=True, attainment=0.99, relief=1.0)
    assert gain.value == pytest.approx(1.02), "knobs alone bound the mean of steps, not each of them"


def test_late_requests_stay_in_the_queue_once_some_were_served_and_none_left() -> None:
    gain = FeedbackGain()
    for _ in range(constants.FEW):
        assert not gain.keeps
        gain.served_late()
    assert gain.keeps and not gain.sheds
    gain.shed()
    for _ in range(constants.WINDOW):
        assert gain.sheds and not gain.keeps, "those that were begun in time, and late all the same"
        gain.served_late()
    assert gain.keeps and not gain.sheds
    gain.clear()
    assert not gain.keeps


def test_where_knobs_alone_hold_slow_steps_outweigh_and_lateness_counts_as_far_as_larger_steps_help() -> None:
    assert unbudgeted(FeedbackGain(), slow=True, late=True, relief=1.0) == pytest.approx(-0.02)
    assert unbudgeted(FeedbackGain(), late=True, relief=0.0) == 0
    assert unbudgeted(FeedbackGain(), late=True, relief=0.5) == pytest.approx(0.01)


@pytest.mark.parametrize("move", [budgeted, unbudgeted])
def test_it_comes_back_under_load_and_no_further_than_where_it_began(move: object) -> None:
    gain = FeedbackGain()
    for _ in range(10):
        move(gain, slow=True)  # type: ignore[operator]
    low = gain.value
    move(gain, loaded=False)  # type: ignore[operator]
    assert gain.value == low < 0.9
    for _ in range(3000):
        move(gain)  # type: ignore[operator]
    assert gain.value == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize("move", [budgeted, unbudgeted])
def test_it_stays_in_its_bounds(move: object) -> None:
    gain = FeedbackGain()
    for _ in range(1000):
        move(gain, slow=True)  # type: ignore[operator]
    assert gain.value == 0.6
    for _ in range(1000):
        gain.unbudgeted(slow=False, late=True, loaded=True, attainment=0.99, relief=1.0)
    assert gain.value == 4.0
    gain.clear()
    assert gain.value == 1.0


def test_what_a_burst_taught_is_forgotten_at_rest_and_what_slowness_taught_is_not() -> None:
    gain = FeedbackGain()
    for _ in range(200):
        unbudgeted(gain, late=True, relief=1.0)
    assert gain.value == 4.0
    gain.rest(10)
    assert gain.value == pytest.approx(1 + 3 / math.e)
    gain.rest(100)
    assert gain.value == pytest.approx(1.0, abs=1e-3)
    for _ in range(10):
        budgeted(gain, slow=True)
    low = gain.value
    gain.rest(100)
    assert gain.value == low < 1
