"""What to serve elsewhere in place of a preset: the published model of the same shape."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.profile import ModelFacts
from runtime.errors import InputError

PUBLISHED: Mapping[str, str | None] = {
    "tiny": None,
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
"""Preset → hub id; None where nobody has published weights of that shape."""


def model_to_serve(measured: ModelFacts, given: str | None) -> str:
    """The name for the other engine: what was ``given``, the published model of a preset's shape, or what was measured.

    Raises :class:`InputError` for a preset whose weights exist nowhere, and for a name no command line can carry.
    """
    if given is not None:
        return _checked("--model", given)
    if not measured.random_weights:
        return _checked("model.name", measured.name)
    published = PUBLISHED.get(measured.name)
    if published is None:
        raise InputError(
            f"model {measured.name} has random weights and no published model has its shape; "
            "say what to serve: --model DIRECTORY or --model HUB_ID"
        )
    return published


def _checked(field: str, name: str) -> str:
    if not name.strip() or not name.isprintable() or name.startswith("-"):
        raise InputError(f"{field} is {name!r}; it must be a directory or a hub id")
    return name
