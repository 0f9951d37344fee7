"""The profile: what was measured, on what, and which settings it recommends. A YAML file people read and tools load.

Every part is checked on loading; an unknown field, a wrong type or a knob above the engine's ceiling is one line that
names the file, the field, the value and what is allowed. docs/reference/profile-file.md describes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from autotune.cost.fields import AboveZero, Count, Text
from autotune.profile.complaints import checked
from autotune.profile.fields import FileName, Moment
from autotune.profile.parts import (
    Calibration,
    Capacity,
    ClassField,
    Confidence,
    CostFacts,
    EngineFacts,
    Gain,
    KnobsField,
    LoadFacts,
    Machine,
    ModelFacts,
    ObjectiveName,
    Part,
    Point,
    Setting,
    SimulationFacts,
    SLOField,
    Software,
)
from autotune.profile.schema import editor_line, profile_schema, profiles_folder
from autotune.profile.text import dump_yaml, read_yaml
from autotune.profile.versions import migrated
from autotune.writing import write_whole
from runtime.errors import InputError, shortened
from runtime.knobs import KNOBS, Knobs
from runtime.slo import SLO

Purpose = Literal["interactive", "balanced", "throughput"]
PURPOSES: tuple[Purpose, ...] = ("interactive", "balanced", "throughput")
RECOMMENDED: Purpose = "balanced"


class Profile(Part):
    """One profiling run of one model on one machine under one load, and the knob settings it recommends."""

    schema_version: Literal[3]
    name: Text
    created: Moment
    command: str = Field(description="what was typed")
    status: Literal["complete", "stopped"]
    machine: Machine
    software: Software
    engine: EngineFacts
    model: ModelFacts
    workload: LoadFacts
    slo: SLOField
    slo_from: str = Field(description="where the SLO comes from: given, or found by the calibration")
    classes: tuple[ClassField, ...] = Field(
        default=(), description="request classes with an SLO and a weight of their own; slo is that of all others"
    )
    objective: ObjectiveName = Field(
        default="goodput",
        description="what settings were compared by; mean-e2e: the lowest mean E2E at the rate, whatever the SLO",
    )
    calibration: Calibration
    knobs: KnobsField = Field(description="the setting recommended for balanced use")
    settings: dict[Purpose, Setting] = Field(min_length=1)
    baseline: Point | None = Field(description="vLLM's defaults on this engine under the same load")
    capacity: Capacity | None
    verdict: str
    slo_met: bool
    seed: Count
    points: tuple[Point, ...] = Field(description="everything measured on the machine")
    points_file: FileName = Field(description="the sidecar file with every single run, in the same folder")
    cost_model: CostFacts | None = None
    simulation: SimulationFacts | None = None
    simulated: tuple[Point, ...] = Field(
        default=(),
        description="what the simulator said of its Pareto set and of every validated setting, at the same load",
    )
    gain: Gain | None = Field(default=None, description="over the baseline; null where nothing can be compared")
    confidence: Confidence | None = None
    price_per_hour: AboveZero | None = Field(
        default=None, description="of the machine, in whatever money the user pays"
    )
    warnings: tuple[Text, ...] = Field(default=(), description="what makes the figures unreliable, as clauses")

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        held = {"knobs": self.knobs} | {f"settings.{name}.knobs": s.knobs for name, s in self.settings.items()}
        for where, knobs in (*held.items(), *self._measured_knobs()):
            for spec in KNOBS:
                try:
                    spec.check(getattr(knobs, spec.name), high=getattr(self.engine.limits, spec.name))
                except ValueError as error:
                    raise ValueError(f"{where}.{error} (the engine's ceiling)") from None
        names = [one.name for one in self.classes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"classes: {name} is given twice")
        known = {point.key for point in (*self.points, *self.simulated)}
        for name, setting in self.settings.items():
            if setting.point.key not in known:
                raise ValueError(f"settings.{name}.point is of {setting.knobs}; points holds no such point")
        if RECOMMENDED in self.settings and self.knobs != self.settings[RECOMMENDED].knobs:
            raise ValueError(f"knobs are {self.knobs}; they must be those of settings.{RECOMMENDED}")
        return self

    @property
    def own_slo(self) -> SLO | None:
        """The SLO that it was made for; None where settings were compared by the mean E2E, and attainment is only shown."""
        return self.slo if self.objective == "goodput" else None

    @property
    def warning(self) -> str:
        """The warnings as a line for people; empty without any. Whatever predicts from a profile says it."""
        return (
            f"warning: {'; '.join(self.warnings)}; profile again when nothing else runs on this machine"
            if self.warnings
            else ""
        )

    @property
    def measured(self) -> bool:
        """Whether what it recommends was measured, and not simulated alone."""
        return any(setting.point.stage != "simulation" for setting in self.settings.values())

    def _measured_knobs(self) -> Iterator[tuple[str, Knobs]]:
        for where, points in (("points", self.points), ("simulated", self.simulated)):
            yield from ((f"{where}.{index}.knobs", point.knobs) for index, point in enumerate(points))


def dump_profile(profile: Profile) -> str:
    """The YAML text."""
    return dump_yaml(profile.model_dump(mode="json"))


def profile_text(profile: Profile, path: Path) -> str:
    """What the file at ``path`` is to hold: the YAML, behind a line by which editors find its schema."""
    return editor_line(path) + dump_profile(profile)


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``, whole or not at all. Raises :class:`InputError` when the place cannot be written."""
    write_whole(path, profile_text(profile, path))


def load_profile(path: str | Path) -> Profile:
    """Read and check the profile at ``path``, of this version or an earlier one. Raises :class:`InputError`, one line: file,
    field, value, what is allowed."""
    return profile_of(read_yaml(path), path)


def profile_of(data: object, path: str | Path) -> Profile:
    """The profile that the ``data`` of the file at ``path`` is. Raises as :func:`load_profile`."""
    if not isinstance(data, dict):
        raise InputError(f"{path}: is not a profile (it holds no fields); `autotune profile` makes one")
    if data.get("kind") == "callable":
        raise InputError(
            f"{path}: is the profile of a callable ({shortened(data.get('function'))}), not of a language model; "
            "`autotune show` prints it, and autotune.control(batcher, profile=…) takes it"
        )
    return checked(Profile, migrated(data, path), path, profile_schema())


def find_profile(name: str | Path) -> Path:
    """The file called ``name``, or else the profile of that name that comes with the package. Raises :class:`InputError` where
    there is neither; that a file is there does not mean that it can be read."""
    path = Path(name)
    try:
        path.stat()
    except (OSError, ValueError) as error:  # a name too long, a NUL in it: reading it says so
        shipped = shipped_profiles().get(str(name))
        if shipped is None and isinstance(error, FileNotFoundError):
            raise InputError(
                f"{path}: cannot be read ({error.strerror}), and is no shipped profile either; `autotune profiles` lists those"
            ) from None
        return shipped or path
    return path


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with the package, by name; one in a folder is ``folder/name``."""
    folder = profiles_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
