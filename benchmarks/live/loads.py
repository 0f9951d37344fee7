"""Loads that follow from a machine, and the SLO under which each is served.

One rule each, for all, and none of it depends on what any contender achieves:

- lengths are scaled by the largest power of two at which the machine serves about twelve requests/s (that of ``autotune
  profile``);
- The TPOT target is 2.5 × the time of a step of 8 decodes at the load's average context, the TTFT target
  20 × TPOT. A shift does not change the SLO;
- the rate is a share of what the machine completes when it is kept full with 32 sequences and 512 tokens, by the simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune.cost.model import CostModel
from autotune.profiling.calibrate import Alone, draw_setup
from autotune.profiling.setup import LOAD, Setup, typical_step
from autotune.workload import Arrival, Workload, parse_workload
from benchmarks.live.machine import Machine
from runtime.slo import SLO

CONVERSATION = "poisson:lengths=azure-conv"
CODE = "poisson:lengths=azure-code"
CHAT = "poisson:prompt=256~1,output=768~0.6"

TPOT_FACTOR, TTFT_FACTOR = 2.5, 20
_SEED = 90  # of the lengths that the rules look at
_APART = 50_000  # between the seeds of a load's two streams


class Case(NamedTuple):
    """``shifts``: whether the load changes in the middle; ``taken``: whether a second process takes a core from then on."""

    name: str
    workload: Workload
    slo: SLO
    said: str
    shifts: bool = False
    taken: bool = False


@dataclass(frozen=True)
class Changing:
    """``before`` until ``at`` seconds, then the streams of ``after`` side by side."""

    before: Workload
    after: tuple[Workload, ...]
    at: float

    @property
    def rate(self) -> float:
        return (self.before.rate + sum(w.rate for w in self.after)) / 2

    @property
    def finite(self) -> bool:
        return False

    def at_rate(self, rate: float) -> Changing:
        factor = rate / self.rate
        after = tuple(w.at_rate(w.rate * factor) for w in self.after)
        return replace(self, before=self.before.at_rate(self.before.rate * factor), after=after)

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        yield from self.before.arrivals(seed[-1], duration=self.at)
        streams = [w.arrivals(seed[-1] + _APART * (i + 1), duration=36e3) for i, w in enumerate(self.after)]
        for arrival in heapq.merge(*streams, key=lambda arrival: arrival.time):
            yield arrival._replace(time=self.at + arrival.time)


def joined(name: str, before: Case, after: Case, duration: float) -> Case:
    """``before`` until the middle; then its rate halves, and ``after`` joins at half its own. The SLO is that of ``before``."""
    workload = before.workload
    halves = workload.at_rate(workload.rate / 2), after.workload.at_rate(after.workload.rate / 2)
    rates = " and ".join(f"{half.rate:.1f} {case.name}" for half, case in zip(halves, (before, after), strict=True))
    said = f"{workload.rate:.1f} {before.name}/s, after {duration / 2:g} s {rates}"
    changing = Changing(workload, halves, duration / 2)
    return Case(name, Workload(name, f"{after.name} joins {before.name}", changing), before.slo, said, shifts=True)


def slo_for(cost: CostModel, context: float) -> SLO:
    """The SLO of every load of this average context."""
    tpot = float(f"{TPOT_FACTOR * cost.predict(typical_step(8, 0, context)) * 1e3:.2g}")
    return SLO(ttft_ms=TTFT_FACTOR * tpot, tpot_ms=tpot)


def steady(name: str, spec: str, machine: Machine, cost: CostModel, load: float = LOAD) -> Case:
    """Requests of ``spec`` at ``load`` of what the engine completes when it is kept full."""
    setup = setup_of(spec, machine, cost)
    slo = slo_for(cost, setup.mean_prompt + setup.mean_output / 2)
    full = setup.calibration.saturated_rate
    said = (
        f"{load * full:.1f} requests/s, {load:.0%} of {full:.1f}; lengths × {setup.length_scale:g}: on average "
        f"{setup.mean_prompt:.0f} in, {setup.mean_output:.0f} out"
    )
    return Case(name, setup.apply(parse_workload(spec)).at_rate(load * full), slo, said)


def setup_of(spec: str, machine: Machine, cost: CostModel) -> Setup:
    """The lengths at which ``machine`` serves requests of ``spec``, and how many when it is kept full."""
    return draw_setup(
        machine.engine, machine.facts, parse_workload(spec), cost, _alone(cost), seed=_SEED, slo=None, rate=None,
        window_s=1.0, warmup_s=0.0,
    )  # fmt: skip


def _alone(cost: CostModel, prompt: int = 128) -> Alone:
    """A request that has the machine to itself."""
    return Alone(cost.predict(typical_step(0, prompt, 0)), cost.predict(typical_step(1, 0, prompt)), prompt)
