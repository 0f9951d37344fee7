"""Arrival processes against what probability says of them.

Tolerances: a mean of n gaps with coefficient of variation c has standard error c/√n; each test allows five of them or
more, so that with any seed it would fail less than once in a million; the seeds are fixed besides.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import expon, gamma, kstest

from autotune.workload.processes import Fixed, Gamma, MarkovModulated, poisson, times
from benchmarks.trace_fit.goodness import dispersion

N = 40_000
BURSTY = MarkovModulated(means=(0.01, 2.0), shapes=(1.0, 0.5), transition=((0.98, 0.02), (0.4, 0.6)))


def gaps_of(process, seed: int = 0, n: int = N):
    return np.array(list(islice(process.gaps(np.random.default_rng(seed)), n)))


@pytest.mark.parametrize("rate", [0.2, 3.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    gaps = gaps_of(poisson(rate))
    assert kstest(gaps, expon(scale=1 / rate).cdf).statistic < 2.0 / math.sqrt(N)  # p ≈ 7e-4 at 2/√n
    for window in (1 / rate, 10 / rate):
        windows = gaps.sum() / window
        assert dispersion(gaps, window) == pytest.approx(1, abs=5 * math.sqrt(2 / windows))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_their_mean_and_cv(cv: float) -> None:
    gaps = gaps_of(Gamma(2.0, cv))
    assert gaps.mean() == pytest.approx(0.5, rel=5 * cv / math.sqrt(N))
    assert kstest(gaps, gamma(1 / cv**2, scale=cv**2 / 2).cdf).statistic < 2.0 / math.sqrt(N)


def test_fixed_is_fixed() -> None:
    assert list(islice(times(Fixed(4.0), np.random.default_rng(0)), 4)) == [0.25, 0.5, 0.75, 1.0]


def test_markov_modulated_has_its_rate_and_its_states() -> None:
    # States: share of arrivals 0.4/0.42 and 0.02/0.42; the mean gap follows.
    share = np.array([0.4, 0.02]) / 0.42
    assert BURSTY.stationary() == pytest.approx(share)
    assert BURSTY.rate == pytest.approx(1 / (share @ [0.01, 2.0]))
    gaps = gaps_of(BURSTY)
    # Long gaps come in runs of 1/(1-0.6): the variance of their number is at most twice that of independent ones.
    assert gaps.mean() == pytest.approx(1 / BURSTY.rate, rel=5 * gaps.std() / gaps.mean() * math.sqrt(2 / N))


def test_markov_modulated_is_bursty_where_a_gamma_renewal_is_not() -> None:
    """The same gaps in random order lose the bursts: what is modelled is the order, not only the distribution."""
    gaps = gaps_of(MarkovModulated((0.1, 1.0), (1.0, 1.0), ((0.999, 0.001), (0.01, 0.99))))
    shuffled = np.random.default_rng(1).permutation(gaps)
    assert dispersion(gaps, 20.0) > 4 * dispersion(shuffled, 20.0)


def test_one_state_is_a_gamma_renewal() -> None:
    one = MarkovModulated((0.5,), (0.25,), ((1.0,),))
    assert one.rate == pytest.approx(2.0)
    assert gaps_of(one).std() / gaps_of(one).mean() == pytest.approx(2.0, rel=0.1)


@given(st.sampled_from([Fixed(1.0), poisson(1.0), Gamma(1.0, 3.0), BURSTY]), st.floats(0.01, 100), st.integers(0, 9))
def test_rate_scales_every_gap(process, rate: float, seed: int) -> None:
    scaled = process.at_rate(rate)
    assert scaled.rate == pytest.approx(rate)
    assert gaps_of(scaled, seed, 50) == pytest.approx(gaps_of(process, seed, 50) * process.rate / rate)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "rate is 0"),
        (lambda: Gamma(1, -1), "cv is -1"),
        (lambda: poisson(math.inf), "rate is inf"),
        (lambda: MarkovModulated((1.0,), (1.0, 2.0), ((1.0,),)), "the same number of states"),
        (lambda: MarkovModulated((1.0,), (0.0,), ((1.0,),)), "every mean and shape is 0"),
        (lambda: MarkovModulated((1.0, 1.0), (1.0, 1.0), ((0.5, 0.4), (0.5, 0.5))), "add up to 1"),
    ],
)
def test_impossible_processes_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_dispersion_needs_two_windows() -> None:
    with pytest.raises(ValueError, match="two of them must fit"):
        dispersion(np.ones(10), 6.0)
