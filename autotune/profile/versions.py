"""Profiles of earlier versions, brought to the present one step at a time.

A version gets a number when a file of the version before no longer says the same. Each step takes the plain data of its
version and gives that of the next; it does not check them, which is done once, at the end. A step stays as it is for good:
when the schema changes again, a step is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.profile.fields import shortened
from runtime.errors import InputError

Fields = dict[str, Any]


def from_1(data: Fields) -> Fields:
    """Version 1 had no cost model, only a field for its coefficients that nothing ever filled; the rest is new in 2."""
    data.pop("coefficients", None)
    return data


def from_2(data: Fields) -> Fields:
    """Version 2 called the warnings ``doubts``, and first labelled paired simulations ``twin``."""
    if "doubts" in data:
        data["warnings"] = data.pop("doubts")
    simulated = data.get("simulated")
    if isinstance(simulated, list):
        data["simulated"] = [
            point | {"label": "paired"} if isinstance(point, dict) and point.get("label") == "twin" else point
            for point in simulated
        ]
    return data


STEPS: Mapping[int, Callable[[Fields], Fields]] = {1: from_1, 2: from_2}
"""From each earlier version to the one after it."""

SCHEMA_VERSION = max(STEPS) + 1


def version_of(data: Mapping[str, Any], path: str | Path, newest: int) -> int:
    """The version of the profile in ``data``. Raises :class:`InputError` for one that is not from 1 to ``newest``."""
    if "schema_version" not in data:
        raise InputError(f"{path}: schema_version is missing; `autotune profile` writes it, {newest} at present")
    version, known = data["schema_version"], "1" if newest == 1 else f"1 to {newest}"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(
            f"{path}: schema_version is {shortened(version)}; it must be a whole number from 1 to {newest}"
        )
    if version > newest:
        raise InputError(
            f"{path}: schema_version is {shortened(version)}: made by a newer autotune "
            f"(this one reads {known}); upgrade autotune to read it"
        )
    return version


def migrated(data: Mapping[str, Any], path: str | Path) -> Fields:
    """``data`` in the shape of the present version. Raises :class:`InputError` for a version that is not known."""
    present = dict(data)
    for number in range(version_of(data, path, SCHEMA_VERSION), SCHEMA_VERSION):
        present = STEPS[number](present) | {"schema_version": number + 1}
    return present
