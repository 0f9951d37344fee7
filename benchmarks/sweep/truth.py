"""What settings are really worth on a case's machine: long runs of them all, under the same requests, without noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.sweep.cases import Case, Machine
from runtime.knobs import Knobs

_SEED = 900_000_007  # the truth's requests; contenders' begin elsewhere
_WINDOWS = 4  # of a measurement each
_FIRST, _CELLS, _FINAL = 2, 16, 5  # seeds all cells of the short list get, how many those are, how many get all seeds


class Truth:
    """Long-run goodput of settings, measured once each; ``share``: of the rate offered."""

    def __init__(self, case: Case, seeds: int) -> None:
        self._case, self._seeds = case, seeds
        self._known: dict[tuple[Knobs, int], float] = {}

    def share(self, knobs: Knobs, seeds: int | None = None) -> float:
        """Share of the requests offered that ``knobs`` serve within the SLO in the long run."""
        values = [self._run(knobs, _SEED + i) for i in range(seeds or self._seeds)]
        return statistics.fmean(values)

    def best(self, cells: Mapping[Knobs, float], chosen: Iterable[Knobs]) -> tuple[Knobs, float]:
        """The best of a grid and of what was chosen. ``cells``: goodput of each cell by short runs, which tell where to look."""
        short = sorted(distinct(cells), key=lambda knobs: cells[knobs], reverse=True)[:_CELLS]
        first = {knobs: self.share(knobs, min(_FIRST, self._seeds)) for knobs in short}
        final = sorted(first, key=lambda knobs: first[knobs], reverse=True)[:_FINAL]
        shares = {knobs: self.share(knobs) for knobs in dict.fromkeys([*final, *chosen])}
        best = max(shares, key=lambda knobs: shares[knobs])
        return best, shares[best]

    def _run(self, knobs: Knobs, seed: int) -> float:
        if (knobs, seed) not in self._known:
            machine = Machine(self._case, seed, noise=0.0, windows=_WINDOWS)
            self._known[knobs, seed] = machine.measure(knobs, seed).attainment
        return self._known[knobs, seed]


def distinct(cells: Mapping[Knobs, float]) -> Sequence[Knobs]:
    """One cell of each value: where a limit never binds, all cells above it behave alike to the last digit."""
    return list({value: knobs for knobs, value in cells.items()}.values())
