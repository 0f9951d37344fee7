"""Six workloads that no calibration sees, and what the simulator says of each, for :mod:`benchmarks.fidelity`."""

from __future__ import annotations

from typing import NamedTuple

from autotune.cost.model import CostModel
from autotune.measure.evaluate import evaluate
from autotune.measure.score import Score
from autotune.simulate import SimulatedEngine
from autotune.workload import Workload
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO

KV_TOKENS, TIGHT_KV_TOKENS = 131_072, 4096
PATIENT = SLO(ttft_ms=25_000, tpot_ms=1000)  # the drain waits for everything


class Case(NamedTuple):
    """A workload, at ``load`` times what the engine serves of it when flooded, under ``knobs``."""

    name: str
    spec: str
    load: float
    knobs: Knobs
    tight: bool = False


def cases(conv: str | None, code: str | None) -> list[Case]:
    conv_spec = (
        f"azure-conv:{conv},start=900,length=1/8,cap_output=96" if conv else "azure-conv:length=1/8,cap_output=96"
    )
    code_spec = f"azure-code:{code},start=900,length=1/8" if code else "azure-code:length=1/8"
    return [
        Case("short prompts", "poisson:prompt=40~0.8,output=40~0.6", 0.7, Knobs(32, 0, 512, 512)),
        Case("long prompts", "poisson:prompt=900~0.5,output=24~0.5", 0.9, Knobs(16, 0, 256, 128)),
        Case("bursts, CV 6", "gamma:cv=6,prompt=150~1,output=32~0.8", 0.5, Knobs(64, 0, 1024, 256)),
        Case("Azure conversations", conv_spec, 0.8, Knobs(24, 0, 384, 384)),
        Case("Azure code", code_spec, 0.6, Knobs(32, 0, 2048, 2048)),
        Case("tight KV pool", "poisson:prompt=200~0.6,output=64~0.5", 1.1, Knobs(48, 0, 512, 256), tight=True),
    ]


def simulated(cost: CostModel, case: Case, workload: Workload, seed: int, duration: float) -> Score:
    """The score of ``case`` on a machine that takes what ``cost`` says."""
    engine = SimulatedEngine(
        cost,
        kv_tokens=TIGHT_KV_TOKENS if case.tight else KV_TOKENS,
        limits=KnobLimits(),
        jitter=cost.facts.jitter,
        seed=seed,
    )
    return evaluate(engine, case.knobs, workload, PATIENT, vocab_size=1000, seed=seed, duration=duration)


def capacity(cost: CostModel, case: Case, workload: Workload, seed: int) -> float:
    """Requests/s that the simulated engine completes when it is flooded."""
    engine = SimulatedEngine(cost, kv_tokens=TIGHT_KV_TOKENS if case.tight else KV_TOKENS, limits=KnobLimits())
    engine.set_knobs(case.knobs)
    arrivals = [a._replace(time=0.0) for a in workload.arrivals(seed, limit=600)]
    engine.serve(arrivals)
    engine.run()
    return len(arrivals) / engine.clock.now()
