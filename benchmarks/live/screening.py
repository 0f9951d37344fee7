"""Which fixed settings are worth measuring: a grid in simulation, on the step times of this very machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from autotune.bench import Contender, Result, fixed
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from benchmarks.live.serving import average_seeds, turn
from runtime.knobs import Knobs

GRID = tuple(
    Knobs(batch, 0, budget, budget)
    for batch, budget in product((64, 32, 16, 8), (32, 48, 64, 96, 128, 192, 256, 512, 1024))
) + tuple(Knobs(batch, 0, budget, 64) for batch, budget in product((64, 16), (128, 256, 1024)))

ROUNDS = 3
SEED = 500  # apart from those of the rounds that are measured


Simulation = Callable[[int], Machine]
"""A machine as good as new; the seed is that of its noise."""


class Screened(NamedTuple):
    """A contender, and its attainment in simulation."""

    contender: Contender
    share: float


def screen(
    simulation: Simulation,
    case: Case,
    duration: float,
    grid: Sequence[Knobs] = GRID,
    held: Callable[[Knobs], Contender] = fixed,
) -> list[Screened]:
    """The settings of ``grid``, each as ``held`` has it, in simulation, best first; one of those that came to the same."""
    seeds = average_seeds(case, SEED, ROUNDS, duration)
    found: dict[tuple[tuple[int, float | None], ...], Screened] = {}
    for knobs in grid:
        contender = held(knobs)
        results = serve(simulation, case, contender, duration, seeds)
        alike = tuple((r.score.met, r.score.tpot_ms.p50) for r in results)
        found.setdefault(alike, Screened(contender, share(results)))
    return sorted(found.values(), key=lambda screened: screened.share, reverse=True)


def expected(simulation: Simulation, case: Case, contender: Contender, duration: float) -> float:
    """The attainment that the simulation predicts for ``contender``."""
    return share(serve(simulation, case, contender, duration, average_seeds(case, SEED, ROUNDS, duration)))


def serve(
    simulation: Simulation, case: Case, contender: Contender, duration: float, seeds: Sequence[int]
) -> list[Result]:
    return [turn(simulation(seed), case, contender, number, seed, seed, duration) for number, seed in enumerate(seeds)]


def share(results: Iterable[Result]) -> float:
    results = list(results)
    return sum(r.score.met for r in results) / max(1, sum(r.score.offered for r in results))
