"""What other engines start with, in our knobs: what is found or controlled here is compared with it."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.knobs import Knobs

VLLM_DEFAULTS = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)
"""vLLM's own defaults (max-num-seqs 1024, max-num-batched-tokens 8192 in its server, no limit for long prompts)."""

VLLM_LABEL = "vLLM defaults"

_SMALL = Knobs(max_batch_size=256, max_wait_ms=0, token_budget=2048, chunk_size=2048)
_LARGEST = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=16384, chunk_size=16384)
_LARGE_GIB, _LARGEST_GIB = 70.0, 160.0

VLLM_CPU_DEFAULTS = Knobs(max_batch_size=128, max_wait_ms=0, token_budget=2048, chunk_size=2048)
"""The same of a server on a CPU, of one process."""


def vllm_defaults(device: str, memory_gib: float) -> Knobs:
    """What ``vllm serve`` starts with on a GPU called ``device`` that has ``memory_gib``.

    The rule for servers of vLLM's ``EngineArgs.get_batch_defaults`` (``vllm/engine/arg_utils.py``): 1024 sequences and 8192
    tokens from 70 GiB on, and 16384 from 160; below 70, and on every A100, where the larger budget costs throughput (its pull
    request 17885), 256 and 2048.
    """
    if memory_gib >= _LARGEST_GIB:
        return _LARGEST
    return VLLM_DEFAULTS if memory_gib >= _LARGE_GIB and "a100" not in device.lower() else _SMALL


OTHER_DEFAULTS: Mapping[str, Knobs] = {
    f"{VLLM_LABEL}, small GPU": _SMALL,
    # SGLang ServerArgs: chunked-prefill-size 8192 from 35 to 160 GB of device memory, 2048 below; max-running-requests comes
    # from the size of its KV pool, 2048 to 4096 on such a device.
    "SGLang defaults": Knobs(max_batch_size=2048, max_wait_ms=0, token_budget=8192 + 2048, chunk_size=8192),
    "SGLang defaults, small GPU": Knobs(max_batch_size=2048, max_wait_ms=0, token_budget=2048 + 2048, chunk_size=2048),
    # TensorRT-LLM LlmArgs: max_batch_size 2048, max_num_tokens 8192, enable_chunked_prefill off: a prompt goes in whole.
    "TensorRT-LLM defaults": Knobs(max_batch_size=2048, max_wait_ms=0, token_budget=8192, chunk_size=8192),
}
"""Defaults of other engines, as near as our knobs come: SGLang's chunk holds prompts only, so its budget is that and a full
batch of decodes. Clamped to an engine's limits several of them are one and the same setting."""
