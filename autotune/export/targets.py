"""Every target there is a table for."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export.ray_serve import RAY_SERVE
from autotune.export.sglang import SGLANG
from autotune.export.target import ExportTarget
from autotune.export.tensorrt_llm import TENSORRT_LLM
from autotune.export.triton import TRITON
from autotune.export.vllm import VLLM

TARGETS: Mapping[str, ExportTarget] = {
    target.name: target for target in (VLLM, SGLANG, TENSORRT_LLM, TRITON, RAY_SERVE)
}
"""By the name ``--to`` takes."""
