"""The oracle: the best fixed knobs for each phase, known beforehand. Queues carry over from phase to phase.

Search. Every cell of the grid serves the whole scenario on one seed, but for those that only allow more
sequences at once than there ever were; the best six of each phase, and overall, on three; the
best three of each on all. What is best in each phase, put together, is a schedule; from there, coordinate descent: phase by phase
the other candidates are tried on all seeds, until no change helps. A setting is chosen on the mean of the seeds it is judged on,
which favours the oracle. The budget is the number of runs, kept with the result.

Whoever is compared with one setting for the whole run has a local search from the grid's best (:mod:`benchmarks.local_search`).

``contender`` says what every cell has besides: nothing (``static``), early rejection, or order and rejection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.controller.contenders import STATIC
from benchmarks.controller.run import Outcome
from benchmarks.controller.scenarios import COLD, Scenario
from benchmarks.controller.work import Task, Workers, by_slots, roomy
from benchmarks.local_search import local_search
from runtime.knobs import Knobs

Schedule = tuple[Knobs, ...]

_ROUNDS = ((1, 6), (3, 3))  # seeds, and how many cells of each phase go on to the next round
_TRIED = 2  # other settings tried for a phase in the descent
SEARCH = (_ROUNDS, _TRIED)
"""The constants that a finding in the grid depends on."""
FIRST = 3  # seeds that every setting of a local search serves


class Best(NamedTuple):
    """The best schedule with its outcomes by seed, the best single setting with what it met, and how many runs it took."""

    schedule: Schedule
    by_seed: dict[int, Outcome]
    single: Knobs
    single_met: dict[int, int]
    runs: int


class OracleSearch:
    """One search; every run is made once."""

    def __init__(self, scenario: Scenario, seeds: Sequence[int], workers: Workers, *, contender: str = STATIC) -> None:
        self._scenario, self._seeds, self._workers = scenario, tuple(seeds), workers
        self._contender = contender
        self._known: dict[tuple[Schedule, int], Outcome] = {}

    def find(self) -> Best:
        cells = self._different(self._scenario.grid.cells())
        for count, kept in _ROUNDS:
            seeds = self._seeds[:count]
            self.evaluate([(cell,) for cell in cells], seeds)
            cells = self._survivors(cells, seeds, kept)
        self.evaluate([(cell,) for cell in cells], self._seeds)
        phases = range(len(self._scenario.phases))
        ranked = [self._ranked(cells, phase) for phase in phases]
        single = max(cells, key=lambda cell: self._total((cell,)))
        schedule = self._descend(tuple(cells[0] for cells in ranked), ranked)
        if self._total((single,)) > self._total(schedule):
            schedule = (single,)
        return self._best(schedule, single)

    def find_single(self) -> Best:
        """The best setting for the whole run, without the search phase by phase."""
        cells = self._different(self._scenario.grid.cells())
        for count, kept in _ROUNDS:
            seeds = self._seeds[:count]
            self.evaluate([(cell,) for cell in cells], seeds)
            cells = sorted(cells, key=lambda cell: -self._total((cell,), seeds))[:kept]
        return self.best_of(cells)

    def refine(self, single: Knobs) -> Best:
        """The best that a local search finds from ``single``, a setting for the whole run."""

        def met(cells: Sequence[Knobs], seeds: Sequence[int]) -> list[float]:
            self.evaluate([(cell,) for cell in cells], seeds)
            return [self._total((cell,), seeds) for cell in cells]

        found = local_search(
            single, COLD, lambda cells: met(cells, self._seeds[:FIRST]), lambda cells: met(cells, self._seeds)
        )
        return self._best((found,), found)

    def best_of(self, cells: Sequence[Knobs]) -> Best:
        """The best of a few settings, each for the whole run."""
        self.evaluate([(cell,) for cell in cells], self._seeds)
        single = max(cells, key=lambda cell: self._total((cell,)))
        return self._best((single,), single)

    def judge(self, schedule: Schedule, single: Knobs) -> Best:
        """What known settings do here: for variants of a scenario, which take over its best ones."""
        self.evaluate([schedule, (single,)], self._seeds)
        return self._best(schedule, single)

    def evaluate(self, schedules: Iterable[Schedule], seeds: Iterable[int]) -> None:
        """Make the runs that have not been made."""
        seeds = tuple(seeds)
        tasks = [
            Task(self._scenario.name, self._contender, seed, schedule)
            for schedule in dict.fromkeys(schedules)
            for seed in seeds
            if (schedule, seed) not in self._known
        ]
        for task, outcome in self._workers.runs(tasks):
            self._known[task.schedule, task.seed] = outcome

    def _different(self, cells: Sequence[Knobs]) -> list[Knobs]:
        """Cells that do not behave alike on the first seed; all of these have been run there."""
        found: list[Knobs] = []
        for group in by_slots(cells):
            free = [cell for cell in found if not self._known[(cell,), self._seeds[0]].full]
            fresh = [cell for cell in group if roomy(cell, free) is None]
            self.evaluate([(cell,) for cell in fresh], self._seeds[:1])
            found += fresh
        return found

    def _descend(self, schedule: Schedule, ranked: Sequence[Sequence[Knobs]]) -> Schedule:
        best, improved = schedule, len(schedule) > 1
        self.evaluate([best], self._seeds)
        while improved:
            improved = False
            for phase, others in enumerate(ranked):
                tried = [(*best[:phase], knobs, *best[phase + 1 :]) for knobs in others[: _TRIED + 1]]
                self.evaluate(tried, self._seeds)
                found = max(tried, key=self._total)
                if self._total(found) > self._total(best):
                    best, improved = found, True
        return best

    def _survivors(self, cells: Sequence[Knobs], seeds: Sequence[int], kept: int) -> list[Knobs]:
        views = [self._ranked(cells, phase, seeds) for phase in range(len(self._scenario.phases))]
        views.append(sorted(cells, key=lambda cell: -self._total((cell,), seeds)))
        return list(dict.fromkeys(cell for view in views for cell in view[:kept]))

    def _ranked(self, cells: Sequence[Knobs], phase: int, seeds: Sequence[int] | None = None) -> list[Knobs]:
        """Cells by what they met of a phase's requests, the most first; of those that did alike, one."""
        met = {
            cell: sum(self._known[(cell,), seed].phases[phase][1] for seed in seeds or self._seeds) for cell in cells
        }
        return sorted(cells, key=lambda cell: -met[cell])

    def _total(self, schedule: Schedule, seeds: Sequence[int] | None = None) -> int:
        return sum(self._known[schedule, seed].met for seed in seeds or self._seeds)

    def _best(self, schedule: Schedule, single: Knobs) -> Best:
        by_seed = {seed: self._known[schedule, seed] for seed in self._seeds}
        single_met = {seed: self._known[(single,), seed].met for seed in self._seeds}
        return Best(schedule, by_seed, single, single_met, len(self._known))
