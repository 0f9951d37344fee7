"""Both classes on simulated machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from autotune.measure.evaluate import Recorder
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
    at_once,
    mean_output,
    offered,
)
from benchmarks.classes.summary import Measured, Row, mean
from benchmarks.controller.hardware import Hardware
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepModel

CLASSES: Final = (
    RequestClass(CHAT, SLO(ttft_ms=500, tpot_ms=50, attainment=ATTAINMENT)),
    RequestClass(BATCH, SLO(e2e_ms=60_000), BATCH_WEIGHT),
)
WINDOW_S, WARMUP_S = 180.0, 60.0
_SETTINGS = tuple(Knobs(slots, 0, budget, budget) for slots in (64, 128, 256, 512, 1024) for budget in (2048, 8192))
_BACKLOG = 10_000  # requests that are there at once
_FILLED_S, _FULL_S = 60.0, 60.0  # until the engine is full, and what is counted then


def rows(machines: Iterable[Hardware], names: Iterable[str], seeds: Sequence[int]) -> Iterator[Row]:
    """What came of each machine, load and contender, as it comes."""
    for hardware in machines:
        chat = most(hardware, CHAT_LOAD) / mean_output(parse_workload(CHAT_LOAD), 0)
        found = Most(chat, most(hardware, BATCH_LOAD))
        for share in SHARES:
            for name in names:
                runs = [measure(name, hardware, share, seed, found) for seed in seeds]
                difference = mean([run.beside - run.alone for run in runs])
                yield Row(hardware.name, share, name, tuple(runs), difference, mean([run.batch_share for run in runs]))


def measure(
    name: str,
    hardware: Hardware,
    share: float,
    seed: int,
    most: Most,
    window: float = WINDOW_S,
    warmup: float = WARMUP_S,
) -> Measured:
    load = offered(share, most, seed)
    alone, beside = (
        serve(name, _engine(hardware), requests, CLASSES, seed=seed, window=window, warmup=warmup)
        for requests in (load.alone, load.beside)
    )
    return Measured.of(alone, beside, load.left)


def most(hardware: Hardware, load: str) -> float:
    """Output tokens/s of ``hardware`` with nothing but such requests, of which there are always enough: the most of a few
    settings. Raises :class:`InputError` where there are not."""
    requests = at_once(parse_workload(load), _BACKLOG)
    found = [full(hardware.cost(), hardware.kv_tokens, requests, knobs, _FILLED_S, _FULL_S) for knobs in _SETTINGS]
    if 0.0 in found:
        raise InputError(
            f"{hardware.name}: {_BACKLOG} requests of {load} are served in less than {_FILLED_S + _FULL_S:g} s"
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


def _engine(hardware: Hardware) -> SimulatedEngine:
    return SimulatedEngine(
        hardware.cost(), kv_tokens=hardware.kv_tokens, limits=LIMITS, knobs=KNOBS, slo=CLASSES[0].slo, classes=CLASSES,
        ordering="fcfs", max_queue=10**9,
    )  # fmt: skip
