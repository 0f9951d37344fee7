"""A small model, in memory and in a directory that may be broken, for the tests of loading."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.errors import ModelError
from runtime.torch_backend.loading import load_model

FIELDS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}


def tiny(kind: str = "llama", **fields: Any) -> PreTrainedModel:
    given = copy.deepcopy({**FIELDS, **fields})  # transformers writes into nested fields
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    return model


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def refusal(path: Path | str, kind: type[Exception] = ModelError, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        load_model(str(path), device="cpu", dtype="float32", **options)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 400
    return message
