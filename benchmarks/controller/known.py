"""What the benchmark must know before anybody is compared: peak goodputs and oracles, from the cache or searched for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.controller.cache import Cache, from_entry, load_digest, scenario_digest, search_digest, to_entry
from benchmarks.controller.contenders import STATIC, STATIC_FULL, STATIC_ORDER, STATIC_REJECT
from benchmarks.controller.oracle import FIRST, Best, OracleSearch
from benchmarks.controller.oracle import SEARCH as ORACLE_SEARCH
from benchmarks.controller.peaks import SEARCH as PEAK_SEARCH
from benchmarks.controller.peaks import PeakSearch
from benchmarks.controller.run import Bench
from benchmarks.controller.scenarios import GRID, SCENARIOS, Load, Scenario
from benchmarks.controller.work import Workers
from benchmarks.local_search import STEPS

TUNED = tuple(range(1, 11))
SEEN = tuple(range(101, 111))
REPORTED = tuple(range(201, 211))
"""Seeds that algorithms may be tuned on; those that were reported, and looked at, while the controller was built; and those of
the figures reported since it is frozen."""

Say = Callable[[str], None]


class Oracles(NamedTuple):
    """The best fixed knobs of a scenario. ``plain``: of each phase; ``reject``: the same with early rejection. ``order`` and
    ``full``: for the whole run, with deadline order, and with early rejection besides. None where it was not requested."""

    plain: Best
    reject: Best | None
    order: Best | None = None
    full: Best | None = None


def peaks(loads: Iterable[Load], cache: Cache, traces: str | None, jobs: int, say: Say) -> dict[str, float]:
    """Peak goodput of each of ``loads``, requests/s."""
    found: dict[str, float] = {}
    for load in loads:
        name = f"peak {load}"
        digest = peak_digest(load_digest(load, Bench({}, traces)))
        entry = cache.get(name, digest)
        if entry is None:
            begun = time.monotonic()
            with Workers(jobs, Bench({}, traces)) as workers:
                search = PeakSearch(load, workers)
                goodput, knobs, rate = search.find()
            values = [knobs.max_batch_size, knobs.token_budget, knobs.chunk_size]
            entry = {"goodput": round(goodput, 4), "rate": round(rate, 4), "knobs": values, "runs": search.runs}
            cache.put(name, digest, entry)
            say(f"peak of {load}: {goodput:.2f} requests/s ({search.runs} runs, {time.monotonic() - begun:.0f} s)")
        found[str(load)] = entry["goodput"]
    return found


def peak_digest(behaviour: str) -> str:
    """Of a peak found where the simulator behaves like that. How it is made sure of is left out: the oldest were not."""
    return search_digest(behaviour, GRID.cells(), *PEAK_SEARCH)


def oracle_digest(behaviour: str, scenario: Scenario) -> str:
    """Of the best settings of ``scenario``, found where the simulator behaves like that."""
    return search_digest(behaviour, scenario.grid.cells(), *ORACLE_SEARCH)


def seed_set(seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds that an oracle's knobs are chosen on: one of the three sets if it holds all of ``seeds``, else themselves."""
    return next((known for known in (TUNED, SEEN, REPORTED) if set(seeds) <= set(known)), tuple(seeds))


def _seeds_text(seeds: Sequence[int]) -> str:
    first, last = seeds[0], seeds[-1]
    return f"{first}-{last}" if list(seeds) == list(range(first, last + 1)) else ",".join(map(str, seeds))


class OracleStore:
    """Oracles of scenarios on a set of seeds; of those with early rejection or order ``reject`` and ``layers`` say whether."""

    def __init__(
        self,
        cache: Cache,
        workers: Workers,
        seeds: Sequence[int],
        say: Say,
        *,
        reject: bool = True,
        layers: bool = True,
    ) -> None:
        self._cache, self._workers, self._say = cache, workers, say
        self._seeds = seed_set(seeds)
        self._reject, self._layers = reject, layers

    def of(self, scenarios: Iterable[Scenario]) -> dict[str, Oracles]:
        return {scenario.name: self.one(scenario) for scenario in scenarios}

    def one(self, scenario: Scenario) -> Oracles:
        reject = self._best(scenario, STATIC_REJECT) if self._reject else None
        plain = self._best(scenario, STATIC)
        if not self._layers:
            return Oracles(plain, reject)
        return Oracles(plain, reject, self._best(scenario, STATIC_ORDER), self._refined(scenario))

    def _best(self, scenario: Scenario, contender: str) -> Best:
        digest = oracle_digest(scenario_digest(scenario, contender, self._workers.bench), scenario)
        return self._kept(f"{scenario.name} {contender}", digest, lambda: self._search(scenario, contender))

    def _refined(self, scenario: Scenario) -> Best:
        """The best setting with all layers, between those of the grid, too. A variant takes that of its scenario."""
        base = self._refined(SCENARIOS[scenario.like]) if scenario.like else self._best(scenario, STATIC_FULL)
        single = base.single
        behaviour = scenario_digest(scenario, STATIC_FULL, self._workers.bench)
        search = OracleSearch(scenario, self._seeds, self._workers, contender=STATIC_FULL)
        return self._kept(
            f"{scenario.name} {STATIC_FULL} refined",
            search_digest(behaviour, [single], *STEPS, FIRST),
            lambda: search.best_of([single]) if scenario.like else search.refine(single),
        )

    def _kept(self, what: str, digest: str, search: Callable[[], Best]) -> Best:
        """``what`` of these seeds, from the cache or searched for."""
        name = f"{what} {_seeds_text(self._seeds)}"
        entry = self._cache.get(name, digest)
        if entry is not None:
            return from_entry(entry)
        begun = time.monotonic()
        best = search()
        self._cache.put(name, digest, to_entry(best))
        met, offered = (sum(getattr(o, count) for o in best.by_seed.values()) for count in ("met", "offered"))
        knobs = ", ".join(f"{k.max_batch_size}/{k.token_budget}/{k.chunk_size}" for k in best.schedule)
        took = f"{best.runs} runs, {time.monotonic() - begun:.0f} s"
        self._say(f"{name}: {met / offered:.3f} within the SLO with {knobs} ({took})")
        return best

    def _search(self, scenario: Scenario, contender: str) -> Best:
        search = OracleSearch(scenario, self._seeds, self._workers, contender=contender)
        if contender == STATIC_ORDER:  # order changes little: what is best without it, or with rejection besides
            return search.best_of([self._best(scenario, other).single for other in (STATIC, STATIC_FULL)])
        if scenario.like:
            base = self._best(SCENARIOS[scenario.like], contender)
            return search.judge(base.schedule, base.single)
        return search.find_single() if contender == STATIC_FULL else search.find()
