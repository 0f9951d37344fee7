"""The engine in virtual time: the same core, scheduler and KV allocator on hardware that a cost model describes."""

from __future__ import annotations

from autotune.simulate.engine import SimulatedEngine
from autotune.simulate.executor import CostExecutor
from autotune.simulate.handle import SimulatedRequest

__all__ = ["CostExecutor", "SimulatedEngine", "SimulatedRequest"]
