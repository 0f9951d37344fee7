"""Length distributions: quantile functions against their definition, and the dependence of outputs on prompts."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import lognorm, spearmanr

from autotune.workload.lengths import (
    Conditional,
    Constant,
    Independent,
    Lognormal,
    QuantileTable,
    Uniform,
    pairs,
)

U = np.linspace(0, 1, 2001)[:-1]


def test_quantile_functions() -> None:
    assert set(Constant(7).quantile(U)) == {7.0}
    values, counts = np.unique(Uniform(3, 6).quantile(U), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6] and counts.tolist() == [500] * 4
    assert Lognormal(100, 0.8).quantile(U[1:]) == pytest.approx(lognorm(0.8, scale=100).ppf(U[1:]))
    assert np.isfinite(Lognormal(100, 0.8).quantile(np.array([0.0]))).all()


@pytest.mark.parametrize(("mean", "cv"), [(512, 1.0), (40, 0.2)])
def test_lognormal_of_mean_and_cv(mean: float, cv: float) -> None:
    values = Lognormal.of_mean_cv(mean, cv).quantile((np.arange(200_000) + 0.5) / 200_000)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.std() / values.mean() == pytest.approx(cv, rel=0.02)


@given(st.lists(st.integers(1, 10_000), min_size=50, max_size=400))
def test_a_quantile_table_stays_near_its_data(data: list[int]) -> None:
    levels = np.linspace(0, 1, 41)
    table = QuantileTable.fit(np.array(data), levels)
    assert (table.values[0], table.values[-1]) == (min(data), max(data))
    # Between two levels the table may be off by what lies between them, at them by one datum.
    drawn = np.sort(table.quantile((np.arange(4000) + 0.5) / 4000))
    for q in levels[1:-1]:
        assert table.quantile(np.array([q]))[0] in data
    assert drawn[0] >= min(data) and drawn[-1] <= max(data)


def test_outputs_follow_the_band_of_the_prompt() -> None:
    """A dependence no rank correlation sees: short and long prompts with short answers, middle ones with long answers."""
    model = Conditional(Uniform(1, 3000), (Uniform(1, 50), Uniform(300, 400), Uniform(1, 50)))
    drawn = np.array(list(islice(pairs(model, np.random.default_rng(0)), 6000)))
    middle = (drawn[:, 0] > 1000) & (drawn[:, 0] <= 2000)
    assert middle.mean() == pytest.approx(1 / 3, abs=5 * np.sqrt(2 / 9 / 6000))
    assert drawn[middle, 1].min() >= 300 and drawn[~middle, 1].max() <= 50
    assert abs(spearmanr(drawn).statistic) < 5 / np.sqrt(6000)


def test_lengths_are_whole_and_at_least_one() -> None:
    model = Independent(Lognormal(0.3, 1.0), Lognormal(1.0, 2.0))
    for prompt, output in islice(pairs(model, np.random.default_rng(0)), 1500):
        assert type(prompt) is int and prompt >= 1 and output >= 1


def test_a_changed_distribution_shifts_no_other_draw() -> None:
    """Inverse transform: request k has the same place in each distribution whatever the distributions are."""
    draws = [
        list(islice(pairs(Independent(prompt, Uniform(1, 10**6)), np.random.default_rng(4)), 100))
        for prompt in (Constant(5), Lognormal(50, 1))
    ]
    assert [o for _, o in draws[0]] == [o for _, o in draws[1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0), "tokens is 0"),
        (lambda: Uniform(5, 4), "high is 4; it must be at least low, 5"),
        (lambda: Lognormal(1, 0), "sigma is 0"),
        (lambda: Lognormal.of_mean_cv(10, -1), "cv is -1"),
        (lambda: QuantileTable((0, 1), (1,)), "2 levels and 1 values"),
        (lambda: QuantileTable((0, 0.5, 0.9), (1, 2, 3)), "ascend from 0 to 1"),
        (lambda: QuantileTable((0, 1), (2, 1)), "must not descend"),
        (lambda: Conditional(Constant(1), ()), "at least one band"),
    ],
)
def test_impossible_distributions_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
