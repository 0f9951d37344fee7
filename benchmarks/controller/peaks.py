"""Peak goodput: the highest over a grid of fixed settings and rates, whatever the attainment. Loads are relative to it.

Requests stay in the queue here until they are served. With a queue timeout goodput goes on rising far past capacity, for then
whoever has a short prompt is still in time, and a load of 1.0 would be more than can be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.controller.scenarios import GRID, LOADS, Load
from benchmarks.controller.work import Peak, PeakTask, Workers, by_slots, roomy
from runtime.knobs import Knobs

_SEED = 90_001  # no contender's
_USUAL = (Knobs(256, 0, 2048, 2048), Knobs(64, 0, 512, 512), Knobs(16, 0, 256, 256))  # to find out where to look
_CELLS = 6
_STEP = 1.08  # from one rate to the next, in the end
_STANDS = 0.9  # of what a shorter run showed: a peak that is one
SEARCH = (_SEED, [(cell.max_batch_size, cell.token_budget) for cell in _USUAL], _CELLS, _STEP)
"""The constants that a finding depends on; not how it is made sure of."""


class PeakSearch:
    """Raises the rate while usual settings serve more; ranks all cells there; goes uphill along rates with the best of them."""

    def __init__(self, load: Load, workers: Workers) -> None:
        self._load = LOADS.index(load)
        self._workers = workers
        self._found: dict[float, dict[Knobs, Peak]] = {}
        self.runs = 0

    def find(self) -> tuple[float, Knobs, float]:
        """(goodput, setting, rate) of the peak."""
        rate = self._raise()
        cells = _best(self._different(GRID.cells(), 1.1 * rate), _CELLS)
        for factor in (1.25, _STEP):
            rate = self._uphill(rate, factor, cells)
        each = [(peak.goodput, r, knobs) for r, peaks in self._found.items() for knobs, peak in peaks.items()]
        each.sort(reverse=True, key=lambda found: found[0])
        final = [(self._mean(knobs, r), knobs, r) for _, r, knobs in each[:6]]
        best = max(final, key=lambda found: found[0])
        if best[0] > _STANDS * each[0][0]:
            return best
        for goodput, r, knobs in self._of_lower_rates(each):
            if best[0] > _STANDS * goodput:
                break
            best = max(best, (self._mean(knobs, r), knobs, r), key=lambda found: found[0])
        return self._uphill_in_longer_runs(best, cells)

    def _uphill_in_longer_runs(
        self, best: tuple[float, Knobs, float], cells: Sequence[Knobs]
    ) -> tuple[float, Knobs, float]:
        """The same in longer runs, from a rate that stands in them up and down: shorter ones have not said where the peak is."""
        for step in (_STEP, 1 / _STEP):
            while True:
                rate = round(best[2] * step, 6)
                found = max(((self._mean(knobs, rate), knobs, rate) for knobs in cells), key=lambda each: each[0])
                if found[0] <= best[0]:
                    break
                best = found
        return best

    @staticmethod
    def _of_lower_rates(each: Sequence[tuple[float, float, Knobs]]) -> list[tuple[float, float, Knobs]]:
        """The best of each rate below those of the first six. Just past capacity a queue takes longer to grow than a run of
        this search lasts: all of the six may be there, and none of them stand in longer runs."""
        lowest = min(r for _, r, _ in each[:6])
        best: dict[float, tuple[float, float, Knobs]] = {}
        for found in each:
            if found[1] < lowest:
                best.setdefault(found[1], found)
        return sorted(best.values(), reverse=True, key=lambda found: found[0])

    def _different(self, cells: Sequence[Knobs], rate: float) -> dict[Knobs, Peak]:
        """Those of ``cells`` that do not behave alike."""
        found: dict[Knobs, Peak] = {}
        for group in by_slots(cells):
            free = [cell for cell, peak in found.items() if not peak.full]
            found |= self.measure([cell for cell in group if roomy(cell, free) is None], rate, 400)
        return found

    def _raise(self) -> float:
        """Where usual settings serve the most, on a coarse ladder of rates."""
        rate, best, at = 0.2, 0.0, 0.2
        while rate <= 8 * at:
            value = max(peak.goodput for peak in self.measure(_USUAL, rate, 300).values())
            if value > best:
                best, at = value, rate
            if value < 0.6 * best:
                break
            rate *= 1.5
        return at

    def _uphill(self, rate: float, factor: float, cells: Sequence[Knobs]) -> float:
        """The rate of the highest goodput, by steps of ``factor``; two lower ones in a row end the way."""
        best, at = self._goodput(rate, cells), rate
        for step in (factor, 1 / factor):
            worse, tried = 0, at * step
            while worse < 2:
                value = self._goodput(tried, cells)
                if value > best:
                    best, at, worse = value, tried, 0
                else:
                    worse += 1
                tried *= step
        return at

    def _goodput(self, rate: float, cells: Sequence[Knobs]) -> float:
        rate = round(rate, 6)
        if rate not in self._found:
            self._found[rate] = self.measure(cells, rate, 1200)
        return max(peak.goodput for peak in self._found[rate].values())

    def _mean(self, knobs: Knobs, rate: float) -> float:
        tasks = [PeakTask(self._load, knobs, rate, 3000, _SEED + i) for i in (1, 2, 3)]
        self.runs += len(tasks)
        return sum(peak.goodput for _, peak in self._workers.peaks(tasks)) / len(tasks)

    def measure(self, cells: Iterable[Knobs], rate: float, requests: int) -> dict[Knobs, Peak]:
        """What each of ``cells`` does at ``rate``, over so many requests or a while."""
        tasks = [PeakTask(self._load, knobs, rate, requests, _SEED) for knobs in cells]
        self.runs += len(tasks)
        return dict(
            sorted(((task.knobs, peak) for task, peak in self._workers.peaks(tasks)), key=lambda each: str(each[0]))
        )


def _best(peaks: dict[Knobs, Peak], count: int) -> list[Knobs]:
    return sorted(peaks, key=lambda knobs: (-peaks[knobs].goodput, str(knobs)))[:count]
