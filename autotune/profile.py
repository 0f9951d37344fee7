"""The profile: what was measured, on what, and which settings it recommends. A YAML file people read and tools load.

Every part is checked on loading; an unknown field, a wrong type or a knob above the engine's ceiling is one line that
names the file, the field, the value and what is allowed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from autotune.profile_parts import (
    Calibration,
    Capacity,
    Confidence,
    CostFacts,
    EngineFacts,
    GpuInfo,
    KnobsField,
    KvPool,
    LimitsField,
    LoadFacts,
    Machine,
    ModelFacts,
    Part,
    Point,
    Setting,
    SimulationFacts,
    SLOField,
    Software,
    Spread,
)
from runtime.errors import InputError
from runtime.knobs import KNOBS

__all__ = [
    "PURPOSES",
    "RECOMMENDED",
    "SCHEMA_VERSION",
    "Calibration",
    "Capacity",
    "Confidence",
    "CostFacts",
    "EngineFacts",
    "GpuInfo",
    "KnobsField",
    "KvPool",
    "LimitsField",
    "LoadFacts",
    "Machine",
    "ModelFacts",
    "Part",
    "Point",
    "Profile",
    "Purpose",
    "SLOField",
    "Setting",
    "SimulationFacts",
    "Software",
    "Spread",
    "dump_profile",
    "explain",
    "load_profile",
    "save_profile",
    "shipped_profiles",
    "write_whole",
]

SCHEMA_VERSION = 2
Purpose = Literal["interactive", "balanced", "throughput"]
PURPOSES: tuple[Purpose, ...] = ("interactive", "balanced", "throughput")
RECOMMENDED: Purpose = "balanced"


class Profile(Part):
    """One profiling run. ``knobs`` is the setting recommended for balanced use.

    ``simulated``: what the simulator said of its own Pareto set and of every validated setting, at the same load.
    ``price_per_hour``: of the machine, in whatever money the user pays.
    """

    schema_version: Literal[2]
    name: str
    created: str
    command: str
    status: Literal["complete", "stopped"]
    machine: Machine
    software: Software
    engine: EngineFacts
    model: ModelFacts
    workload: LoadFacts
    slo: SLOField
    slo_from: str
    calibration: Calibration
    knobs: KnobsField
    settings: dict[Purpose, Setting] = Field(min_length=1)
    baseline: Point | None
    capacity: Capacity | None
    verdict: str
    slo_met: bool
    seed: int
    points: tuple[Point, ...]
    points_file: str
    cost_model: CostFacts | None = None
    simulation: SimulationFacts | None = None
    simulated: tuple[Point, ...] = ()
    confidence: Confidence | None = None
    price_per_hour: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _below_ceilings(self) -> Profile:
        held = {"knobs": self.knobs} | {f"settings.{name}.knobs": s.knobs for name, s in self.settings.items()}
        for where, knobs in held.items():
            for spec in KNOBS:
                try:
                    spec.check(getattr(knobs, spec.name), high=getattr(self.engine.limits, spec.name))
                except ValueError as error:
                    raise ValueError(f"{where}.{error} (the engine's ceiling)") from None
        return self


def dump_profile(profile: Profile) -> str:
    """The YAML text."""
    return yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``path`` whole or not at all. Raises :class:`InputError` when the place cannot be written."""
    write_whole(path, dump_profile(profile))


def write_whole(path: Path, content: str | bytes) -> None:
    """Temporary file beside it, fsync, rename: a reader sees the old file or the new one, whatever is killed when."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private; a profile is to be shared
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile. Raises :class:`InputError`, one line: file, field, value, what is allowed."""
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(
            f"{path}: not valid YAML: {where}{getattr(error, 'problem', None) or 'cannot be parsed'}"
        ) from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: is not a profile (it holds no fields); `autotune profile` makes one")
    data = migrated(data, path)
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, data)}") from None


def migrated(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """``data`` in the shape of the present version. Raises :class:`InputError` for a version that is not known."""
    version = data.get("schema_version")
    if version == 1:  # before there was a cost model
        return {**{k: v for k, v in data.items() if k != "coefficients"}, "schema_version": 2}
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version is {version!r}; this version of autotune reads 1 to {SCHEMA_VERSION}")
    return data


def explain(error: ValidationError, data: Mapping[str, Any]) -> str:
    """The first complaint of pydantic as one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{where} is not a field of a profile{more}"
    if first["type"] == "missing":
        return f"{where} is missing{more}"
    if first["type"] == "value_error":
        message = f"{where}{first['ctx']['error']}"
        ceiling = _ceiling(first["loc"], str(first["ctx"]["error"]), data)
        return ((ceiling and f"{where}{ceiling}") or message) + more
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where} is {_short(first['input'])}; {message}{more}"


def _ceiling(loc: tuple[int | str, ...], message: str, data: Mapping[str, Any]) -> str | None:
    """The complaint about a knob below its lower bound, told against the engine's own ceiling when that is known."""
    name = message.partition(" ")[0].lstrip(".")
    spec = next((s for s in KNOBS if s.name == name), None)
    try:
        top = data["engine"]["limits"][name]
        value: Any = data
        for part in loc:
            value = value[part]
        if spec is None or loc[-1] == "limits":
            return None
        spec.check(value[name], high=spec.check(top))
    except ValueError as error:
        return f".{error} (the engine's ceiling)"
    except (KeyError, TypeError, IndexError):
        return None
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with the package, by name: from the wheel, or from the repository in an editable install."""
    here = Path(__file__).resolve().parent
    folder = here / "_profiles"
    if not folder.is_dir() and (here.parent / "pyproject.toml").is_file():
        folder = here.parent / "profiles"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
