"""The engine in virtual time: the same core, scheduler and KV allocator on hardware that a cost model describes."""

from __future__ import annotations

from autotune.simulate.engine import SimulatedEngine, SimulatedRequest
from autotune.simulate.executor import CostExecutor

__all__ = ["CostExecutor", "SimulatedEngine", "SimulatedRequest"]
