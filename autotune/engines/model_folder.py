"""What the directory of a model says of it, read without the libraries that load one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_LENGTHS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
"""Names under which a configuration says how long a context is. As in vLLM the shortest counts, and ``model_max_length`` before
all of them."""


def context_length(model: str) -> int | None:
    """The context, in tokens, that the configuration of ``model`` states.

    None where that is not known: ``model`` is no directory here with a ``config.json``, or RoPE scaling changes the length.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    found: dict[str, Any] = text if isinstance(text, dict) else config
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if _scales(rope):
        return None
    names = ("model_max_length",) if found.get("model_max_length") else _LENGTHS
    return min((n for n in map(found.get, names) if isinstance(n, int) and n > 0), default=None)


def _scales(rope: Any) -> bool:
    """Whether ``rope``, or what it says of one kind of layer, may change the length in the configuration: only for Llama 3's kind
    of scaling is it known to be the scaled one."""
    if not isinstance(rope, dict):
        return True
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    return any({"factor", "long_factor"} & one.keys() and one.get("rope_type") != "llama3" for one in kinds)


def same_model(one: str, other: str) -> bool:
    """Whether two names are of the same model: equal, or of the same directory."""
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))
