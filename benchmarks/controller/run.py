"""One run: a contender serves a scenario's requests of one seed on a simulated machine, and every request is judged.

Requests are judged by the SLO that was in force when they came. Whoever serves, a request that has not been started when its
TTFT target has passed leaves the queue and is a miss: without that, first come first served past capacity makes every request
late, and every ratio above 1.0 would be an artefact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from benchmarks.controller.hardware import Weather
from benchmarks.controller.loads import arrivals
from benchmarks.controller.scenarios import COLD, Scenario
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.ordering import Ordering
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO, RequestClass

BIN_S = 5.0
"""Outcomes are counted by phase and, over time, by bins of so many seconds."""

FCFS = AdmissionPolicy(late=None, queue_timeout="ttft", order=None)
"""What every engine does about late requests unless a contender has more: who has waited its TTFT target leaves the queue."""

_SEED = 7_000_003  # apart from all that other benchmarks draw


class Bench(NamedTuple):
    """What every run needs: requests/s by load, in the order of ``LOADS`` (see the scenarios), and where the traces are."""

    peaks: dict[str, float]
    traces: str | None = None


class Outcome(NamedTuple):
    """(offered, met) of each phase and of each bin, by when requests came; ``rejected``: how many were rejected; ``full``:
    whether slots ever ran out."""

    phases: tuple[tuple[int, int], ...]
    bins: tuple[tuple[int, int], ...]
    rejected: int = 0
    full: bool = True

    @property
    def met(self) -> int:
        return sum(met for _, met in self.phases)

    @property
    def offered(self) -> int:
        return sum(offered for offered, _ in self.phases)

    def first(self, seconds: float) -> tuple[int, int]:
        """(offered, met) of the first seconds."""
        bins = self.bins[: int(seconds / BIN_S)]
        return sum(offered for offered, _ in bins), sum(met for _, met in bins)


class Driver(NamedTuple):
    """How a contender takes part. ``schedule``: fixed knobs for each phase, the last for all that follow; ``attach`` puts a
    controller to work; ``policy``: what the engine itself does about late requests; ``ordering`` makes its order of prompts, from
    the SLOs in force, where that is not first come first served."""

    schedule: tuple[Knobs, ...] = (COLD,)
    attach: Callable[[SimulatedEngine, SLO], AbstractContextManager[Any]] = lambda engine, slo: nullcontext()
    policy: AdmissionPolicy = FCFS
    ordering: Callable[[Mapping[str, SLO]], Ordering] | None = None


@lru_cache(maxsize=16)
def requests(
    scenario: Scenario, seed: int, rates: tuple[float, ...], traces: str | None
) -> tuple[tuple[Arrival, ...], ...]:
    """The requests of each phase, their times counted from its beginning; the same for every contender."""
    return tuple(
        tuple(
            arrivals(
                phase.parts,
                scenario.pattern,
                rate,
                phase.seconds,
                (_SEED, seed, number),
                kv_tokens=scenario.hardware.kv_tokens,
                traces=traces,
            )
        )
        for number, (phase, rate) in enumerate(zip(scenario.phases, rates, strict=True))
    )


def rates_of(scenario: Scenario, peaks: dict[str, float]) -> tuple[float, ...]:
    """Requests/s of each phase."""
    return tuple(phase.load * peaks[str(scenario.load(phase))] for phase in scenario.phases)


def run(scenario: Scenario, driver: Driver, seed: int, bench: Bench) -> Outcome:
    """Serve the requests of ``seed`` from a cold start to the last answer."""
    phases = requests(scenario, seed, rates_of(scenario, bench.peaks), bench.traces)
    return serve(scenario, phases, driver, seed)


def serve(
    scenario: Scenario, phases: Sequence[Sequence[Arrival]], driver: Driver, seed: int, *, patient: bool = False
) -> Outcome:
    """The same for requests at hand. ``patient`` ones never leave the queue."""
    weather = Weather(scenario.hardware.cost(), stalls=scenario.stalls, seed=seed)
    slos = {**scenario.classes, "default": scenario.phases[0].slo}
    engine = SimulatedEngine(
        weather,
        kv_tokens=scenario.hardware.kv_tokens,
        knobs=driver.schedule[0],
        slo=scenario.phases[0].slo,
        classes=[RequestClass(name, slo) for name, slo in scenario.classes.items()],
        prefix_cache=False,
        max_queue=1_000_000,
        noise=scenario.noise,
        seed=seed,
        ordering="fcfs" if driver.ordering is None else driver.ordering(slos),
        admission=False if patient else driver.policy,
    )
    engine.core.executor = weather.executor(noise=scenario.noise, seed=seed)
    judge = Judge(scenario)
    engine.subscribe(judge)
    with driver.attach(engine, scenario.phases[0].slo):
        for number, (phase, start) in enumerate(zip(scenario.phases, scenario.starts, strict=True)):
            engine.run_until(start)
            weather.slow = phase.slow
            if number:
                engine.set_slo(phase.slo)
                slos["default"] = phase.slo
            if 0 < number < len(driver.schedule):
                engine.set_knobs(driver.schedule[number])
            engine.serve(phases[number], start=start, label=f"{number}", shared=False)
        engine.run()
    return judge.outcome()


class Judge:
    """Counts what was offered and what met its SLO; keeps no record."""

    def __init__(self, scenario: Scenario) -> None:
        self._starts = scenario.starts
        self._targets = [{**scenario.classes, "default": phase.slo} for phase in scenario.phases]
        self._phases = [[0, 0] for _ in scenario.phases]
        self._bins = [[0, 0] for _ in range(int(scenario.seconds / BIN_S))]
        self._rejected = 0
        self._full = False

    def on_step(self, record: StepRecord) -> None:
        if record.limited_by is LimitedBy.SLOTS:
            self._full = True

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.on_step(record)

    def on_request(self, record: RequestRecord) -> None:
        phase = bisect_right(self._starts, record.arrival) - 1
        met = self._targets[phase][record.request_class].met(record)
        for count in (self._phases[phase], self._bins[min(int(record.arrival / BIN_S), len(self._bins) - 1)]):
            count[0] += 1
            count[1] += met
        self._rejected += record.reason is FinishReason.REJECTED

    def outcome(self) -> Outcome:
        return Outcome(_pairs(self._phases), _pairs(self._bins), self._rejected, self._full)


def _pairs(counts: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((offered, met) for offered, met in counts)
