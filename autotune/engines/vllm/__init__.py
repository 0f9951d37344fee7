"""vLLM behind the seam: in this process (:class:`VllmEngine`), or in a process of its own, under ``vllm serve --scheduler-cls
autotune.engines.vllm.Scheduler``. Both stand on :class:`~autotune.engines.vllm.steering.Steering`, which lives in vLLM's
scheduler. vLLM is imported when an engine is started, and not before."""

from __future__ import annotations

from autotune.engines.vllm.engine import VllmEngine, VllmSource
from autotune.engines.vllm.scheduler import Scheduler, steered

__all__ = ["Scheduler", "VllmEngine", "VllmSource", "steered"]
