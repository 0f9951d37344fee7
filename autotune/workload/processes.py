"""When requests come: Poisson, gamma and fixed renewal processes, and a Markov-modulated one for bursty traffic.

Each process draws from the generator it is given and nothing else, and scaling its rate multiplies every time, so two
rates of one process see the same pattern (common random numbers). Time 0 is an arrival that is not sent: the first
request comes one gap later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, Self

import numpy as np

from autotune.workload.randomness import BLOCK, Floats
from autotune.workload.spec import positive


class ArrivalProcess(Protocol):
    """Makes ascending times, s, without end."""

    @property
    def rate(self) -> float:
        """Mean arrivals/s in the long run."""
        ...

    def at_rate(self, rate: float) -> Self: ...

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds from each arrival to the next, the first from time 0."""
        ...


def times(process: ArrivalProcess, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times of ``process``, s."""
    return accumulate(process.gaps(rng))


@dataclass(frozen=True)
class Fixed:
    """One request every ``1/rate`` seconds."""

    rate: float

    def __post_init__(self) -> None:
        positive("rate", self.rate)

    def at_rate(self, rate: float) -> Fixed:
        return replace(self, rate=rate)

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        while True:
            yield 1 / self.rate


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed gaps with mean ``1/rate`` and coefficient of variation ``cv`` (1 is Poisson).

    A cv above 1 gives clumps of a few requests, not minutes of load and minutes of silence: for those see
    :class:`MarkovModulated`.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        positive("rate", self.rate)
        positive("cv", self.cv)

    def at_rate(self, rate: float) -> Gamma:
        return replace(self, rate=rate)

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        shape = 1 / self.cv**2
        while True:
            yield from (rng.standard_gamma(shape, size=BLOCK) / shape / self.rate).tolist()


def poisson(rate: float) -> Gamma:
    """Independent users: exponential gaps."""
    return Gamma(rate=rate, cv=1.0)


@dataclass(frozen=True)
class MarkovModulated:
    """A hidden Markov chain steps at each arrival; the state it enters gives the gap's gamma distribution.

    ``means`` (s) and ``shapes`` describe the gap in each state (shape below 1: clumps; 1: Poisson; above: regular);
    ``transition[i][j]`` is the chance that a gap of state i is followed by one of state j. States that last make bursts
    and lulls, at every time scale the fit has found. (A Markovian arrival process with gamma sojourns; Rabiner 1989 for
    the chain, Fischer & Meier-Hellstern 1993 for modulated arrivals.)
    """

    means: tuple[float, ...]
    shapes: tuple[float, ...]
    transition: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        n = len(self.means)
        if (
            n == 0
            or len(self.shapes) != n
            or len(self.transition) != n
            or any(len(row) != n for row in self.transition)
        ):
            raise ValueError(f"means, shapes and transition must describe the same number of states, here {n}")
        for value in (*self.means, *self.shapes):
            positive("every mean and shape", value)
        for row in self.transition:
            if any(p < 0 for p in row) or not math.isclose(sum(row), 1, abs_tol=1e-6):
                raise ValueError(f"transition row {row} must hold chances that add up to 1")

    def stationary(self) -> Floats:
        """Long-run share of arrivals in each state."""
        matrix = np.asarray(self.transition)
        n = len(matrix)
        balance = np.vstack([matrix.T - np.eye(n), np.ones(n)])
        solution: Floats = np.linalg.lstsq(balance, np.append(np.zeros(n), 1.0), rcond=None)[0]
        return solution

    @property
    def rate(self) -> float:
        return float(1 / (self.stationary() @ np.asarray(self.means)))

    def at_rate(self, rate: float) -> MarkovModulated:
        positive("rate", rate)
        factor = self.rate / rate
        return replace(self, means=tuple(mean * factor for mean in self.means))

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        steps = [(np.cumsum(row) / sum(row)).tolist() for row in self.transition]
        scales = np.asarray(self.means) / np.asarray(self.shapes)
        shapes = np.asarray(self.shapes)
        state = int(np.searchsorted(np.cumsum(self.stationary()), rng.random(), side="right"))
        state = min(state, len(steps) - 1)
        while True:
            states = []
            for u in rng.random(BLOCK).tolist():
                states.append(state)
                state = bisect_right(steps[state], u)
            yield from (rng.standard_gamma(shapes[states]) * scales[states]).tolist()
