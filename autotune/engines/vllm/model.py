"""What a configuration of vLLM says of the model that it serves, and of the steps that it records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from runtime.step_model import NO_GRAPHS, StepGraphs
from runtime.tunable import Capabilities, ModelInfo

CAPABILITIES = Capabilities.live(none=("draft_tokens",), fault_isolation=False)
"""Those of our own engine, but a fault ends it, and how it speculates is settled when it starts."""


_CACHE_BYTES: Final = {"bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""By how the name of a KV cache's type begins."""


def model_of(config: Any) -> ModelInfo:
    """``config`` is vLLM's own. Nothing has to be loaded; parameters are not counted.

    ``kv_bytes_per_token`` is what all layers of attention take that keep K and V of every token, or of MLA one latent vector.
    0 for a type of KV cache that is not known here: then vLLM alone says how large its pool is.
    What layers with sliding windows free again, and states of Mamba, are known when the pool is made, not before.
    """
    model, cache, parallel, load = config.model_config, config.cache_config, config.parallel_config, config.load_config
    text = model.hf_text_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    layers = model.get_num_layers_by_block_type(parallel) if model.is_hybrid else text.num_hidden_layers
    vectors = 1 if model.use_mla else 2
    per_token = vectors * layers * heads * model.get_head_size() * _bytes(str(cache.cache_dtype), model.dtype)
    return ModelInfo(
        name=str(model.model),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        architecture=model.architectures[0],
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        kv_bytes_per_token=per_token,
        kv_cache_dtype=str(cache.cache_dtype),
        random_weights=str(getattr(load.load_format, "value", load.load_format)) == "dummy",
    )


def _bytes(cache_dtype: str, dtype: Any) -> int:
    """Of one number in the KV cache; 0 for a format of which that is not known, such as one that packs several into a byte."""
    if cache_dtype == "auto":
        return int(dtype.itemsize)
    return next((size for kind, size in _CACHE_BYTES.items() if cache_dtype.startswith(kind)), 0)


def slots_of(scheduler: Any) -> int:
    """Most sequences at once under ``scheduler``, vLLM's configuration of one: ``max_num_seqs``, or ``max_num_active_seqs`` where
    that is set, which is lower."""
    return int(min(scheduler.max_num_seqs, getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs))


def budget_of(scheduler: Any) -> int:
    """Most tokens of a step, likewise: ``max_num_batched_tokens``, or ``max_num_scheduled_tokens`` where that is set."""
    most = scheduler.max_num_batched_tokens
    return int(min(most, getattr(scheduler, "max_num_scheduled_tokens", None) or most))


def graphs_of(config: Any) -> StepGraphs:
    """The steps that vLLM has CUDA graphs for; none on a CPU, under ``enforce_eager``, in a CUDA graph mode of ``NONE``.

    To be asked when vLLM has started: its workers settle the mode when they know what their attention can do. Sizes to which no
    step of as many decodes, or tokens, as may run is padded are left out. Steps with prompts have graphs in all modes but
    ``FULL_DECODE_ONLY``, of all or of what lies between two layers' attention. Graphs of decodes alone go no further than as many
    rows as may run.
    """
    compilation = getattr(config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    sizes = sorted({int(size) for size in getattr(compilation, "cudagraph_capture_sizes", None) or () if size > 0})
    name = getattr(mode, "name", None) or "NONE"
    if name == "NONE" or config.model_config.enforce_eager or config.device_config.device_type == "cpu":
        return NO_GRAPHS
    slots = slots_of(config.scheduler_config)
    decodes = _reaching(sizes, slots)
    if name == "FULL_DECODE_ONLY":
        return StepGraphs(tuple(size for size in decodes if size <= slots))
    prompts = _reaching(sizes, budget_of(config.scheduler_config))
    return StepGraphs(decodes, prompts, slots if prompts else 0)


def _reaching(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Those of ``sizes`` up to the first that holds ``most``."""
    return (*(size for size in sizes if size < most), *[size for size in sizes if size >= most][:1])


def parameters_of(config: Any) -> int:
    """Counted in the model's shape: vLLM repacks weights as it loads them. 0 for an architecture that transformers lacks."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.model_config.hf_config)
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())
