"""How far a model's rotary embedding can be trusted in a batch.

Some RoPE variants choose their frequencies by the longest position in the whole batch: "dynamic" (NTK scaling) beyond the
trained context, "longrope" beyond the original one. There a request's tokens would depend on what else runs, and keys
already in the KV pool would be in the wrong basis. So such a model runs only where its frequencies stand still.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.errors import UnsupportedModelError

FIXED = frozenset({"default", "linear", "yarn", "llama3", "proportional", "axial", "mrope"})


def safe_context(config: Any) -> tuple[int | None, str]:
    """(most tokens of context at which the frequencies do not depend on the batch, the RoPE type that limits it).

    ``config`` is a transformers text config. (None, "") when nothing limits it. Raises :class:`UnsupportedModelError`
    when there is no such range, or the type is one nothing is known of.
    """
    limit: int | None = None
    limited_by = ""
    for kind, parameters in _rope_types(config):
        if kind in FIXED:
            continue
        if "dynamic" in kind:
            bound = getattr(config, "max_position_embeddings", None)
        elif kind == "longrope":
            bound = parameters.get("original_max_position_embeddings")
            bound = bound or getattr(config, "original_max_position_embeddings", None)
        else:
            raise UnsupportedModelError(
                f"model {config.model_type}: RoPE of type {kind!r} is not known to be the same for every batch"
            )
        if not isinstance(bound, int) or bound < 1:
            raise UnsupportedModelError(
                f"model {config.model_type}: its RoPE ({kind}) depends on the longest sequence in the batch, "
                "and its config names no length up to which it does not"
            )
        if limit is None or bound < limit:
            limit, limited_by = bound, kind
    return limit, limited_by


def extended_context(config: Any) -> int | None:
    """Tokens of context that YaRN stretches the model's to (Peng et al. 2023); None without it.

    ``config`` may still state the length that the model was trained with: the usual recipe leaves that.
    """
    found = [
        int(original * factor)
        for kind, parameters in _rope_types(config)
        if kind == "yarn"
        and isinstance(original := parameters.get("original_max_position_embeddings"), int)
        and isinstance(factor := parameters.get("factor"), int | float)
    ]
    return max(found, default=None)


def _rope_types(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every RoPE in the config: one for the model, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if not isinstance(found, Mapping):
            continue
        nested = [value for value in found.values() if isinstance(value, Mapping)]
        for parameters in nested or [found]:
            kind = parameters.get("rope_type") or parameters.get("type") or "default"
            yield str(kind), parameters
