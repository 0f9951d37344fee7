"""The load: Poisson arrivals, each with one of the real inputs; the same arrivals and inputs when simulated and when measured."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.workload import Workload, parse_workload, prompt_ids
from runtime.batching.item import Item


@dataclass(frozen=True)
class Load:
    """``rate`` items/s for ``warmup_s`` (left out of every figure) and then ``window_s``; ``seed`` draws times and inputs."""

    rate: float
    window_s: float
    warmup_s: float
    seed: int

    @property
    def workload(self) -> Workload:
        return parse_workload(f"poisson:rate={self.rate!r},prompt=1,output=1")

    def items(self, costs: list[int]) -> list[Item]:
        """As :func:`autotune.measure.evaluate` would send them with ``vocab_size=len(costs)`` and ``prompt_seed=seed``."""
        arrivals = self.workload.arrivals(self.seed, duration=self.warmup_s + self.window_s)
        return [Item(None, a.time, costs[prompt_ids(a, len(costs), self.seed)[0]]) for a in arrivals]
