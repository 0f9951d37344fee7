"""The cases of :mod:`benchmarks.batcher` in virtual time: the service of the peers, and four that are harder."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from benchmarks.batcher.ours import Ours
from benchmarks.batcher.rules import Aimd, Bento, Clipper, SizeOrWait, WhenFree
from benchmarks.batcher.service import BARE_S, BASE_S, CAPACITY, ITEM_S, LARGEST, SLO_S, service_s
from benchmarks.batcher.world import Device, Item, OwnDevices, Played, Rule, SharedDevice, play, poisson

LOADS = (0.05, 0.3, 0.7, 0.9, 1.05, 1.3)
WARM_UP_S, AFTERWARDS_S = 15.0, 1.0
"""The load comes before what counts, and goes on after it, or in overload the last ones would have it easier."""

SEEDS = (201, 202, 203)
"""Those reported. Rules and Batcher were worked on with seeds below 100."""

Rules = dict[str, Callable[[], Rule]]


class Cell(NamedTuple):
    """One rule at one load: medians over the seeds, and the range of the attainment. ``call`` is the mean items in a call."""

    attainment: float
    attainment_range: tuple[float, float]
    p50: float
    p99: float
    call: float
    per_item: float


class Case(NamedTuple):
    """A service, who serves it, and what is asked of it. Loads are shares of ``capacity`` items a second."""

    name: str
    about: str
    device: Callable[[], Device]
    capacity: float
    loads: Sequence[float]
    slo_s: float
    rules: Rules
    workers: int = 1
    cost: Callable[[random.Random], float] = lambda _: 1.0


def rules(slo_s: float, workers: int = 1, price_s: float = 0.0) -> Rules:
    """Ours and the others, for an SLO."""
    return {
        "ours": lambda: Ours(slo_s, workers, price_s),
        "when free + early drop": WhenFree,
        "AIMD": Aimd,
        "Clipper": Clipper,
        "BentoML": lambda: Bento(slo_s),
    }


def own(batch: Sequence[Item]) -> float:
    return service_s(len(batch))


def flooded(device: Device, workers: int, cost: Callable[[random.Random], float]) -> float:
    """Items a second with full calls and more waiting than can be served."""
    done = play(SizeOrWait(LARGEST, 0.0), poisson([(10.0, 2000.0)], inf, 1, cost), device, workers)
    return sum(5 <= item.end < 15 for item in done.items) / 10


def log_uniform(rng: random.Random) -> float:
    """1 to 100, whole, as likely between 1 and 10 as between 10 and 100; the mean is 21.5."""
    return float(round(math.exp(rng.uniform(0.0, math.log(100.0)))))


UNIT_S = 0.0002
"""A unit of cost in the case of uneven items: the mean item takes 4.3 ms."""


def base() -> Case:
    return Case(
        "the service of the peers",
        "one worker, 20 + 2·n ms, n ≤ 32; SLO 400 ms",
        lambda: OwnDevices(own), CAPACITY, LOADS, SLO_S, rules(SLO_S),
    )  # fmt: skip


def shared() -> Case:
    def device() -> Device:
        return SharedDevice(BASE_S, ITEM_S)

    return Case(
        "three replicas that share one device",
        "each call 20 ms by itself, then 2 ms an item on a device that all calls share; SLO 400 ms",
        device, flooded(device(), 3, lambda _: 1.0), LOADS, SLO_S, rules(SLO_S, 3), workers=3,
    )  # fmt: skip


def tight() -> Case:
    slo_s = 2.5 * BARE_S
    return Case(
        "an SLO of 2.5 × the bare service time",
        f"one worker, 20 + 2·n ms; SLO {slo_s * 1e3:.0f} ms, so a call after another may hold 3",
        lambda: OwnDevices(own), CAPACITY, (0.05, 0.1, 0.2, 0.3, 0.5, 0.9), slo_s, rules(slo_s),
    )  # fmt: skip


def uneven() -> Case:
    def device() -> Device:
        return OwnDevices(lambda batch: BASE_S + UNIT_S * sum(item.cost for item in batch))

    return Case(
        "costs that vary 100-fold",
        f"one worker, 20 ms + {UNIT_S * 1e3:.1f} ms a unit, items of 1 to 100 units (log-uniform); SLO 400 ms",
        device, flooded(device(), 1, log_uniform), LOADS, SLO_S, rules(SLO_S), cost=log_uniform,
    )  # fmt: skip


def measure(case: Case, make: Callable[[], Rule], load: float, seconds: float, seeds: Sequence[int]) -> Cell:
    """One rule at one load."""
    played = []
    for seed in seeds:
        items = poisson([(WARM_UP_S + seconds + AFTERWARDS_S, load * case.capacity)], case.slo_s, seed, case.cost)
        played.append(play(make(), items, case.device(), case.workers))
    return cell(played, WARM_UP_S, WARM_UP_S + seconds)


def cell(played: Sequence[Played], start: float, stop: float) -> Cell:
    attainments = [run.attainment(start, stop) for run in played]
    counted = [[call for call in run.calls if start <= call[0] < stop] or [(0.0, 0, 0.0)] for run in played]
    items = [sum(n for _, n, _ in calls) for calls in counted]
    return Cell(
        statistics.median(attainments),
        (min(attainments), max(attainments)),
        statistics.median(run.latency(0.5, start, stop) for run in played),
        statistics.median(run.latency(0.99, start, stop) for run in played),
        statistics.median(n / len(calls) for n, calls in zip(items, counted, strict=True)),
        statistics.median(len(calls) / max(1, n) for n, calls in zip(items, counted, strict=True)),
    )


class Burst(NamedTuple):
    """A rule through a burst: p50 before it, attainment during it, and s until p50 is back within 10% (inf: never seen)."""

    before: float
    attainment: float
    recovery_s: float


CALM_S, BURST_S, AFTER_S = 8.0, 10.0, 8.0
BURST = ((CALM_S, 0.05), (BURST_S, 1.3), (AFTER_S, 0.05))
_WINDOW_S, _STEP_S = 0.5, 0.1


def recovery(before: float, after: Sequence[tuple[float, float]], length: float = AFTER_S) -> float:
    """When the median latency of half a second's arrivals is first within 10% of ``before``.

    ``after``: (s since the end of the burst, latency) of everything that arrived then, of all repetitions together.
    """
    at = 0.0
    while at + _WINDOW_S <= length:
        window = [latency for since, latency in after if at <= since < at + _WINDOW_S]
        if window and statistics.median(window) <= 1.1 * before:
            return round(at, 3)
        at += _STEP_S
    return inf


def burst(case: Case, make: Callable[[], Rule], seeds: Sequence[int]) -> Burst:
    """0.05 → 1.3 → 0.05 of capacity; all ``seeds`` together."""
    before: list[float] = []
    after: list[tuple[float, float]] = []
    attainments = []
    for seed in seeds:
        items = poisson([(s, load * case.capacity) for s, load in BURST], case.slo_s, seed, case.cost)
        run = play(make(), items, case.device(), case.workers)
        before += [item.latency for item in run.between(2.0, CALM_S)]
        after += [(item.arrival - CALM_S - BURST_S, item.latency) for item in run.between(CALM_S + BURST_S, inf)]
        attainments.append(run.attainment(CALM_S, CALM_S + BURST_S))
    return Burst(statistics.median(before), statistics.median(attainments), recovery(statistics.median(before), after))


SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
WAITS_MS = (0, 5, 10, 20, 40, 60, 80, 120, 160, 200, 240, 260, 280, 300, 310, 320, 330, 340, 350, 360, 370)
PRICE_LOADS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class Priced(NamedTuple):
    """What calls cost at one load: ours, and the cheapest static windows: of our attainment, and of 99%."""

    load: float
    ours: Cell
    as_good: tuple[str, Cell] | None
    with_99: tuple[str, Cell] | None
    when_free: Cell


def priced(seconds: float, seeds: Sequence[int], loads: Sequence[float] = PRICE_LOADS) -> list[Priced]:
    """Every call costs the same, whatever it holds: ours knowing it, against every static window, each load by itself."""
    case = base()
    found = []
    for load in loads:
        mine = measure(case, lambda: Ours(SLO_S, 1, inf), load, seconds, seeds)
        windows = {
            f"{size} or {wait} ms": measure(case, partial(SizeOrWait, size, wait / 1e3), load, seconds, seeds)
            for size in SIZES
            for wait in (WAITS_MS if size > 1 else (0,))
        }
        found.append(
            Priced(
                load,
                mine,
                _cheapest(windows, mine.attainment - 0.003),
                _cheapest(windows, 0.99),
                measure(case, WhenFree, load, seconds, seeds),
            )
        )
    return found


def _cheapest(windows: dict[str, Cell], attainment: float) -> tuple[str, Cell] | None:
    good = [(name, cell) for name, cell in windows.items() if cell.attainment >= attainment]
    return min(good, key=lambda pair: pair[1].per_item, default=None)
