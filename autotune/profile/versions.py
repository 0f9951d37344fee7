"""Profiles of earlier versions, brought to the present one step at a time.

A version gets a number when a file of the version before no longer says the same. Each step takes the plain data of its
version and gives that of the next; it does not check them, which is done once, at the end. A step stays as it is for good:
when the schema changes again, a step is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import InputError, shortened

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


def callable_from_1(data: Fields) -> Fields:
    """Version 1 of a callable's profile had a ``load`` of its own, which also held what the function can do."""
    load, service, inputs, points = (data.get(name) for name in ("load", "service", "inputs", "points"))
    if not isinstance(load, dict) or not isinstance(service, dict):
        return data
    load, points = dict(load), [p for p in points if isinstance(p, dict)] if isinstance(points, list) else []
    figures = [points[0].get(name) for name in ("offered", "met", "goodput")] if points else []
    window = None  # s, of all the runs of the first point
    if figures and all(isinstance(figure, int | float) and figure > 0 for figure in figures):
        window = figures[1] / figures[2]
    known = [p["seeds"] for p in points if p.get("source") == "measured" and isinstance(p.get("seeds"), list)]
    data["service"] = service | {name: load.pop(name) for name in ("capacity", "capacity_size") if name in load}
    data["workload"] = {
        "spec": "poisson:rate=1,prompt=1,output=1",
        "description": "independent users, exponential gaps",
        "length_scale": 1.0,
        "cap_prompt": None,
        "cap_output": None,
        "mean_prompt": inputs.get("mean_cost") if isinstance(inputs, dict) else None,
        "mean_output": 1.0,
        "offered_rate": figures[0] / window if window else load.get("rate"),
        "search_seed": load.pop("seed", 0),
        "validation_seeds": sorted({seed for seeds in known for seed in seeds if isinstance(seed, int)}),
    } | load
    if load.get("window_s") == 0:  # nothing was measured: the window that was simulated
        data["workload"]["window_s"] = window or 1.0
    if "rate_from" in load:
        data["workload"]["rate_from"] = "user" if load["rate_from"] == "as requested" else "calibration"
    del data["load"]
    return data


Steps = Mapping[int, Callable[[Fields], Fields]]

STEPS: Steps = {1: from_1, 2: from_2}
"""From each earlier version to the one after it."""

CALLABLE_STEPS: Steps = {1: callable_from_1}
"""The same of a callable's profile."""

SCHEMA_VERSION = max(STEPS) + 1
CALLABLE_VERSION = max(CALLABLE_STEPS) + 1


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


def migrated(data: Mapping[str, Any], path: str | Path, steps: Steps = STEPS) -> Fields:
    """``data`` in the shape of the present version. Raises :class:`InputError` for a version that is not known."""
    present, newest = dict(data), max(steps) + 1
    for number in range(version_of(data, path, newest), newest):
        present = steps[number](present) | {"schema_version": number + 1}
    return present
