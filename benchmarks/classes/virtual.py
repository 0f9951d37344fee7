"""Both classes on simulated machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from autotune.measure.evaluate import Recorder
from autotune.profile import find_profile, load_profile
from autotune.profile.serving import serving_cost
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, parse_workload
from benchmarks.classes.contenders import KNOBS, LIMITS, serve
from benchmarks.classes.loads import (
    ATTAINMENT,
    BATCH,
    BATCH_LOAD,
    BATCH_WEIGHT,
    CHAT,
    CHAT_LOAD,
    SHARES,
    Most,
    Scaled,
    as_it_is,
    at_once,
    mean_output,
    offered,
)
from benchmarks.classes.summary import Measured, Row, mean
from benchmarks.controller.hardware import A100, H200, Hardware
from benchmarks.controller_live.machine import KV_TOKENS
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepModel
from runtime.tunable import TILE, tile_on

CLASSES: Final = (
    RequestClass(CHAT, SLO(ttft_ms=500, tpot_ms=50, attainment=ATTAINMENT)),
    RequestClass(BATCH, SLO(e2e_ms=60_000), BATCH_WEIGHT),
)


class Place(NamedTuple):
    """Where both classes are served, with lengths that suit it (``scaled``).

    The best of ``settings`` serves the most, with a ``backlog`` of requests: what comes in ``counted`` seconds behind the first
    ``filled``. ``window``, ``warmup``: seconds that count, and before them. ``tile``: as of :class:`runtime.tunable.Facts`.
    """

    hardware: Hardware
    settings: tuple[Knobs, ...]
    backlog: int
    filled: float
    counted: float
    window: float
    warmup: float
    scaled: Scaled = as_it_is
    tile: int = TILE


def _gpu(hardware: Hardware) -> Place:
    settings = tuple(Knobs(slots, 0, budget, budget) for slots in (64, 128, 256, 512, 1024) for budget in (2048, 8192))
    return Place(hardware, settings, 10_000, 60.0, 60.0, 180.0, 60.0)


def _cpu_cost() -> StepModel:
    return serving_cost(load_profile(find_profile("cpu-2core-tiny")))


H200_PLACE, A100_PLACE = _gpu(H200), _gpu(A100)
CPU_PLACE: Final = Place(
    Hardware("CPU", "tiny on two cores, by its profile", _cpu_cost, KV_TOKENS),
    tuple(Knobs(slots, 0, budget, budget) for slots in (8, 16, 32, 64, 128) for budget in (256, 1024)),
    4000, 3.0, 6.0, 60.0, 20.0, lambda load: load.scaled(length=1 / 16), tile_on("cpu"),
)  # fmt: skip
"""That of the live half, in its stead: with lengths as there a prompt of chat comes in nearly every step."""
PLACES: Final = (H200_PLACE, A100_PLACE, CPU_PLACE)


def rows(places: Iterable[Place], names: Iterable[str], seeds: Sequence[int]) -> Iterator[Row]:
    """What came of each place, load and contender, as it comes."""
    for place in places:
        chat = most(place, CHAT_LOAD) / mean_output(place.scaled(parse_workload(CHAT_LOAD)), 0)
        found = Most(chat, most(place, BATCH_LOAD))
        for share in SHARES:
            for name in names:
                runs = [measure(name, place, share, seed, found) for seed in seeds]
                difference = mean([run.beside - run.alone for run in runs])
                yield Row(
                    place.hardware.name, share, name, tuple(runs), difference, mean([run.batch_share for run in runs])
                )


def measure(name: str, place: Place, share: float, seed: int, most: Most) -> Measured:
    load = offered(share, most, seed, place.scaled)
    alone, beside = (
        serve(name, _engine(place), requests, CLASSES, seed=seed, window=place.window, warmup=place.warmup)
        for requests in (load.alone, load.beside)
    )
    return Measured.of(alone, beside, load.left)


def most(place: Place, load: str) -> float:
    """Output tokens/s at ``place`` with nothing but such requests, of which there are always enough: the most of a few
    settings. Raises :class:`InputError` where there are not."""
    requests = at_once(place.scaled(parse_workload(load)), place.backlog)
    hardware, filled, counted = place.hardware, place.filled, place.counted
    found = [full(hardware.cost(), hardware.kv_tokens, requests, knobs, filled, counted) for knobs in place.settings]
    if 0.0 in found:
        raise InputError(
            f"{hardware.name}: {place.backlog} requests of {load} are served in less than {filled + counted:g} s"
        )
    return max(found)


def full(
    cost: StepModel, kv_tokens: int, requests: Sequence[Arrival], knobs: Knobs, filled: float, counted: float
) -> float:
    """Output tokens/s in the ``counted`` seconds behind the first ``filled``; 0 if no request is left waiting by then."""
    engine = SimulatedEngine(
        cost, kv_tokens=kv_tokens, limits=LIMITS, knobs=knobs, ordering="fcfs", max_queue=len(requests)
    )
    recorder = Recorder()
    engine.subscribe(recorder)
    engine.serve(requests, shared=False)
    engine.run(filled + counted)
    inside = [s for s in recorder.steps if s.start >= filled]
    if not inside or not engine.view().waiting:
        return 0.0
    return sum(s.sampled for s in inside) / (inside[-1].end - inside[0].start)


def _engine(place: Place) -> SimulatedEngine:
    hardware = place.hardware
    return SimulatedEngine(
        hardware.cost(), kv_tokens=hardware.kv_tokens, limits=LIMITS, knobs=KNOBS, slo=CLASSES[0].slo, classes=CLASSES,
        ordering="fcfs", max_queue=10**9, tile=place.tile,
    )  # fmt: skip
