"""Settings measured on the simulated counterpart of an engine: what the live one does, by the cost model, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.cost.model import CostModel
from autotune.engines import Engine
from autotune.measure.score import Score
from autotune.profiling.points import Run
from autotune.profiling.setup import Setup
from autotune.simulate.scenario import Scenario
from autotune.workload import Workload
from runtime.knobs import Knobs

PAIRED = "paired"
"""The label of the simulation of what was measured."""

REQUESTS = 2000
"""Requests in a long simulated window. Their lengths vary so much that the load of fewer is not the mean load, and a
queue that grows by a few percent of it takes about as many to be seen."""

_FEWEST_REQUESTS = 300
_REQUESTS_A_SECOND = 10_000  # simulated, on a slow machine, finding the rate included

_WARM_UP = 0.15  # of the window


@dataclass(frozen=True)
class Simulator:
    """A scenario under the loads of a profiling run. Plain data, so that worker processes can have it.

    ``requests``: in a long load's window; ``warmup_s``: that of the hardware.
    """

    scenario: Scenario
    requests: int
    warmup_s: float

    @classmethod
    def of(cls, cost: CostModel, engine: Engine, workload: Workload, setup: Setup) -> Simulator:
        """Of ``setup``'s load on what ``engine`` runs on while it serves, as fast as ``setup.speed`` says.

        Steps scatter as served ones did, at the same times whatever the setting.
        """
        cost = cost.serving()
        if setup.speed != 1.0:
            cost = cost.scaled(compute=setup.speed, bandwidth=setup.speed, overhead=setup.speed)
        facts = engine.facts
        scenario = Scenario(
            cost=cost,
            limits=engine.effective_limits,
            kv_tokens=facts.kv_tokens,
            block_size=facts.block_size,
            prefix_cache=facts.prefix_cache,
            workload=setup.apply(workload),
            slo=setup.slo,
            classes=setup.classes,
            growth_reserve=facts.growth_reserve,
            kv_allocation=facts.kv_allocation,
            tile=facts.tile,
        )
        return cls(scenario, setup.simulated_requests, setup.warmup_s)

    def long(self, setting: Knobs, rate: float, seed: int, *, stop: Callable[[], bool] | None = None) -> Score:
        """Under as many requests as tell settings apart, or as a finite workload has."""
        return self.scenario.measure_over(setting, rate, seed, *self.window(rate), stop=stop)

    def window(self, rate: float) -> tuple[float, float]:
        """(warm-up, window) of :meth:`long`, s. At any rate it holds the same requests."""
        window = self.requests / rate
        return _WARM_UP * window, window

    def paired(self, run: Run) -> Run:
        """The simulation of the very requests that ``run`` measured."""
        score = run.score
        found = self.scenario.measure_over(run.knobs, score.rate, score.seed, self.warmup_s, score.window_s)
        return Run(stage="simulation", label=PAIRED, trial=-1, score=found)


def requests_of(workload: Workload, trials: int, simulate_s: float | None) -> int:
    """How many requests a long simulated load is to have, when ``trials`` of them are to be simulated in ``simulate_s``."""
    wanted = float(REQUESTS)
    if simulate_s is not None:
        wanted = min(wanted, max(_FEWEST_REQUESTS, simulate_s * _REQUESTS_A_SECOND / trials))
    if workload.finite:
        wanted = min(wanted, (sum(1 for _ in workload.arrivals(0)) - 1) / (1 + _WARM_UP))
    return int(wanted)
