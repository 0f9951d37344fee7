"""What to serve elsewhere in place of a preset: the published model of the same shape."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.profile import ModelFacts
from runtime.errors import InputError

PUBLISHED: Mapping[str, str | None] = {
    "nano": None,
    "tiny": None,
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
"""Preset → hub id; None where nobody has published weights of that shape."""


def model_to_serve(measured: ModelFacts, given: str | None) -> str | None:
    """The name for the other engine: what was ``given``, the published model of a preset's shape, or what was measured.

    None for a preset whose weights exist nowhere: the user names a model when starting the other engine. Raises
    :class:`InputError` for a name no command line can carry.
    """
    if given is not None:
        return _checked("--model", given)
    if not measured.random_weights or measured.name not in PUBLISHED:
        return _checked("model.name", measured.name)
    return PUBLISHED.get(measured.name)


def _checked(field: str, name: str) -> str:
    if not name.strip() or not name.isprintable() or name.startswith("-"):
        raise InputError(f"{field} is {name!r}; it must be a directory or a hub id")
    return name
