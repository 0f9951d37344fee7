"""What a profile measured, simulated over the very same requests: does the simulation of this machine agree with it?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from autotune.profile.parts import LoadFacts, Point
from autotune.simulate.scenario import Scenario

DRAWS = 8
"""Of the step-time noise."""
_APART = 1_000_003  # between their seeds


@dataclass(frozen=True)
class PairedAttainment:
    """Attainments, shares of the requests that ``point`` measured. ``even``: if each step takes its mean time; ``draws``: under
    draws of the step-time noise (``even`` alone where the profile knows of none)."""

    point: Point
    even: float
    draws: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.draws)

    @property
    def pessimistic(self) -> bool:
        """Every draw lies below the 95% interval of what was measured."""
        return max(self.draws) < self.point.attainment_low

    @property
    def optimistic(self) -> bool:
        """Every draw lies above it."""
        return min(self.draws) > self.point.attainment_high


def paired_attainment(scenario: Scenario, point: Point, load: LoadFacts, stop: Callable[[], bool]) -> PairedAttainment:
    """``point``, measured under ``load``, in ``scenario``. Raises :class:`~autotune.measure.evaluate.Interrupted` when ``stop``
    returns true."""

    def simulated(scenario: Scenario, draw: int) -> float:
        scores = [
            scenario.measure_over(
                point.knobs, point.rate, seed, load.warmup_s, load.window_s, scatter=seed + draw * _APART, stop=stop
            )
            for seed in dict.fromkeys(point.seeds)
        ]
        return sum(score.met for score in scores) / max(1, sum(score.offered for score in scores))

    even = simulated(scenario.even(), 0)
    noisy = scenario.cost.facts.jitter is not None
    return PairedAttainment(
        point, even, tuple(simulated(scenario, draw) for draw in range(DRAWS)) if noisy else (even,)
    )
