"""Workloads that no calibration sees, and what the simulator says of each, for :mod:`benchmarks.fidelity`."""

from __future__ import annotations

from typing import NamedTuple

from autotune.cost.model import CostModel
from autotune.measure.score import Score
from autotune.simulate import SimulatedEngine
from autotune.simulate.scenario import Scenario
from autotune.workload import Workload
from benchmarks.clocks.drift_corrected import BLOCK
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO

KV_TOKENS, TIGHT_KV_TOKENS = 131_072, 4096
PATIENT = SLO(ttft_ms=25_000, tpot_ms=1000)  # the drain waits for everything
DRAWS = 8
"""Of the step-time noise, as many as ``autotune simulate`` holds against a measurement."""
_APART = 1_000_003  # seeds of two draws


class Case(NamedTuple):
    """A workload, at ``load`` times what the engine serves of it when flooded, under ``knobs``."""

    name: str
    spec: str
    load: float
    knobs: Knobs
    tight: bool = False

    def at(self, load: float) -> Case:
        """The same at another rate."""
        return self._replace(name=f"{self.name}, {load:g}", load=load)


def cases(conv: str | None, code: str | None) -> list[Case]:
    """Six workloads at rates of their own; three of them also where a queue forms, at 0.9 and 1.05 times what is served."""
    conv_spec = (
        f"azure-conv:{conv},start=900,length=1/8,cap_output=96" if conv else "azure-conv:length=1/8,cap_output=96"
    )
    code_spec = f"azure-code:{code},start=900,length=1/8" if code else "azure-code:length=1/8"
    short = Case("short prompts", "poisson:prompt=40~0.8,output=40~0.6", 0.7, Knobs(32, 0, 512, 512))
    long = Case("long prompts", "poisson:prompt=900~0.5,output=24~0.5", 0.9, Knobs(16, 0, 256, 128))
    conversations = Case("Azure conversations", conv_spec, 0.8, Knobs(24, 0, 384, 384))
    return [
        short,
        long,
        Case("bursts, CV 6", "gamma:cv=6,prompt=150~1,output=32~0.8", 0.5, Knobs(64, 0, 1024, 256)),
        conversations,
        Case("Azure code", code_spec, 0.6, Knobs(32, 0, 2048, 2048)),
        Case("tight KV pool", "poisson:prompt=200~0.6,output=64~0.5", 1.1, Knobs(48, 0, 512, 256), tight=True),
        short.at(0.9),
        short.at(1.05),
        long.at(1.05),
        conversations.at(0.9),
        conversations.at(1.05),
    ]


def simulated(cost: CostModel, case: Case, workload: Workload, seed: int, duration: float) -> list[Score]:
    """The scores of ``case`` on a machine that takes what ``cost`` says, each under another draw of the step-time noise.

    By the scenario that ``autotune simulate`` and the search of ``autotune profile`` measure settings with.
    """
    scenario = Scenario(
        cost=cost,
        limits=KnobLimits(),
        kv_tokens=TIGHT_KV_TOKENS if case.tight else KV_TOKENS,
        block_size=BLOCK,
        prefix_cache=True,
        workload=workload,
        slo=PATIENT,
    )
    draws = 1 if cost.facts.jitter is None else DRAWS
    return [
        scenario.measure_over(case.knobs, workload.rate, seed, 0.0, duration, scatter=seed + draw * _APART)
        for draw in range(draws)
    ]


def capacity(cost: CostModel, case: Case, workload: Workload, seed: int) -> float:
    """Requests/s that the simulated engine completes when it is flooded."""
    engine = SimulatedEngine(cost, kv_tokens=TIGHT_KV_TOKENS if case.tight else KV_TOKENS, limits=KnobLimits())
    engine.set_knobs(case.knobs)
    arrivals = [a._replace(time=0.0) for a in workload.arrivals(seed, limit=600)]
    engine.serve(arrivals)
    engine.run()
    return len(arrivals) / engine.clock.now()
