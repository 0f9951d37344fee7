"""What a profile is made of: the fingerprint of machine, software, engine and model, the load, the points measured, and what
follows from them.

What is known of step times is in :mod:`autotune.cost.facts`, and can be imported from here too.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from autotune.cost.facts import CostFacts, JitterFacts, LearnerFacts, RegionError, StepPoint
from autotune.cost.fields import AboveZero, Amount, Count, Number, Part, Positive, Share, Text, check_order
from autotune.profile.fields import MOST_KV_TOKENS, ClassField, KnobsField, LimitsField, ObjectiveName, Rate, SLOField
from runtime.slo import weighted_attainment
from runtime.tunable import KvAllocation

__all__ = [
    "Calibration",
    "Capacity",
    "ClassField",
    "ClassPoint",
    "Confidence",
    "CostFacts",
    "EngineFacts",
    "Gain",
    "GpuInfo",
    "JitterFacts",
    "KnobsField",
    "KvPool",
    "LearnerFacts",
    "LimitsField",
    "LoadFacts",
    "Machine",
    "ModelFacts",
    "ObjectiveName",
    "Part",
    "Point",
    "RegionError",
    "SLOField",
    "Setting",
    "SimulationFacts",
    "Software",
    "Spread",
    "StepPoint",
    "Tally",
]


UNBOUNDED_GAIN = 1000.0
"""The upper end of a gain's interval that has none: a ratio beyond it says no more."""

NUMBERED = "CPU 0x"
"""What the name of an ARM CPU begins with: its implementer and part follow."""


class GpuInfo(Part):
    """The GPU that was used."""

    name: Text
    count: Positive = Field(description="GPUs in the machine; one of them was used")
    memory_gib: AboveZero
    capability: str = Field(description="compute capability, such as 9.0")
    cuda: str = Field(description="CUDA version of the PyTorch build")


def same_cpu(one: str, other: str, architecture: str) -> bool:
    """By name. An ARM CPU that an earlier version measured has that of its ``architecture``, and may be any with numbers."""
    return one == other or any(a == architecture and b.startswith(NUMBERED) for a, b in ((one, other), (other, one)))


class Machine(Part):
    """The hardware fingerprint."""

    kind: Literal["cpu", "gpu"] = Field(description="what the model ran on")
    cpu: Text
    cores: Positive = Field(description="cores this process may use")
    flags: tuple[str, ...] = Field(description="CPU features that change how fast matrix products run")
    memory_gib: AboveZero
    threads: Positive | None = Field(description="CPU threads it computed with")
    gpu: GpuInfo | None
    os: str

    @model_validator(mode="after")
    def _described(self) -> Machine:
        if self.kind == "gpu" and self.gpu is None:
            raise ValueError(".gpu is null; where kind is gpu it must say which")
        return self

    @property
    def processor(self) -> str:
        """The name of what the model ran on."""
        return self.gpu.name if self.gpu else self.cpu

    def differences(self, other: Machine) -> list[str]:
        """What about ``other`` makes figures from here unreliable there: fields that differ, in words."""
        found = [] if self.same_processor(other) else [f"{other.processor} instead of {self.processor}"]
        if self.kind == other.kind == "cpu" and self.cores != other.cores:
            found.append(f"{other.cores} cores instead of {self.cores}")
        if features := self.unlike_features(other):
            found.append(f"CPU {features}")
        return found

    def unlike_features(self, other: Machine) -> str:
        """How the CPU of ``other`` differs in ``flags``: ``without sve2, bf16``. Empty where it does not, where a GPU computes,
        or where one of the two has none that are known."""
        if not (self.kind == other.kind == "cpu" and self.flags and other.flags):
            return ""
        lacks = ", ".join(flag for flag in self.flags if flag not in other.flags)
        more = ", ".join(flag for flag in other.flags if flag not in self.flags)
        return " and ".join(f"{word} {those}" for word, those in (("without", lacks), ("with", more)) if those)

    def same_processor(self, other: Machine) -> bool:
        """By name; of an ARM CPU see :func:`same_cpu`."""
        if self.processor == other.processor:
            return True
        if self.gpu or other.gpu or self._architecture != other._architecture:
            return False
        return same_cpu(self.cpu, other.cpu, self._architecture)

    @property
    def _architecture(self) -> str:
        return self.os.rpartition(" ")[2]


class Software(Part):
    """Versions of the packages that decide how fast a step is."""

    autotune: str
    torch: str
    transformers: str
    python: str

    def differences(self, other: Software) -> list[str]:
        """Packages of ``other`` in another version, in words: ``torch 2.12 instead of 2.13``."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{name} {theirs[name]} instead of {mine[name]}" for name in mine if mine[name] != theirs[name]]


class ModelFacts(Part):
    """The model as it was loaded."""

    name: Text = Field(description="preset, directory or hub id, as --model had it")
    architecture: Text
    parameters: Count = Field(description="0: not known")
    dtype: Text
    random_weights: bool
    seed: Count | None = Field(description="that of random weights")
    max_model_len: Positive = Field(description="most tokens (prompt + output) of one request")
    vocab_size: Positive
    kv_bytes_per_token: Count = Field(description="K and V of all layers, bytes")
    kv_cache_dtype: Text = Field(
        default="auto", description="what K and V are kept in; auto: what they are computed in"
    )

    @property
    def size(self) -> str:
        """Its parameters for people: 1.1B, 57M."""
        return f"{self.parameters / 1e9:.1f}B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.0f}M"

    @property
    def dtypes(self) -> str:
        """For people: ``bfloat16``, or ``bfloat16, KV fp8``."""
        return self.dtype if self.kv_cache_dtype == "auto" else f"{self.dtype}, KV {self.kv_cache_dtype}"

    @model_serializer(mode="wrap")
    def _as_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file says nothing of K and V that are kept as they are computed: an earlier version knew no others."""
        data: dict[str, Any] = dump(self)
        if self.kv_cache_dtype == "auto":
            data.pop("kv_cache_dtype", None)
        return data


class KvPool(Part):
    """The KV cache: so many blocks of so many tokens."""

    block_size: Positive = Field(description="tokens in a block")
    blocks: Positive

    @model_validator(mode="after")
    def _of_a_machine(self) -> KvPool:
        if self.tokens > MOST_KV_TOKENS:
            raise ValueError(f" holds {self.tokens:.3g} tokens in all; it must be at most {MOST_KV_TOKENS}")
        return self

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size


class EngineFacts(Part):
    """The engine as it was started."""

    name: Text
    version: str
    kv_pool: KvPool
    limits: LimitsField
    prefix_cache: bool
    parallelism: Positive = Field(default=1, description="devices the model is split over")
    growth_reserve: Count = Field(
        default=1, description="free KV blocks that it keeps for each decode when it admits a prompt"
    )
    kv_allocation: KvAllocation = Field(
        default="whole",
        description="whether a prompt has the KV blocks of all its tokens as it begins, or chunk by chunk",
    )
    kv_blocks: Positive | None = Field(
        default=None,
        description="KV blocks as the engine counts them: more than `kv_pool` has where layers take them in several groups; "
        "null: not known",
    )
    kv_block_size: Positive | None = Field(
        default=None,
        description="tokens in a KV block as the engine is told: fewer than `kv_pool` has where groups of layers take blocks of "
        "several sizes; null: not known",
    )
    kv_bytes: Positive | None = Field(default=None, description="of the KV pool on each device; null: not known")
    options: dict[str, str] = Field(default={}, description="what else it was started with, as --engine-arg had it")

    @model_serializer(mode="wrap")
    def _as_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file says nothing of what is not known of the pool: an earlier version had no such fields."""
        data: dict[str, Any] = dump(self)
        for name in ("kv_block_size", "kv_bytes"):
            if getattr(self, name) is None:
                data.pop(name, None)
        return data

    @property
    def block_size_given(self) -> int | None:
        """Tokens in a KV block as the engine is told; None where an earlier version stored only a multiple of them."""
        if self.kv_block_size is not None or self.kv_blocks not in (None, self.kv_pool.blocks):
            return self.kv_block_size
        return self.kv_pool.block_size

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class LoadFacts(Part):
    """The load settings were compared under. An input of a callable is a prompt as long as it costs, its result one token."""

    spec: Text = Field(description="the workload; reads back as --workload")
    description: str
    length_scale: AboveZero = Field(
        description="what the workload's lengths were multiplied by; of a mix those of parts that bring no length of their own"
    )
    cap_prompt: Positive | None = Field(description="longest prompt, tokens")
    cap_output: Positive | None = Field(description="longest output, tokens")
    mean_prompt: Amount = Field(description="tokens; of a callable the cost of an input")
    mean_output: Amount = Field(description="tokens")
    rate: Rate = Field(description="requests/s where settings were compared")
    offered_rate: Amount = Field(description="requests/s that came in the windows of the recommended setting")
    rate_from: Literal["user", "calibration"]
    window_s: AboveZero = Field(description="length of a measuring window, s")
    warmup_s: Amount = Field(description="what was left out before each window, s")
    search_seed: Count
    validation_seeds: tuple[Count, ...]


class Spread(Part):
    """A mean, its 95% interval, and what each run gave."""

    mean: Amount
    low: Number
    high: Number
    runs: tuple[Amount, ...]

    @model_validator(mode="after")
    def _ordered(self) -> Spread:
        check_order(self, ("low", "high"))
        return self

    @property
    def half(self) -> float | None:
        """Half the interval; None where that is more than the mean: so short a measurement has no interval worth the name."""
        half = (self.high - self.low) / 2
        return half if half <= self.mean else None


class ClassPoint(Part):
    """The requests of one class in all runs of a point, judged by its own SLO. Percentiles are medians over the runs."""

    weight: AboveZero = Field(description="what each counts for in goodput")
    offered: Count
    met: Count = Field(description="of them, those that met every target of the class")
    attainment: Share = Field(description="met / offered")
    throughput: Amount = Field(description="output tokens/s")
    ttft_p99_ms: Amount | None
    tpot_p99_ms: Amount | None
    e2e_p99_ms: Amount | None


class Tally(Part):
    """Requests offered to one setting, and those that met the SLO: of every point, an engine's or a callable's."""

    offered: Count = Field(description="requests due in the windows, those cancelled by the client left out")
    met: Count = Field(description="of them, those that met every target")
    attainment: Share = Field(description="met / offered")
    attainment_low: Share = Field(
        description="lower end of its 95% interval: over the seeds of simulations under several, else over blocks of seconds; "
        "over single requests where all or none met the SLO"
    )
    attainment_high: Share = Field(description="upper end of its 95% interval")

    @model_validator(mode="after")
    def _counted(self) -> Tally:
        check_order(self, ("met", "offered"), ("attainment_low", "attainment_high"))
        if self.offered and abs(self.attainment - self.met / self.offered) > 0.001:
            counted = f"{self.met} of {self.offered}"
            raise ValueError(f".attainment is {self.attainment:g}; it must be met / offered ({counted})")
        return self


class _Compared(Part):
    """What a point is of: its first fields in the file."""

    knobs: KnobsField
    stage: Literal["simulation", "search", "validation", "capacity"]
    label: str
    rate: Rate = Field(description="the workload's mean, requests/s")
    offered_rate: Amount = Field(description="requests/s that came in the windows")
    seeds: tuple[Count, ...] = Field(description="of the load, one a run")


class Point(Tally, _Compared):
    """All runs of one setting at one rate. Percentiles are medians over the runs; the sidecar file has every run."""

    goodput: Spread = Field(description="requests/s that met every target, each counted by the weight of its class")
    throughput: Spread = Field(description="output tokens/s")
    ttft_p50_ms: Amount | None
    ttft_p99_ms: Amount | None
    tpot_p50_ms: Amount | None
    tpot_p99_ms: Amount | None
    e2e_p99_ms: Amount | None
    preemptions: Count
    lateness_p99_ms: Amount = Field(description="how late the sender was at worst; counted in the latencies")
    e2e_mean_ms: Amount | None = Field(default=None, description="mean of all requests, the unfinished ones included")
    classes: dict[str, ClassPoint] = Field(default={}, description="by name; empty where there is one SLO for all")

    @model_validator(mode="after")
    def _possible(self) -> Point:
        check_order(self, ("ttft_p50_ms", "ttft_p99_ms"), ("tpot_p50_ms", "tpot_p99_ms"))
        return self

    @model_serializer(mode="wrap")
    def _as_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file says nothing of classes where there are none, nor of means that an earlier version did not take."""
        data: dict[str, Any] = dump(self)
        for name in ("classes", "e2e_mean_ms"):
            if not getattr(self, name):
                data.pop(name, None)
        return data

    @property
    def weighted_attainment(self) -> float:
        """Goodput as a share of what was offered: attainment, each request counted by the weight of its class."""
        return weighted_attainment(self)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from the other points of a profile."""
        return self.stage, self.knobs, self.rate


class Setting(Part):
    """A recommended setting, why it was chosen, and what it measured."""

    knobs: KnobsField
    why: str
    point: Point

    @model_validator(mode="after")
    def _of_this_setting(self) -> Setting:
        if self.knobs != self.point.knobs:
            raise ValueError(".point.knobs are not those of the setting: its figures were measured with others")
        return self


class Capacity(Part):
    """The highest rate tried at which ``knobs`` met the SLO."""

    knobs: KnobsField
    rate: AboveZero | None = Field(description="requests/s; null: at no rate tried")
    tried: tuple[Point, ...]

    @model_validator(mode="after")
    def _was_tried(self) -> Capacity:
        if self.rate is not None and self.rate not in [p.rate for p in self.tried]:
            raise ValueError(f".rate is {self.rate:g}; it must be the rate of a point in tried")
        return self


class Calibration(Part):
    """What was measured before the search, to scale the load: one request alone, then a saturated engine."""

    alone_ttft_ms: Amount
    alone_tpot_ms: Amount
    saturated_rate: Amount = Field(description="requests/s")
    saturated_tokens_per_s: Amount = Field(description="prompt and output tokens/s")
    step_base_ms: Amount
    step_per_prompt_token_ms: Amount
    step_per_decode_ms: Amount


class Confidence(Part):
    """How sure the choice is."""

    noise: Amount = Field(
        description="coefficient of variation of goodput between runs of one setting, at the least that of a share of so many "
        "requests; of mean E2E where that is the objective"
    )
    best: Share = Field(
        description="probability that the recommended setting is the best of the validated ones; equals share it, and each that "
        "measured clearly worse is better with 2.5% after all"
    )
    regret: Amount = Field(
        description="goodput it is expected to fall short of the best of them, as a share; of mean E2E, by how much it is longer"
    )
    sentence: str = Field(description="the same in words")


class Gain(Part):
    """Requests within the SLO with the recommended setting, over those with the baseline."""

    ratio: AboveZero
    low: Amount = Field(
        description="95% interval: Fieller's of the ratio, over blocks, at the least what `noise` makes of one setting"
    )
    high: AboveZero = Field(description="its upper end; 1000 or more: none")
    requests: Count = Field(description="requests offered to the recommended setting in what is compared")
    paired: bool = Field(description="whether both met the same requests")
    block_s: AboveZero | None = Field(
        default=None,
        description="mean length of the blocks, s: 4, shorter where the windows hold fewer than five of them, and 1 where they "
        "last less than 10 s together; longer where they hold more than 30. null in profiles of earlier versions, whose interval "
        "(a bootstrap over single seconds) claimed too much",
    )

    @property
    def clear(self) -> bool:
        """Whether the recommended setting is better beyond chance."""
        return self.certain and self.low > 1

    @property
    def certain(self) -> bool:
        """Whether the interval is one to go by: of the same requests, and not by the rule of earlier versions, which claimed
        too much."""
        return self.paired and self.block_s is not None

    @property
    def bounded(self) -> bool:
        """Whether the interval has an upper end: it has none where the baseline's goodput is not clearly above 0."""
        return self.high < UNBOUNDED_GAIN


class SimulationFacts(Part):
    """The simulated stage, and how far off it was where both were measured."""

    trials: Count
    cpu_seconds: Amount
    pareto: Count = Field(description="settings on its Pareto front")
    goodput_error: Amount | None = Field(
        description="median of |simulated − measured| / measured over the validated points at the rate compared"
    )
    speed: float = Field(
        default=1.0,
        ge=1e-3,
        le=1e3,
        description="while it served, in units of what cost model and serving_overhead_s say; simulations go by it",
    )
