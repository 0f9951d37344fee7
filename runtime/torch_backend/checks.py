"""What a model's files and config tell before any weight is read: broken, or not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from runtime.errors import ModelError, UnsupportedModelError

SUPPORTED = "supported: see docs/reference/models.md"
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_LOADED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_directory(path: Path) -> None:
    """Raise one clear line if ``path`` does not hold a whole model: :class:`ModelError`, or for an adapter
    :class:`UnsupportedModelError`."""
    if (path / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"model {path}: a LoRA adapter (adapter_config.json); adapters are not supported yet"
        )
    if not (path / "config.json").exists():
        what = "GGUF weights, which are quantised; they are not supported yet" if any(path.glob("*.gguf")) else ""
        raise ModelError(f"model {path}: {what or 'no config.json in it'}")
    config = _read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"model {path}: config.json has no model_type")
    loaded = next((name for name in _LOADED if (path / name).is_file()), "")  # transformers loads it, and no other
    if loaded.endswith(".index.json"):
        listed = _read_json(path / loaded).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ModelError(f"model {path}: {loaded} has no weight_map")
        absent = sorted({file for file in listed.values() if not (path / str(file)).exists()})
        if absent:
            raise ModelError(f"model {path}: {len(absent)} weight files are missing, such as {absent[0]}")
    if not any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        raise ModelError(f"model {path}: no weights in it (*.safetensors or pytorch_model*.bin)")


def check_config(config: Any, name: str) -> None:
    """Raise :class:`UnsupportedModelError` if the config alone shows that the engine cannot run the model.

    ``config`` is a transformers config; ``name`` is what the user calls the model.
    """
    kind = config.model_type
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise UnsupportedModelError(
            f"model {name}: quantised weights (quantization_config) are not supported here; "
            "vLLM takes them (--engine vllm)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model {kind}: encoder-decoder models are not supported; {SUPPORTED}")
    layers = getattr(text, "layer_types", None) or ()
    odd = sorted({str(layer) for layer in layers if layer not in ATTENTION_LAYERS})
    if odd:
        raise UnsupportedModelError(f"model {kind}: layers of type {', '.join(odd)} are not supported; {SUPPORTED}")
    if getattr(_model_class(config), "_is_stateful", False):
        raise UnsupportedModelError(f"model {kind}: layers that carry a recurrent state are not supported; {SUPPORTED}")


def summary(error: BaseException) -> str:
    """The first line of what an exception says, with its type if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _model_class(config: Any) -> type | None:
    """The class transformers would build, or None (remote code, or no causal language model for this config)."""
    try:
        found = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None
    return found if isinstance(found, type) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"model {path.parent}: {path.name} cannot be read: {summary(error)}") from error
    if not isinstance(found, dict):
        raise ModelError(f"model {path.parent}: {path.name} holds a {type(found).__name__}, not an object")
    return found
