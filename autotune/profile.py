"""The profile: what was measured, on what, and which settings it recommends. A YAML file people read and tools load.

Every part is checked on loading; an unknown field, a wrong type or a knob above the engine's ceiling is one line that
names the file, the field, the value and what is allowed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO

SCHEMA_VERSION = 1
Purpose = Literal["interactive", "balanced", "throughput"]
PURPOSES: tuple[Purpose, ...] = ("interactive", "balanced", "throughput")
RECOMMENDED: Purpose = "balanced"


def _knobs(value: object) -> Knobs:
    return value if isinstance(value, Knobs) else Knobs(**_values(value, "knobs"))


def _limits(value: object) -> KnobLimits:
    return value if isinstance(value, KnobLimits) else KnobLimits(**_values(value, "limits"))


def _values(value: object, what: str) -> dict[str, Any]:
    """A complete mapping of knob names to checked values; a profile leaves none to a default."""
    names = [spec.name for spec in KNOBS]
    if not isinstance(value, Mapping):
        raise ValueError(f" is {value!r}; it must hold {', '.join(names)}")
    for name in value:
        if name not in names:
            raise ValueError(f".{name} is not a knob; the knobs are {', '.join(names)}")
    for name in names:
        if name not in value:
            raise ValueError(f".{name} is missing; {what} hold {', '.join(names)}")
    try:
        return {spec.name: spec.check(value[spec.name]) for spec in KNOBS}
    except ValueError as error:
        raise ValueError(f".{error}") from None


def _slo(value: object) -> SLO:
    if isinstance(value, SLO):
        return value
    if not isinstance(value, str):
        raise ValueError(f" is {value!r}; write ttft=500ms,tpot=50ms@99%")
    try:
        return SLO.parse(value)
    except ValueError as error:
        raise ValueError(f": {error}") from None


def _as_numbers(value: Knobs | KnobLimits) -> dict[str, int | float]:
    return value.as_dict()


KnobsField = Annotated[Knobs, BeforeValidator(_knobs), PlainSerializer(_as_numbers)]
LimitsField = Annotated[KnobLimits, BeforeValidator(_limits), PlainSerializer(_as_numbers)]
SLOField = Annotated[SLO, BeforeValidator(_slo), PlainSerializer(str)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class GpuInfo(Part):
    name: str
    count: int
    memory_gib: float
    capability: str
    cuda: str


class Machine(Part):
    """The hardware fingerprint. ``cores``: those this process may use; ``threads``: those it computed with."""

    kind: Literal["cpu", "gpu"]
    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_gib: float
    threads: int | None
    gpu: GpuInfo | None
    os: str

    def differences(self, other: Machine) -> list[str]:
        """What about ``other`` makes figures from here doubtful there: fields that differ, in words."""
        mine, theirs = (m.gpu.name if m.gpu else m.cpu for m in (self, other))
        found = [] if mine == theirs else [f"{theirs} instead of {mine}"]
        if self.kind == other.kind == "cpu" and self.cores != other.cores:
            found.append(f"{other.cores} cores instead of {self.cores}")
        return found


class Software(Part):
    autotune: str
    torch: str
    transformers: str
    python: str


class ModelFacts(Part):
    """``seed``: that of random weights. ``kv_bytes_per_token``: K and V of all layers."""

    name: str
    architecture: str
    parameters: int
    dtype: str
    random_weights: bool
    seed: int | None
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int


class KvPool(Part):
    block_size: int
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


class EngineFacts(Part):
    """The engine as it was started. ``parallelism``: devices the model is split over."""

    name: str
    version: str
    kv_pool: KvPool
    limits: LimitsField
    prefix_cache: bool
    parallelism: int = 1


class LoadFacts(Part):
    """The load. ``spec`` reads back as ``--workload``; ``rate`` (requests/s) is where settings were compared,
    ``offered_rate`` what that brought in the search's own window."""

    spec: str
    description: str
    length_scale: float
    cap_prompt: int | None
    cap_output: int | None
    mean_prompt: float
    mean_output: float
    rate: float
    offered_rate: float
    rate_from: Literal["user", "calibration"]
    window_s: float
    warmup_s: float
    search_seed: int
    validation_seeds: tuple[int, ...]


class Spread(Part):
    """A mean, its 95% interval, and what each run gave."""

    mean: float
    low: float
    high: float
    runs: tuple[float, ...]


class Point(Part):
    """All runs of one setting at one rate. Percentiles are medians over the runs; the sidecar has every run.

    ``offered_rate``: requests/s that came in the windows, where ``rate`` is the workload's mean. ``lateness_p99_ms``: how
    late the sender was at worst (counted in the latencies).
    """

    knobs: KnobsField
    stage: Literal["search", "validation", "capacity"]
    label: str
    rate: float
    offered_rate: float
    seeds: tuple[int, ...]
    offered: int
    met: int
    attainment: float
    attainment_low: float
    attainment_high: float
    goodput: Spread
    throughput: Spread
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    e2e_p99_ms: float | None
    preemptions: int
    lateness_p99_ms: float


class Setting(Part):
    """A recommended setting, why it was chosen, and what it measured."""

    knobs: KnobsField
    why: str
    point: Point


class Capacity(Part):
    """The highest rate tried at which ``knobs`` kept the SLO's share; ``rate`` None: it did at none."""

    knobs: KnobsField
    rate: float | None
    tried: tuple[Point, ...]


class Calibration(Part):
    """What was measured before the search, to scale the load: one request alone, then a saturated engine."""

    alone_ttft_ms: float
    alone_tpot_ms: float
    saturated_rate: float
    saturated_tokens_per_s: float
    step_base_ms: float
    step_per_prompt_token_ms: float
    step_per_decode_ms: float


class Profile(Part):
    """One profiling run. ``knobs`` is the setting recommended for balanced use; ``coefficients`` await a cost model."""

    schema_version: Literal[1]
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
    coefficients: None = None

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


def write_whole(path: Path, text: str) -> None:
    """Temporary file beside it, fsync, rename: a reader sees the old file or the new one, whatever is killed when."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
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
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version is {version!r}; this version of autotune reads {SCHEMA_VERSION}")
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, data)}") from None


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
