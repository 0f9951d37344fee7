"""What a setting did under a load, simulated or measured: counts that add up over runs, and its latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from scipy.stats import binom

from autotune.profiling.callables.settings import Setting
from runtime.records import RequestRecord, percentile
from runtime.slo import SLO, attainment, wilson_interval

SIGNIFICANCE = 0.05
_ADD_UP = ("offered", "met", "seconds", "calls", "called", "latencies_ms", "seeds")


@dataclass(eq=False)
class Outcome:
    """``seconds`` of windows; ``calls`` of the function in them, ``called`` items in those. ``seeds`` of the loads."""

    setting: Setting
    simulated: bool
    offered: int = 0
    met: int = 0
    seconds: float = 0.0
    calls: int = 0
    called: float = 0.0
    lateness_p99_ms: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def add(self, records: Sequence[RequestRecord], slo: SLO, seconds: float, seed: int) -> None:
        kept = attainment(records, slo)
        self.offered += kept.offered
        self.met += kept.met
        self.seconds += seconds
        self.seeds.append(seed)
        self.latencies_ms += [round(r.e2e * 1e3, 3) for r in records if r.completed and r.e2e is not None]

    def plain(self) -> dict[str, Any]:
        """Everything but the setting, for :meth:`include` of another one."""
        return {name: getattr(self, name) for name in (*_ADD_UP, "lateness_p99_ms")}

    def include(self, run: Mapping[str, Any]) -> None:
        """Add what :meth:`plain` of another run of this setting gave."""
        for name in _ADD_UP:
            setattr(self, name, getattr(self, name) + run[name])
        self.lateness_p99_ms = max(self.lateness_p99_ms, run["lateness_p99_ms"])

    @property
    def share(self) -> float:
        return self.met / self.offered if self.offered else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.met, self.offered)

    @property
    def goodput(self) -> float:
        return self.met / self.seconds if self.seconds else 0.0

    @property
    def batch(self) -> float:
        """Mean items in a call."""
        return self.called / self.calls if self.calls else 0.0

    def latency_ms(self, q: float) -> float | None:
        return percentile(self.latencies_ms, q)

    def missed(self, slo: SLO) -> bool:
        """Whether so many misses would come up less than once in twenty times were the share kept (binomial tail)."""
        misses = self.offered - self.met
        if not self.offered:
            return True
        return misses > 0 and float(binom.sf(misses - 1, self.offered, 1 - slo.attainment)) < SIGNIFICANCE


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """By share in SLO; of those that the best does not beat by more than chance (one item, or twice the deviation of its
    count), first those whose p99 is within 5% of the lowest, in the order given."""
    left = [(o, o.latency_ms(99) or inf) for o in outcomes]
    ranked: list[Outcome] = []
    while left:
        top = max(o.share for o, _ in left)
        n = max(1, min(o.offered for o, _ in left))
        least = top - max(1 / n, 2 * (top * (1 - top) / n) ** 0.5) - 1e-12
        lowest = min(p99 for o, p99 in left if o.share >= least)
        first = next(pair for pair in left if pair[0].share >= least and pair[1] <= 1.05 * lowest)
        ranked.append(first[0])
        left.remove(first)
    return ranked
