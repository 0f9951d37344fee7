"""Fits a workload's models to a trace: gaps by a hidden Markov model, lengths by banded quantile tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from autotune.workload.lengths import Conditional, Ints, QuantileTable
from autotune.workload.processes import Gamma, MarkovModulated
from autotune.workload.randomness import Floats

SHORTEST_GAP = 1e-5  # s; clocks tie, densities of shapes below 1 do not like 0
SHAPES = (0.05, 5000.0)  # bounds of a state's gamma shape: near-constant gaps (clients on a timer) do occur
PRIOR = 1e-3  # transitions added to every count


class Fit(NamedTuple):
    """A fitted process, the log-likelihood it reached (nats) and after how many rounds."""

    process: MarkovModulated
    log_likelihood: float
    rounds: int


def fit_process(gaps: Floats, states: int, *, rounds: int = 60, tolerance: float = 1e-2) -> Fit:
    """Maximum-likelihood :class:`MarkovModulated` with this many states, by Baum-Welch (Rabiner 1989).

    Expectation-maximisation finds a local optimum, so it runs from four deterministic starts (gaps split by their own
    size, and by the mean of ever wider neighbourhoods, which finds slow changes) and keeps the likeliest. Gamma
    parameters are the closed-form estimate of Ye & Chen (2017), weighted. Ends when the log-likelihood
    gains less than ``tolerance``.

    The chain is kept reversible (counted in both directions): then its stationary shares are the shares found in the
    trace. Free chains fitted to an hour with one slow hump visit each level once and drift off into the last one.
    """
    gaps = np.maximum(gaps, SHORTEST_GAP)
    if len(gaps) < 20 * states:
        raise ValueError(f"{len(gaps)} gaps cannot fit {states} states; give at least {20 * states}")
    fits = [_baum_welch(gaps, start, rounds, tolerance) for start in _starts(gaps, states)]
    return max(fits, key=lambda fit: fit.log_likelihood)


def fit_gamma(gaps: Floats) -> Gamma:
    """Gaps that follow each other by chance, by the estimator that a state of :func:`fit_process` has."""
    (mean,), (shape,) = _gamma_fit(np.maximum(gaps, SHORTEST_GAP), np.ones((len(gaps), 1)))
    return Gamma(1 / float(mean), float(shape) ** -0.5)


def log_likelihood(process: MarkovModulated, gaps: Floats) -> float:
    """Of gaps in a row, nats."""
    log_density = _log_density(np.maximum(gaps, SHORTEST_GAP), process.means, process.shapes)
    return _forward_backward(log_density, process.stationary(), np.asarray(process.transition))[2]


def fit_lengths(prompts: Ints, outputs: Ints, *, bands: int = 16, levels: int = 32) -> Conditional:
    """Quantile tables: of the prompts, and of the outputs within each of ``bands`` equally full bands of prompts."""
    order = np.argsort(prompts, kind="stable")
    table = QuantileTable.fit(prompts, quantile_levels(4 * levels))
    banded = [QuantileTable.fit(outputs[part], quantile_levels(levels)) for part in np.array_split(order, bands)]
    return Conditional(table, tuple(banded))


def quantile_levels(count: int) -> Floats:
    """``count`` even steps from 0 to 1, and four finer ones at the upper end, where the long requests are."""
    even = [i / count for i in range(count + 1)]
    tail = [1 - share / count for share in (0.5, 0.25, 0.1, 0.03)]
    return np.array(sorted(round(level, 7) for level in even + tail))


def _starts(gaps: Floats, states: int) -> list[Floats]:
    """State memberships [n, states] to begin with."""
    starts = []
    for window in (1, 15, max(15, len(gaps) // 60), max(15, len(gaps) // 24)):
        smooth = np.convolve(np.log(gaps), np.ones(window) / window, mode="same")
        rank = np.argsort(np.argsort(smooth, kind="stable"), kind="stable")
        member = np.full((len(gaps), states), 0.01 / states)
        member[np.arange(len(gaps)), rank * states // len(gaps)] += 0.99
        starts.append(member)
    return starts


def _baum_welch(gaps: Floats, member: Floats, rounds: int, tolerance: float) -> Fit:
    states = member.shape[1]
    pair_sum = member[:-1].T @ member[1:]
    means = shapes = np.ones(states)
    start = np.full(states, 1 / states)
    previous = -np.inf
    done = 0
    while done < rounds:
        done += 1
        transition = pair_sum + pair_sum.T + PRIOR
        transition /= transition.sum(axis=1, keepdims=True)
        means, shapes = _gamma_fit(gaps, member)
        member, pair_sum, found = _forward_backward(_log_density(gaps, means, shapes), start, transition)
        start = member[0]
        if found - previous < tolerance:
            break
        previous = found
    order = np.argsort(means)
    process = MarkovModulated(
        tuple(means[order].tolist()),
        tuple(shapes[order].tolist()),
        tuple(tuple(row) for row in transition[np.ix_(order, order)].tolist()),
    )
    return Fit(process, found, done)


def _gamma_fit(gaps: Floats, member: Floats) -> tuple[Floats, Floats]:
    """Weighted Ye & Chen (2017): shape = Σw·Σwx / (Σw·Σwx·ln x − Σw·ln x · Σwx)."""
    total = member.sum(axis=0) + 1e-12
    logs = np.log(gaps)
    mean = gaps @ member / total
    log_mean = logs @ member / total
    covariance = (gaps * logs) @ member / total - mean * log_mean
    shapes = np.clip(mean / np.maximum(covariance, 1e-12), *SHAPES)
    return mean, shapes


def _log_density(gaps: Floats, means: Floats | tuple[float, ...], shapes: Floats | tuple[float, ...]) -> Floats:
    k = np.asarray(shapes)
    theta = np.asarray(means) / k
    x = gaps[:, None]
    result: Floats = (k - 1) * np.log(x) - x / theta - gammaln(k) - k * np.log(theta)
    return result


def _forward_backward(log_density: Floats, start: Floats, transition: Floats) -> tuple[Floats, Floats, float]:
    """Memberships [n, k], summed pair memberships [k, k], log-likelihood; scaled so that nothing underflows."""
    peak = log_density.max(axis=1)
    density = np.exp(log_density - peak[:, None])
    n, k = density.shape
    forward = np.empty((n, k))
    backward = np.ones((n, k))
    scale = np.empty(n)
    row = start * density[0]
    for i in range(n):
        if i:
            row = (row @ transition) * density[i]
        scale[i] = row.sum()
        row = row / scale[i]
        forward[i] = row
    for i in range(n - 2, -1, -1):
        backward[i] = transition @ (density[i + 1] * backward[i + 1]) / scale[i + 1]
    member = forward * backward
    ahead = density[1:] * backward[1:] / scale[1:, None]
    pair_sum = transition * (forward[:-1].T @ ahead)
    return member, pair_sum, float(np.log(scale).sum() + peak.sum())
