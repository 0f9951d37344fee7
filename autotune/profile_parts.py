"""What a profile is made of: knobs, limits and SLO as fields, the fingerprint, the load, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO


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
    stage: Literal["simulation", "search", "validation", "capacity"]
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


class StepPoint(Part):
    """One kind of step, measured by the calibration: a line of the sidecar.

    ``seconds``: the median of ``repeats`` steps; ``spread``: their interquartile range over the median. ``region``: which
    part of the plan it belongs to (``decode``, ``prefill``, ``mixed``, …). ``predicted``: what a model fitted without this
    point says of it.
    """

    region: str
    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    seconds: float
    spread: float
    repeats: int
    predicted: float | None = None


class RegionError(Part):
    """Cross-validated error of the cost model in one region: |predicted − measured| / measured, median and 90th percentile."""

    region: str
    points: int
    median: float
    p90: float


class LearnerFacts(Part):
    """What warm-starts the online learner: its coefficients (of unit-free inputs), their covariances, its unit of time."""

    unit_s: float
    decode: tuple[float, ...]
    decode_covariance: tuple[tuple[float, ...], ...]
    mixed: tuple[float, ...]
    mixed_covariance: tuple[tuple[float, ...], ...]


class CostFacts(Part):
    """The cost model: its family, its coefficients by name in SI units with their covariance (in the same order), its error.

    ``points``: kinds of steps measured; ``seconds``: what measuring them took; ``error``: the median over all points of the
    cross-validated relative error.
    """

    family: str
    coefficients: dict[str, float]
    covariance: tuple[tuple[float, ...], ...]
    points: int
    seconds: float
    error: float
    regions: tuple[RegionError, ...]
    learner: LearnerFacts | None


class Confidence(Part):
    """How sure the choice is.

    ``noise``: coefficient of variation of goodput between repeated runs of one setting, measured; ``best``: probability that
    the recommended setting is the best of the validated ones; ``regret``: goodput it is expected to fall short of the best
    of them, as a share; ``sentence``: the same in words.
    """

    noise: float
    best: float
    regret: float
    sentence: str


class SimulationFacts(Part):
    """The simulated stage: how many settings, in how many seconds of CPU, and how far off it was where both were measured.

    ``goodput_error``: median over the validated points of |simulated − measured| / measured.
    """

    trials: int
    cpu_seconds: float
    pareto: int
    goodput_error: float | None
