"""Small models of many architectures, with weights that make every token depend on the whole context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 211
CONTEXT = 128

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MHA = {"num_key_value_heads": 4}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GROUPED_MOE = {
    **_MOE,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_POSITION_SCALED: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 30, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 2.0,
}  # fmt: skip
"""Queries grow with their position, from the 30th token on: behind the self-test."""
_MIXED_WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "ministral": _MIXED_WINDOW,
    "gemma": {},
    "gemma2": {**_MIXED_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_MIXED_WINDOW, "query_pre_attn_scalar": 8},
    "gemma4_text": {**_MIXED_WINDOW, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY},
    "vaultgemma": _MIXED_WINDOW,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "gpt_oss": {**_MIXED_WINDOW, **_MOE},
    "phi": _MHA,
    "phi3": {},
    "phimoe": {**_MOE, "sliding_window": 30},  # in the mask alone; longer than the self-test
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED_WINDOW,
    "olmoe": _MOE,
    "flex_olmo": _MOE,
    "smollm3": {},
    "starcoder2": {"sliding_window": 8},
    "cohere": {},
    "cohere2": _MIXED_WINDOW,
    "stablelm": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": _MOE,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": _MOE,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "granite": {},
    "granitemoe": _MOE,
    "granitemoeshared": {**_MOE, "shared_intermediate_size": 24},
    "glm": {},
    "glm4": {},
    "glm4_moe": _GROUPED_MOE,
    "helium": {},
    "nemotron": {},
    "exaone4": _MIXED_WINDOW,
    "arcee": {},
    "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**_MOE, "moe_topk": 2},
    "seed_oss": {},
    "jais2": {},
    "persimmon": _MHA,
    "biogpt": {},
    "apertus": {},
    "dots1": _GROUPED_MOE,
    "minimax_m2": _MOE,
    "youtu": _MLA,
    "nanochat": {},
    "cwm": {**_MIXED_WINDOW, "bos_token_id": 1, "eos_token_id": 2},
    "jetmoe": _MOE,
    "mellum": _MOE,
    "solar_open": _GROUPED_MOE,
    "afmoe": {**_MOE, **_MIXED_WINDOW},
    "exaone_moe": {**_MOE, **_MIXED_WINDOW},
    "hyperclovax": {},
    "internlm3": {},
    "minicpm3": {**_MLA, "scale_emb": 1},
    "ministral3": {"rope_parameters": _POSITION_SCALED},
    "granite_swa": _MIXED_WINDOW,
    "granitemoe_swa": {**_MOE, **_MIXED_WINDOW},
    "longcat_flash": _MLA,
    "mimo_v2_flash": {**_MIXED_WINDOW, "v_head_dim": 6},
    "glm4_moe_lite": _MLA,
    "laguna": {},
    "hy_v3": _MOE,
}
"""Those that must pass; docs/reference/models.md lists the same."""

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "gptj": ({"rotary_dim": 4}, "cannot be hooked (0 of 2 layers"),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global"], 2]]}, "cannot be hooked (0 of 2 layers"),
    "bloom": ({}, "cannot be hooked (0 of 2 layers"),
    "falcon": ({"head_dim": None}, "cannot be hooked (0 of 2 layers"),
    "mpt": ({}, "cannot be hooked (0 of 2 layers"),
    "codegen": ({"rotary_dim": 4}, "cannot be hooked (0 of 2 layers"),
    "xglm": ({}, "cannot be hooked (0 of 2 layers"),
    "gpt_neox_japanese": ({}, "cannot be hooked (0 of 2 layers"),
    "openai-gpt": ({}, "cannot be hooked (0 of 2 layers"),
    "diffllama": ({}, "runs one attention layer twice"),
    "doge": ({}, "packed logits differ"),
    "llama4_text": ({**_MOE, "attention_chunk_size": 8}, "layers of type chunked_attention"),
    "minimax": (_MOE, "layers of type linear_attention"),
    "qwen3_next": (_MOE, "layers of type linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
}
"""Those that must not be run, with their fields and what the error says."""


def build(architecture: str, *, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A float32 model on the CPU whose greedy outputs are varied; ``fields`` go over the tables'."""
    own = ARCHITECTURES.get(architecture) or REFUSED.get(architecture, ({},))[0]
    given = {name: value for name, value in {**_BASE, **own, **fields}.items() if name != "head_dim" or value}
    config = AutoConfig.for_model(architecture, **given)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        own = "eager" if getattr(config, "attn_logit_softcapping", None) else None  # PyTorch's attention has no softcap
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=own)
        sharpen(model)
    return model.eval()


def sharpen(model: PreTrainedModel) -> None:
    """Random weights at which context decides: attention that prefers, logits far apart, tokens outweighing positions.

    As transformers initialises them, models hardly look at their context and repeat themselves: a wrong engine would pass.
    """
    # the Gemmas multiply embeddings by √hidden, beside which what attention adds would be lost
    scaled = "gemma" in model.config.model_type
    tokens = 1.0 if not scaled else model.config.hidden_size**-0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 1.5 * min(parameter.shape[-2:]) ** -0.5)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0, tokens if module.num_embeddings == VOCABULARY else 0.3)
