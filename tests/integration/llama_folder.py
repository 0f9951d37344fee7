"""A model on disk for tests that begin with a directory, as users do."""

from __future__ import annotations

import json
from pathlib import Path

LOAD_ON_CPU = ["--cpu", "--dtype", "float32", "--workload", "poisson:prompt=24,output=6"]
"""Options of commands that load it."""


def llama_folder(
    folder: Path, *, vocabulary: int = 160, hidden: int = 32, intermediate: int = 64, context: int = 512
) -> Path:
    """``folder``, holding a Llama of two small layers with random weights, and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def weightless_folder(folder: Path) -> Path:
    """A two-layer Llama of 258 token ids without a tokenizer; ``load_format="dummy"`` makes its weights up."""
    about = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 258,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}), encoding="utf-8")
    return folder
