"""The posterior of every candidate once some of them were measured: the simulation, corrected by how far off it was.

Each measurement has a *paired simulation* of the very same requests, by the same cost model and at the same speeds as the
simulation of the candidate. Their difference d leaves out the luck of the arrivals, which is most of the noise of a short
window. The truth about setting x is taken to be

    goodput(x) = simulated(x) + μ + δ(x),     d = μ + δ(x) + ε,    ε ~ N(0, σ²),    δ ~ GP(0, τ² k),

with one error μ common to all, and an error δ that settings share the more alike they behave in the simulation (the
discrepancy of Kennedy and O'Hagan, J. R. Stat. Soc. B 63, 2001). A part of δ is shared only by settings that behave nearly the
same: hardware goes in steps (tiles, graphs) that no smooth model has. σ comes from repeats, τ from the spread of d (its
marginal likelihood). What to measure next follows from the knowledge gradient for correlated priors (Frazier, Powell and
Dayanik, INFORMS J. Comput. 21, 2009): the goodput by which one more measurement is expected to improve the choice.

Everything is in shares of the offered rate; the same inputs give the same numbers.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.profile.parts import Confidence

Vector = NDArray[np.floating[Any]]

_COMMON = 0.25  # sd of μ: the simulator may be off by a quarter, the same for all
_SCALES = np.geomspace(0.003, 0.2, 18)  # candidates for τ
_USUAL = 0.03  # τ and σ are around here unless the measurements say otherwise
_LENGTH = 1.0  # octaves of simulated behaviour over which errors are shared
_NEAR = 0.05  # and over which those are that come of steps of the hardware
_STEPS = 0.25  # share of the latter in δ's variance
_DRAWS = 4096
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)

BEATEN = 0.025
"""Probability that a setting whose 95% interval lies below another's is as good."""

_NOTHING = 0.0005  # a share that would read 0.0%


class Observation(NamedTuple):
    """A measurement of candidate number ``candidate``: measured − simulated goodput, as a share of the offered rate.

    ``full``: every request was met. Two such runs are alike by necessity, and show nothing of the noise.
    """

    candidate: int
    difference: float
    full: bool = False


class Sureness(NamedTuple):
    """``best``: probability that the choice is the best of those measured, which equals share; ``unbeaten``: that none of them
    is better; ``regret``: what it is expected to fall short."""

    best: float
    unbeaten: float
    regret: float


class Posterior:
    """What is expected of candidates with goodput ``simulated`` (shares) and simulated ``behaviour`` (rows, in octaves).

    ``quantum``: the share one request makes, the least noise there is.
    """

    def __init__(self, simulated: Sequence[float], behaviour: Sequence[Sequence[float]], quantum: float) -> None:
        self._prior = np.asarray(simulated, dtype=float)
        rows = np.asarray(behaviour, dtype=float)
        squares = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(axis=2)
        self._alike: Vector = (1 - _STEPS) * np.exp(-squares / (2 * _LENGTH**2)) + _STEPS * np.exp(
            -squares / (2 * _NEAR**2)
        )
        self._quantum = quantum
        self.observations: list[Observation] = []
        self.mean: Vector = self._prior.copy()
        self._cov: Vector = self._covariance(_USUAL)
        self.noise = _USUAL
        self.error = _USUAL

    def observe(self, observation: Observation) -> None:
        """Take a measurement in."""
        self.observations.append(observation)
        self.noise = self._noise()
        index = np.array([o.candidate for o in self.observations])
        found = np.array([o.difference for o in self.observations])
        self.error = self._scale(index, found)
        prior = self._covariance(self.error)
        seen = prior[np.ix_(index, index)] + self.noise**2 * np.eye(len(index))
        gain = np.linalg.solve(seen, prior[index]).T
        self.mean = self._prior + gain @ found
        self._cov = prior - gain @ prior[index]

    @property
    def measured(self) -> list[int]:
        return sorted({o.candidate for o in self.observations})

    def choice(self) -> int:
        """The best of those measured, by what is expected now."""
        return max(self.measured, key=self.expected)

    def expected(self, index: int) -> float:
        """The share that a candidate is expected to serve: of the posterior, only what lies in 0 … 1 can be."""
        return float(_bounded(self.mean[index], self._cov[index, index]))

    def next(self, allowed: Sequence[int]) -> tuple[int, float]:
        """Which of ``allowed`` to measure next, and the share by which that is expected to improve the choice."""
        gains = {k: self._gain(k) for k in allowed}
        best = max(gains, key=gains.__getitem__)
        return best, gains[best]

    def sureness(self, choice: int, beaten: Collection[int] = ()) -> Sureness:
        """Of ``choice`` among those measured, by draws from the posterior (the same draws each time). Ties share.

        ``beaten``: those that measured clearly worse; each is better with :data:`BEATEN` after all, whatever is expected of it.
        """
        measured = [i for i in self.measured if i not in beaten]
        cov = self._cov[np.ix_(measured, measured)] + 1e-12 * np.eye(len(measured))
        drawn = np.random.default_rng(0).multivariate_normal(self.mean[measured], cov, size=_DRAWS, method="eigh")
        draws = drawn.clip(0.0, 1.0)  # nobody serves more than was offered
        best = draws.max(axis=1)
        tied = draws >= best[:, None] - self._quantum / 10
        mine = measured.index(choice)
        right = (1 - BEATEN) ** len(beaten)
        return Sureness(
            right * float((tied[:, mine] / tied.sum(axis=1)).mean()),
            right * float(tied[:, mine].mean()),
            float((best - draws[:, mine]).mean()),
        )

    def _gain(self, k: int) -> float:
        """What a measurement of ``k`` is worth: the best average gain of one, two, four or eight in a row.

        Where noise is large, one alone changes nothing, and by itself would never be made (Frazier and Powell,
        Decision Analysis 7, 2010).
        """
        return max(self._gain_of(k, repeats) / repeats for repeats in (1, 2, 4, 8))

    def _gain_of(self, k: int, repeats: int) -> float:
        """The knowledge gradient: the expected rise of the best of what will have been measured."""
        among = sorted({*self.measured, k})
        moved = self._cov[among, k] / np.sqrt(self._cov[k, k] + self.noise**2 / repeats)
        means = self.mean[among][:, None] + moved[:, None] * _NODES[None, :]
        left = np.diag(self._cov)[among] - moved**2
        after = _bounded(means, left[:, None]).max(axis=0)
        now = max(map(self.expected, self.measured), default=-np.inf)
        return float(after @ _WEIGHTS / _WEIGHTS.sum() - now)

    def _covariance(self, error: float) -> Vector:
        return _COMMON**2 + error**2 * self._alike

    def _noise(self) -> float:
        """σ from repeats of one setting, with the weight of one repeat on what is usual."""
        groups: Mapping[int, list[float]] = defaultdict(list)
        for o in self.observations:
            if not o.full:
                groups[o.candidate].append(o.difference)
        squares = sum((d - statistics.fmean(g)) ** 2 for g in groups.values() for d in g)
        freedom = sum(len(g) - 1 for g in groups.values())
        return float(max(self._quantum, ((_USUAL**2 + squares) / (1 + freedom)) ** 0.5))

    def _scale(self, index: NDArray[np.intp], found: Vector) -> float:
        """τ: mean under its posterior, a log-normal prior around the usual times the marginal likelihood of ``found``."""
        logs = []
        for error in _SCALES:
            seen = self._covariance(error)[np.ix_(index, index)] + self.noise**2 * np.eye(len(index))
            _, size = np.linalg.slogdet(seen)
            logs.append(-0.5 * (size + found @ np.linalg.solve(seen, found)) - 0.5 * np.log(error / _USUAL) ** 2)
        weights = np.exp(np.array(logs) - max(logs))
        return float(weights @ _SCALES / weights.sum())


def _bounded(mean: Any, variance: Any) -> Vector:
    """The mean of min(1, max(0, x)), x ~ N(``mean``, ``variance``): nobody serves more than was offered."""
    sd = np.sqrt(np.maximum(variance, 1e-12))
    return np.asarray(mean - _surplus((mean - 1) / sd) * sd + _surplus(-mean / sd) * sd)


def _surplus(u: Any) -> Any:
    """The mean of max(0, z + u), z ~ N(0, 1)."""
    return np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi) + u * ndtr(u)


def repeat_noise(runs: Sequence[tuple[object, float]]) -> float | None:
    """Coefficient of variation between runs that were alike (equal keys), pooled; None where nothing was repeated."""
    groups: dict[object, list[float]] = defaultdict(list)
    for key, value in runs:
        groups[key].append(value)
    again = [g for g in groups.values() if len(g) > 1]
    repeated = [g for g in again if statistics.fmean(g) > 0]
    freedom = sum(len(g) - 1 for g in repeated)
    if not freedom:
        return 0.0 if again else None
    squares = sum((v / statistics.fmean(g) - 1) ** 2 for g in repeated for v in g)
    return float((squares / freedom) ** 0.5)


def count_noise(met: int, offered: int) -> float:
    """Coefficient of variation of a share of ``offered`` requests: binomial, with one miss and one met at the least.

    What other requests of the same load would change; a repeat of the same requests does not show it.
    """
    if offered < 2:
        return 1.0
    share = min(max(met, 1), offered - 1) / offered
    return float(((1 - share) / (share * offered)) ** 0.5)


def _at_least(share: float) -> str:
    return "less than 0.1%" if share < _NOTHING else f"{share:.1%}"


def confidence(
    best: float,
    regret: float,
    repeats: float | None,
    noise: float,
    measured: int,
    *,
    unbeaten: float | None = None,
    full: bool = False,
    near: int = 0,
    simulation_agrees: bool = True,
    takes_longer: bool = False,
) -> Confidence:
    """The figures and the sentence.

    ``repeats``: by how much runs of the same requests differed, None: nothing was repeated; ``noise``: that of a share of so
    many requests, no less. ``unbeaten``: where others count as equals of the recommended setting, the probability that none
    measured is better; equals share that of being the best. ``full``: in every run all requests met the SLO. ``near``: how many
    other settings have an interval that reaches into the recommended one's. ``simulation_agrees``: no other setting measured is
    better in simulation. ``takes_longer``: ``regret`` is of mean E2E, not of goodput.
    """
    regret = max(0.0, regret)
    if full:
        said = "Noise is not visible: in every run all requests met the SLO."
    elif repeats is None:
        said = "No setting was measured twice."
    else:
        more = f"; sampling noise alone would be {_at_least(noise)}" if noise > repeats else ""
        said = f"Runs of one setting differ by {_at_least(repeats)}{more}."
    what, likely = ("the best", best) if unbeaten is None else ("as good as any measured", unbeaten)
    chance = "above 99%" if likely > 0.99 else f"of {likely:.0%}"
    if regret < _NOTHING:
        falls_short = "take no longer than" if takes_longer else "serve as much as"
    else:
        falls_short = f"take {regret:.1%} longer than" if takes_longer else f"serve {regret:.1%} less than"
    sure = f"{what} with a probability {chance}, and is expected to {falls_short} the best of the measured settings."
    if measured < 2:
        said += " The recommended setting is the only one measured: the recommendation rests on simulation."
    elif not near:
        said += f" Of {measured} measured settings, the recommended setting is {sure}"
    else:
        others = measured - 1
        which = (
            f"the {measured} measured settings"
            if near == others
            else f"the recommended one from {near} of {others} others"
        )
        said += f" The measurements alone do not separate {which}."
        if simulation_agrees and unbeaten is None:  # among equals it may be that none is better
            said += " Simulation prefers the recommended setting."
        said += f" By measurements and simulation together, the recommended setting is {sure}"
    return Confidence(noise=round(noise, 5), best=round(best, 4), regret=round(regret, 5), sentence=said)
