"""A model directory of random weights, made on the spot: the shape of our preset ``tiny`` (57M parameters), and a tokenizer
of one token a word.

The tokenizer lets a client of ``vllm serve`` ask for prompts of an exact length. There are no weights: vLLM makes them up
(``load_format="dummy"``), the same ones for the same seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRESET = "tiny"
SMALL = "nano"
MAX_MODEL_LEN = 4096


def model_folder(folder: Path, preset: str = PRESET) -> Path:
    """Write the directory; ``folder`` must not exist."""
    from runtime.torch_backend.presets import PRESETS

    config: dict[str, Any] = {
        **PRESETS[preset].fields,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    words = {"<s>": 0, "</s>": 1} | {f"w{n}": n for n in range(2, config["vocab_size"])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words[text], "content": text, "special": True, **plain} for text in ("<s>", "</s>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w2"},
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_MODEL_LEN,
    }
    folder.mkdir(parents=True)
    files = {
        "config": config,
        "generation_config": {"eos_token_id": 1},
        "tokenizer": tokenizer,
        "tokenizer_config": about,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def parameters(preset: str) -> int:
    """How many the model of :func:`model_folder` has."""
    from runtime.torch_backend.presets import PRESETS

    return PRESETS[preset].parameters
