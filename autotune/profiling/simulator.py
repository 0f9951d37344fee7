"""Settings measured on the simulated counterpart of an engine: what the live one does, by the cost model, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.cost_model import CostModel
from autotune.evaluate import Served, evaluate
from autotune.profiling.points import Run
from autotune.profiling.setup import Setup
from autotune.score import Score
from autotune.simulate import SimulatedEngine
from autotune.workload import Workload
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO

REQUESTS = 2000
"""Requests in a long simulated window. Their lengths vary so much that the load of fewer is not the mean load, and a
queue that grows by a few percent of it takes about as many to be seen."""

_FEWEST_REQUESTS = 300
_REQUESTS_A_SECOND = 12_000  # simulated, on a slow machine

_WARM_UP = 0.15  # of the window


@dataclass(frozen=True)
class EngineShape:
    """The facts of an engine that its simulation needs: ceilings, KV pool, whether prompts share prefixes."""

    limits: KnobLimits
    kv_tokens: int
    block_size: int
    prefix_cache: bool

    @classmethod
    def of(cls, engine: Served) -> EngineShape:
        return cls(
            limits=engine.effective_limits,
            kv_tokens=engine.kv_tokens,
            block_size=getattr(engine, "block_size", 16),
            prefix_cache=bool(getattr(engine, "prefix_cache", True)),
        )


@dataclass(frozen=True)
class Simulator:
    """Measures settings in simulation. Plain data, so that worker processes can have it.

    ``workload``: with its lengths scaled; ``requests``: in a long load's window; ``warmup_s``: that of the hardware.
    """

    cost: CostModel
    shape: EngineShape
    workload: Workload
    slo: SLO
    vocab_size: int
    requests: int
    warmup_s: float

    @classmethod
    def of(cls, cost: CostModel, shape: EngineShape, workload: Workload, setup: Setup, vocab_size: int) -> Simulator:
        """Of ``setup``'s load, on hardware as fast as ``setup.speed`` says."""
        if setup.speed != 1.0:
            cost = cost.scaled(compute=setup.speed, bandwidth=setup.speed, overhead=setup.speed)
        return cls(cost, shape, setup.apply(workload), setup.slo, vocab_size, setup.simulated_requests, setup.warmup_s)

    def long(self, knobs: Knobs, rate: float, seed: int, *, stop: Callable[[], bool] | None = None) -> Score:
        """Under as many requests as tell settings apart, or as a finite workload has."""
        warmup, window = self.window(rate)
        return self.measure(knobs, rate, seed, window, warmup, stop=stop)

    def window(self, rate: float) -> tuple[float, float]:
        """(warm-up, window) of :meth:`long`, s. At any rate it holds the same requests."""
        window = self.requests / rate
        return _WARM_UP * window, window

    def measure(
        self,
        knobs: Knobs,
        rate: float,
        seed: int,
        window: float,
        warmup: float,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Score:
        """Under exactly the arrivals that hardware meets with the same ``rate``, ``seed`` and windows."""
        engine = SimulatedEngine(
            self.cost,
            kv_tokens=self.shape.kv_tokens,
            limits=self.shape.limits,
            block_size=self.shape.block_size,
            prefix_cache=self.shape.prefix_cache,
            slo=self.slo,
        )
        found = evaluate(
            engine,
            self.shape.limits.clamp(knobs),
            self.workload.at_rate(rate),
            self.slo,
            vocab_size=self.vocab_size,
            seed=seed,
            duration=window,
            warmup=warmup,
            stop=stop,
        )
        return found.model_copy(update={"rate": rate})

    def twin(self, run: Run) -> Run:
        """The simulation of the very requests that ``run`` measured."""
        score = run.score
        found = self.measure(run.knobs, score.rate, score.seed, score.window_s, self.warmup_s)
        return Run(stage="simulation", label="twin", trial=-1, score=found)


def requests_of(workload: Workload, trials: int, simulate_s: float | None) -> int:
    """How many requests a long simulated load is to have, when ``trials`` of them are to be simulated in ``simulate_s``."""
    wanted = float(REQUESTS)
    if simulate_s is not None:
        wanted = min(wanted, max(_FEWEST_REQUESTS, simulate_s * _REQUESTS_A_SECOND / trials))
    if workload.finite:
        wanted = min(wanted, (sum(1 for _ in workload.arrivals(0)) - 1) / (1 + _WARM_UP))
    return int(wanted)
