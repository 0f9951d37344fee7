"""A model on disk for tests that begin with a directory, as users do."""

from __future__ import annotations

from pathlib import Path


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
