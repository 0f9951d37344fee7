"""One cell played: what vLLM's defaults and the best fixed setting carry, and what each part of tuning serves at three loads.

Search, on seeds of its own. *Carries*: the highest rate, on a ladder of 10%, at which a setting serves 90% of its requests
within the SLO. All settings go from rate to rate together; who does not carry one leaves. The capacity of a cell is what the
best of them carries; loads are relative to it. For each load the setting that meets most requests is chosen, all of them on the
first seed, the best four on all, once as they are and once with order and early rejection; a search between the cells of the
grid follows (:mod:`benchmarks.local_search`). Then everybody serves the requests of other seeds; nothing is chosen on those.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from autotune.simulate import SimulatedEngine
from benchmarks.controller.cache import scenario_digest, search_digest
from benchmarks.controller.contenders import CONTENDERS, OURS, STATIC, STATIC_FULL, STATIC_ORDER
from benchmarks.controller.run import Bench, Driver, Outcome, requests, serve
from benchmarks.controller.scenarios import Scenario
from benchmarks.local_search import STEPS, local_search
from benchmarks.when_tuning_pays.cells import Cell
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.records import LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO

BATCHES: Final = (64, 256, 1024)
BUDGETS: Final = (256, 512, 1024, 2048, 4096, 8192)
_MOST: Final = Knobs(BATCHES[-1], 0, BUDGETS[-1], BUDGETS[-1])

CARRIED: Final = 0.9
"""Share of the requests within the SLO: DistServe's goodput."""

LADDER: Final = 1.1
_JUMP, _FIRST, _LOWEST = 4, 16, -48  # rungs: of a jump, the first (4.6 requests/s), and the lowest (0.01)
_CLEAR: Final = 0.05  # off CARRIED on the first seed: no other seed is asked
_KEPT: Final = 4  # settings that are the best on the first seed, and are tried on all
_ENOUGH: Final = 0.995  # the defaults: no other setting is looked for

DEFAULTS, ADMISSION, SETTING, ORDER, BOTH, CONTROLLER = PARTS = (
    "defaults", "defaults with admission", "best setting", "with order", "with order and admission", "controller",
)  # fmt: skip
"""Who serves: vLLM's defaults; these with deadline order and early rejection; the best fixed setting; that one in deadline order;
the best fixed setting with both; the controller with all it has, which starts from the defaults and knows no GPU and no model."""


class Plan(NamedTuple):
    """How much is served: loads as shares of capacity, the seeds that settings are chosen on and those that are reported, about
    how many requests a run has, and its least seconds."""

    loads: tuple[float, ...] = (0.5, 0.8, 1.2)
    chosen_on: tuple[int, ...] = (1, 2)
    reported: tuple[int, ...] = (11, 12, 13)
    requests: int = 800
    least_s: float = 60.0

    def seconds(self, rate: float) -> float:
        return round(max(self.least_s, self.requests / rate), 1)


class Served(NamedTuple):
    """A load. ``rate``: requests/s offered; ``settings``: (sequences, tokens) of the fixed settings by part; ``met``: shares
    within the SLO of each part, by reported seed. ``missed``: why the defaults missed, as shares of what was offered (who
    ``left`` the queue unserved, or the target missed); ``kv``: share of the time in which the KV pool kept requests waiting."""

    rate: float
    seconds: float
    settings: dict[str, list[int]]
    met: dict[str, list[float]]
    missed: dict[str, float]
    kv: float

    def mean(self, part: str) -> float:
        return statistics.fmean(self.met[part])

    def gains(self, part: str) -> list[float]:
        """Over the defaults on the same requests, points of 100, by seed."""
        return [100 * (mine - theirs) for mine, theirs in zip(self.met[part], self.met[DEFAULTS], strict=True)]


class Found(NamedTuple):
    """What came of a cell. ``carries``: requests/s, of the defaults and of the ``best`` setting; 0: not even the lowest rate."""

    cell: Cell
    slo: str
    defaults: list[int]
    best: list[int]
    carries: dict[str, float]
    loads: dict[str, Served]
    cpu_s: float

    def entry(self) -> dict[str, Any]:
        """As JSON."""
        return {**self._asdict(), "loads": {load: served._asdict() for load, served in self.loads.items()}}


def from_entry(entry: Mapping[str, Any]) -> Found:
    """The inverse of :meth:`Found.entry`; what else is in ``entry`` is left out."""
    values = {name: entry[name] for name in Found._fields}
    loads = {load: Served(**served) for load, served in entry["loads"].items()}
    return Found(**{**values, "cell": Cell(*entry["cell"]), "loads": loads})


class Task(NamedTuple):
    """A cell to be played."""

    cell: Cell
    plan: Plan


def settings(start: Knobs) -> list[Knobs]:
    """Fixed settings that vLLM accepts: sequences × tokens of a step, no fewer tokens than sequences. ``start`` comes first, and
    those that take as many sequences before others: of equals the first is chosen."""
    every = [Knobs(batch, 0, budget, budget) for batch in BATCHES for budget in BUDGETS]
    return sorted(
        filter(accepted, every), key=lambda knobs: (knobs != start, knobs.max_batch_size != start.max_batch_size)
    )


def play(task: Task, _: Bench | None = None) -> Found:
    """Search, choose, serve. Raises :class:`InputError` where no setting carries the lowest rate."""
    begun = time.process_time()
    cell, plan = task
    runs = Runs(cell, plan)
    start = cell.defaults
    own = highest(runs, [start], _FIRST)
    found = highest(runs, settings(start), _FIRST if own is None else own[0])
    if found is None:
        raise InputError(f"{cell}: no setting serves {CARRIED:.0%} within {cell.slo} at {_rate(_LOWEST):g} requests/s")
    rung, carrying = found
    capacity = _rate(rung)
    best = max(carrying, key=lambda knobs: runs.met(STATIC, knobs, capacity))
    loads = {f"{load:g}": _served(runs, round(load * capacity, 4), start) for load in plan.loads}
    carries = {DEFAULTS: 0.0 if own is None else _rate(own[0]), SETTING: capacity}
    cpu_s = round(time.process_time() - begun, 1)
    return Found(cell, str(cell.slo), _values(start), _values(best), carries, loads, cpu_s)


def _served(runs: Runs, rate: float, start: Knobs) -> Served:
    plain, full = (best_at(runs, contender, rate) for contender in (STATIC, STATIC_FULL))
    taking: dict[str, tuple[str, Knobs]] = {
        DEFAULTS: (STATIC, start), ADMISSION: (STATIC_FULL, start), SETTING: (STATIC, plain), ORDER: (STATIC_ORDER, plain),
        BOTH: (STATIC_FULL, full), CONTROLLER: (OURS, start),
    }  # fmt: skip
    met: dict[str, list[float]] = {part: [] for part in taking}
    why = Why(runs.cell.slo)
    for seed in runs.plan.reported:
        for part, (contender, knobs) in taking.items():
            outcome = runs.outcome(contender, knobs, rate, seed, why if part == DEFAULTS else None)
            met[part].append(round(outcome.met / max(1, outcome.offered), 4))
    chosen = {SETTING: _values(plain), BOTH: _values(full)}
    return Served(rate, runs.plan.seconds(rate), chosen, met, why.missed, why.kv)


class Runs:
    """The runs of one cell; those that choose are made once. Where slots never ran out, a setting that has more of them does the
    same, and is not run."""

    def __init__(self, cell: Cell, plan: Plan) -> None:
        self.cell, self.plan = cell, plan
        self._scenarios: dict[float, Scenario] = {}
        self._known: dict[tuple[str, float, int, int], dict[Knobs, Outcome]] = {}

    def met(self, contender: str, knobs: Knobs, rate: float, seeds: int | None = None) -> float:
        """Share within the SLO, over the seeds that settings are chosen on, or the first few of these."""
        outcomes = [self._once(contender, knobs, rate, seed) for seed in self.plan.chosen_on[:seeds]]
        return sum(outcome.met for outcome in outcomes) / max(1, sum(outcome.offered for outcome in outcomes))

    def carries(self, knobs: Knobs, rate: float) -> bool:
        """Whether a fixed setting serves enough within the SLO."""
        first = self.met(STATIC, knobs, rate, 1)
        return (first if abs(first - CARRIED) > _CLEAR else self.met(STATIC, knobs, rate)) >= CARRIED

    def outcome(self, contender: str, knobs: Knobs, rate: float, seed: int, listener: Why | None = None) -> Outcome:
        """One run; a controller starts from ``knobs``."""
        scenario = self._scenarios.get(rate)
        if scenario is None:
            scenario = self._scenarios[rate] = self.cell.scenario(rate, self.plan.seconds(rate))
        driver = CONTENDERS[contender].driver((knobs,))._replace(schedule=(knobs,))
        if listener is not None:
            driver = heard(driver, listener)
        return serve(scenario, requests(scenario, seed, (rate,), None), driver, seed)

    def _once(self, contender: str, knobs: Knobs, rate: float, seed: int) -> Outcome:
        known = self._known.setdefault((contender, rate, seed, knobs.token_budget), {})
        if knobs not in known:
            roomy = (o for k, o in known.items() if not o.full and k.max_batch_size <= knobs.max_batch_size)
            known[knobs] = next(roomy, None) or self.outcome(contender, knobs, rate, seed)
        return known[knobs]


def highest(runs: Runs, candidates: Sequence[Knobs], rung: int) -> tuple[int, list[Knobs]] | None:
    """The highest rung of the ladder that one of ``candidates`` carries, and all that carry it; None if none carries the lowest.
    Looks from ``rung`` on, up or down; who does not carry a rung is not asked about higher ones."""

    def carrying(among: Sequence[Knobs], at: int) -> list[Knobs]:
        fewest_first = sorted(among, key=lambda knobs: knobs.max_batch_size)  # see Runs: others follow from these
        those = {knobs for knobs in fewest_first if runs.carries(knobs, _rate(at))}
        return [knobs for knobs in among if knobs in those]

    found = carrying(candidates, rung)
    while not found:
        rung -= _JUMP
        if rung < _LOWEST:
            return None
        found = carrying(candidates, rung)
    step = _JUMP
    while step:
        if above := carrying(found, rung + step):
            rung, found = rung + step, above
        else:
            step //= 2
    return rung, found


def best_at(runs: Runs, contender: str, rate: float) -> Knobs:
    """The fixed setting of which most requests are within the SLO at ``rate``, with what ``contender`` has besides."""
    every = settings(runs.cell.defaults)
    if runs.met(contender, every[0], rate) >= _ENOUGH:
        return every[0]
    fewest_first = sorted(every, key=lambda knobs: knobs.max_batch_size)
    first = {knobs: runs.met(contender, knobs, rate, 1) for knobs in fewest_first}
    kept = sorted(every, key=lambda knobs: -first[knobs])[:_KEPT]

    def met(cells: Sequence[Knobs], seeds: int | None = None) -> list[float]:
        return [runs.met(contender, knobs, rate, seeds) if accepted(knobs) else 0.0 for knobs in cells]

    return local_search(max(kept, key=lambda knobs: met([knobs])), _MOST, lambda cells: met(cells, 1), met)


def accepted(knobs: Knobs) -> bool:
    """Whether vLLM takes it: no fewer tokens than sequences."""
    return knobs.token_budget >= knobs.max_batch_size


class Why:
    """Listens to runs: which requests missed what, and how long the KV pool kept requests waiting."""

    def __init__(self, slo: SLO) -> None:
        self._slo = slo
        self._offered = 0
        self._missed = {"left": 0, "ttft": 0, "tpot": 0}
        self._seconds = self._kv_seconds = 0.0

    def on_step(self, record: StepRecord) -> None:
        seconds = record.end - record.start
        self._seconds += seconds
        if record.limited_by is LimitedBy.KV:
            self._kv_seconds += seconds

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.on_step(record)

    def on_request(self, record: RequestRecord) -> None:
        self._offered += 1
        for metric in self._slo.violated(record):
            self._missed["left" if metric == "completion" else metric] += 1

    @property
    def missed(self) -> dict[str, float]:
        return {why: round(count / max(1, self._offered), 4) for why, count in self._missed.items()}

    @property
    def kv(self) -> float:
        return round(self._kv_seconds / max(self._seconds, 1e-9), 4)


def heard(driver: Driver, listener: Why) -> Driver:
    """``driver``, with ``listener`` at its engine."""

    def attach(engine: SimulatedEngine, slo: SLO) -> AbstractContextManager[Any]:
        engine.subscribe(listener)
        return driver.attach(engine, slo)

    return driver._replace(attach=attach)


_PROBE_S, _PROBE_RATE = 10.0, 20.0


def digest(cell: Cell, plan: Plan) -> str:
    """Of how the simulator, admission and the controller behave on a fixed probe of the cell, of what is asked, and of the
    search: the settings, vLLM's defaults there the first of them, and its constants."""
    scenario = cell.scenario(1.0, _PROBE_S)
    bench = Bench({str(scenario.load(scenario.phases[0])): _PROBE_RATE})
    behaviour = [scenario_digest(scenario, contender, bench) for contender in (STATIC_FULL, OURS)]
    question = hashlib.sha256(repr((behaviour, plan, BATCHES, BUDGETS, CARRIED, LADDER)).encode()).hexdigest()[:16]
    return searched(question, cell)


def searched(question: str, cell: Cell) -> str:
    """``question``, a digest of its own, and how an answer is searched for."""
    return search_digest(question, settings(cell.defaults), _JUMP, _FIRST, _LOWEST, _CLEAR, _KEPT, _ENOUGH, STEPS)


def _rate(rung: int) -> float:
    """Requests/s, three digits."""
    rate = LADDER**rung
    return round(rate, 2 - math.floor(math.log10(rate)))


def _values(knobs: Knobs) -> list[int]:
    return [knobs.max_batch_size, knobs.token_budget]
