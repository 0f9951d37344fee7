"""vLLM behind the seam. :class:`Scheduler` is for ``vllm serve --scheduler-cls autotune.engines.vllm.Scheduler``; it stands on
:class:`~autotune.engines.vllm.steering.Steering`, which lives in vLLM's scheduler. vLLM is imported when an engine is
started, and not before."""

from __future__ import annotations

from autotune.engines.vllm.scheduler import Scheduler, steered

__all__ = ["Scheduler", "steered"]
