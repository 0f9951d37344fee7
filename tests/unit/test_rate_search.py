"""The one search for a rate, and the one local search: on plain functions, to the last question asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.simulate.capacity import RateSearch, uphill
from runtime.knobs import Knobs

RATES = st.floats(min_value=1e-2, max_value=1e4)


def searched(search: RateSearch, truth: float) -> tuple[RateSearch, list[float]]:
    """Asked until it is done, of something that holds every rate up to ``truth``."""
    tried: list[float] = []
    while (rate := search.ask()) is not None:
        tried.append(rate)
        search.tell(rate, rate <= truth)
        assert len(tried) < 60
    return search, tried


@given(truth=RATES, start=RATES, step=st.sampled_from([1.1, 1.5, 2.0]), precision=st.sampled_from([0.01, 0.03, 0.2]))
def test_the_rate_is_bracketed_to_the_precision(truth: float, start: float, step: float, precision: float) -> None:
    search, tried = searched(RateSearch(start, precision=precision, step=step), truth)
    assert search.held <= truth < search.failed
    assert search.failed / search.held <= 1 + precision + 1e-9
    assert len(set(tried)) == len(tried), "nothing is asked twice"


@given(truth=RATES, starts=st.tuples(RATES, RATES))
def test_where_it_begins_changes_only_how_long_it_takes(truth: float, starts: tuple[float, float]) -> None:
    one, other = (searched(RateSearch(start, precision=0.01), truth)[0] for start in starts)
    assert (one.held, one.failed) == (other.held, other.failed)


@given(truth=RATES, start=RATES, bounds=st.tuples(RATES, RATES))
def test_it_stays_inside_its_bounds(truth: float, start: float, bounds: tuple[float, float]) -> None:
    low, high = sorted(bounds)
    search, tried = searched(RateSearch(start, precision=0.03, lowest=low, highest=high), truth)
    assert all(low <= rate <= high for rate in tried)
    if truth >= high:
        assert search.held == high and search.failed == math.inf
    elif truth < low:
        assert search.held == 0 and search.failed == low


def test_what_is_reported_need_not_be_what_was_requested() -> None:
    """On the hardware other rates come in than were asked for. A rate held above one that was missed was luck."""
    search = RateSearch(10.0, precision=0.03, step=1.2)
    assert search.ask() == pytest.approx(10.0, rel=0.02)
    search.tell(8.0, True)
    search.tell(12.0, False)
    search.tell(13.0, True)
    assert (search.held, search.failed) == (8.0, 12.0)
    following = search.ask()
    assert following is not None and 8.0 < following < 12.0
    search.tell(7.5, False)
    assert search.held == 0 and search.failed == 7.5
    below = search.ask()
    assert below is not None and below < 7.5


def knobs(slots: int) -> Knobs:
    return Knobs(max_batch_size=slots)


def around(one: Knobs) -> list[Knobs]:
    return [knobs(n) for n in (one.max_batch_size - 3, one.max_batch_size + 3) if n > 0]


def test_uphill_ends_on_a_hill_and_asks_of_nothing_twice() -> None:
    tried: list[int] = []

    def worth(one: Knobs, best: float) -> float:
        tried.append(one.max_batch_size)
        return 100.0 - abs(one.max_batch_size - 40)

    found = uphill([knobs(10), knobs(25), knobs(10)], worth, around, steps=9)
    assert max(found, key=found.__getitem__) == knobs(40)
    assert len(tried) == len(set(tried)) == len(found)
    found = uphill([knobs(10), knobs(25)], worth, around, steps=1)
    assert max(found, key=found.__getitem__) == knobs(28)


def test_uphill_asks_for_one_at_least_and_searches_from_nothing_worthless() -> None:
    assert list(uphill([knobs(1), knobs(2)], lambda one, best: 1.0, around, steps=5, late=lambda: True)) == [knobs(1)]
    assert set(uphill([knobs(1), knobs(2)], lambda one, best: 0.0, around, steps=5)) == {knobs(1), knobs(2)}
    assert uphill([], lambda one, best: 1.0, around, steps=5) == {}


def test_uphill_says_what_is_to_be_beaten() -> None:
    bars: list[float] = []

    def worth(one: Knobs, best: float) -> float:
        bars.append(best)
        return float(one.max_batch_size)

    uphill([knobs(3), knobs(9), knobs(5)], worth, lambda one: [], steps=3)
    assert bars == [-math.inf, 3.0, 9.0]
