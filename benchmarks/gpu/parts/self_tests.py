"""The self-test that every model passes when it is loaded, of five architectures that differ in their attention."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.place import Place
from runtime.torch_backend.fused_layer import FusedLayer
from runtime.torch_backend.loading import from_model
from runtime.torch_backend.self_test import self_test

_MIXED: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {},  # norms of query and key
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
}
_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def run(place: Place, argument: str) -> None:
    """Each in each dtype; all are tried, and one that fails fails the part at its end."""
    failed = []
    for kind, fields in ARCHITECTURES.items():
        for dtype in ("float32",) if place.dry else ("float32", "bfloat16", "float16"):
            name = f"{kind} {dtype}"
            try:
                place.keep(name, tested(kind, fields, dtype, place))
            except Exception as error:
                failed.append(name)
                place.keep(name, {"failed": f"{type(error).__name__}: {error}"})
    if failed:
        raise RuntimeError(f"self-tests failed: {', '.join(failed)}")


def tested(
    kind: str, fields: dict[str, Any], dtype: str, place: Place, kv_cache_dtype: str = "auto"
) -> dict[str, object]:
    """Raises where the self-test fails."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SHAPE, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(place.device)
    loaded = from_model(model, kv_cache_dtype=kv_cache_dtype)
    self_test(loaded)
    return {"passed": True, "fused": any(isinstance(m, FusedLayer) for m in loaded.model.modules())}
