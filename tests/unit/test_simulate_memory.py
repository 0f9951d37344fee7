"""A long simulation holds no more memory than a short one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, parse_workload
from benchmarks.controller.hardware import h200
from benchmarks.simulator import TARGET, Tally
from runtime.knobs import Knobs
from tests.unit.scheduler_world import Whole


def held_after(
    requests: int, *, parts: int, kv_tokens: int = 760_000, load: str = "azure-conv", policy: bool = False
) -> list[int]:
    """Bytes that Python holds after each part of a run of so many requests, its listener keeping none of them.

    ``policy``: a step policy looks before every step.
    """
    engine = SimulatedEngine(h200(), kv_tokens=kv_tokens, knobs=Knobs(512, 0, 2048, 2048), slo=TARGET)
    tally = Tally(TARGET)
    engine.subscribe(tally)
    engine.set_step_policy(Whole() if policy else None)
    source = parse_workload(load).at_rate(20.0).arrivals(0, limit=requests)

    def part() -> Iterator[Arrival]:
        yield from (arrival for _, arrival in zip(range(requests // parts), source, strict=False))

    tracemalloc.start()
    try:
        held = []
        for _ in range(parts):
            engine.serve(part(), start=0.0, shared=False)
            engine.run()  # to the end, so that what runs at the time of looking does not count
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert tally.requests == requests
    assert (engine.scheduler.preemptions > requests / 20) == (kv_tokens < 10_000)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("policy", [False, True])
def test_a_run_of_some_thousands(policy: bool) -> None:
    held = held_after(6000, parts=4, load="poisson:prompt=300,output=30", policy=policy)
    assert max(held[1:]) < held[0] + 800_000  # some thousand times of steps are kept


@pytest.mark.slow
def test_a_run_of_tens_of_thousands() -> None:
    held = held_after(30_000, parts=10)
    assert max(held[4:]) < max(held[:4]) + 800_000


@pytest.mark.slow
def test_a_run_that_preempts_all_the_while() -> None:
    held = held_after(6000, parts=10, kv_tokens=2000, load="poisson:prompt=200,output=200", policy=True)
    assert max(held[4:]) < max(held[:4]) + 800_000
