"""vLLM behind the seam: in this process (:class:`VllmEngine`), or in a process of its own, under ``vllm serve --scheduler-cls
autotune.engines.vllm.Scheduler`` (:mod:`.serving`), which ``autotune serve --engine vllm`` starts. Both stand on
:class:`~autotune.engines.vllm.steering.Steering`, which lives in vLLM's scheduler. vLLM is imported when an engine is started,
and not before."""

from __future__ import annotations

from autotune.engines.vllm.engine import VllmEngine, VllmSource
from autotune.engines.vllm.middleware import RejectionStatus
from autotune.engines.vllm.scheduler import Steered, steered
from autotune.engines.vllm.serving import Scheduler

__all__ = ["RejectionStatus", "Scheduler", "Steered", "VllmEngine", "VllmSource", "steered"]
