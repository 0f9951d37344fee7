"""Goodput ratios with intervals: what they are of known outcomes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from autotune.bench import Contender, Outcome, Result, Turn, fixed
from benchmarks.live.ratios import geometric_mean, ratio, ratio_of_sums, words
from runtime.knobs import Knobs
from tests.unit.profiles import score

ONE, TWO = fixed(Knobs(16, 0, 128, 128)), fixed(Knobs(4, 0, 32, 32))
SECONDS = 8.0


def result(contender: Contender, number: int, met: Iterable[bool]) -> Result:
    outcomes = [Outcome(SECONDS * i / 40, ok, 10.0, 5.0, 50.0) for i, ok in enumerate(met)]
    return Result(Turn(contender, number, number, number), score(contender.knobs), tuple(outcomes), ())


def test_equal_and_twice_as_good() -> None:
    half = [i % 2 == 0 for i in range(40)]
    same = [result(c, number, half) for number in range(3) for c in (ONE, TWO)]
    assert ratio(same, ONE, TWO, SECONDS, 0).estimate() == pytest.approx((1, 1, 1))
    twice = [r for n in range(3) for r in (result(ONE, n, [True] * 40), result(TWO, n, half))]
    assert ratio(twice, ONE, TWO, SECONDS, 0).estimate() == pytest.approx((2, 2, 2))


def test_only_rounds_that_both_have_count_and_paired_rounds_give_narrow_intervals() -> None:
    # rounds differ by five, contenders by a tenth: pairing takes the first out of the ratio
    easy, hard = [True] * 40, [i % 5 == 0 for i in range(40)]
    worse = {n: [ok and i % 10 != 0 for i, ok in enumerate(met)] for n, met in enumerate((easy, hard, easy, hard))}
    found = [
        r for n, met in enumerate((easy, hard, easy, hard)) for r in (result(ONE, n, met), result(TWO, n, worse[n]))
    ]
    value, low, high = ratio(found, ONE, TWO, SECONDS, 0).estimate()
    assert value == pytest.approx(96 / (36 + 4 + 36 + 4)) and 1.1 <= low <= value <= high <= 2.0
    lonely = [result(ONE, 0, easy), result(ONE, 1, hard), result(TWO, 1, hard)]
    assert ratio(lonely, ONE, TWO, SECONDS, 0).value == 1.0
    apart = ratio([result(ONE, 0, easy), result(TWO, 1, easy)], ONE, TWO, SECONDS, 0)
    assert math.isnan(apart.value) and math.isnan(apart.estimate().low)


def test_means_over_cases_are_geometric_and_unknown_ones_are_left_out() -> None:
    half = [i % 2 == 0 for i in range(40)]
    up = ratio([result(ONE, 0, [True] * 40), result(TWO, 0, half)], ONE, TWO, SECONDS, 0)
    down = ratio([result(ONE, 0, half), result(TWO, 0, [True] * 40)], ONE, TWO, SECONDS, 1)
    assert geometric_mean([up, down]) == pytest.approx((1, 1, 1))
    unknown = ratio([], ONE, TWO, SECONDS, 2)
    assert geometric_mean([up, unknown]).value == pytest.approx(2)
    assert math.isnan(geometric_mean([unknown]).value)


def test_of_a_single_block_there_is_no_interval() -> None:
    half = [i % 2 == 0 for i in range(40)]
    short = ratio([result(ONE, 0, [True] * 40), result(TWO, 0, half)], ONE, TWO, 5.0, 0)
    estimate = short.estimate()
    assert estimate.value > 1 and math.isnan(estimate.low) and math.isnan(estimate.high)
    assert words(estimate) == f"{estimate.value:.3f}"
    longer = ratio([result(ONE, 0, [True] * 40), result(TWO, 0, half)], ONE, TWO, SECONDS, 0)
    assert math.isnan(geometric_mean([short, longer]).low) and geometric_mean([short, longer]).value > 1
    assert "[" in words(longer.estimate())


def test_a_side_with_nothing_in_time_is_no_crash() -> None:
    none = [result(ONE, 0, [True] * 40), result(TWO, 0, [False] * 40)]
    estimate = ratio(none, ONE, TWO, SECONDS, 0).estimate()
    assert estimate.value == math.inf and estimate.low == math.inf


def test_ratios_of_sums_have_an_interval_over_rounds() -> None:
    assert ratio_of_sums([2.0, 4.0], [1.0, 2.0], 0) == pytest.approx((2, 2, 2)), "all rounds say the same"
    value, low, high = ratio_of_sums([1.0, 1.0, 4.0], [1.0, 1.0, 2.0], 0)
    assert value == pytest.approx(6 / 4) and (low, high) == pytest.approx((1.0, 2.0))
    value, low, high = ratio_of_sums([3.0], [2.0], 0)
    assert value == 1.5 and math.isnan(low) and math.isnan(high), "one round does not tell how sure it is"
    assert math.isnan(ratio_of_sums([], [], 0).value)
