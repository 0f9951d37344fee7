"""The profile of a callable: schema, file, and what a batcher is to be given.

A schema of its own, told from that of a language model by ``kind: callable``; docs/how-to/batch.md describes it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from autotune.cost.fields import AboveZero, Amount, Count, Positive, Text
from autotune.profile import Confidence, KnobsField, LoadFacts, Machine, Part, Profile, SLOField, Software
from autotune.profile.complaints import checked
from autotune.profile.document import profile_of
from autotune.profile.fields import Moment
from autotune.profile.parts import Tally
from autotune.profile.schema import schema_of
from autotune.profile.text import dump_yaml, read_yaml
from autotune.profile.versions import CALLABLE_STEPS, CALLABLE_VERSION, migrated
from autotune.writing import write_whole
from runtime.errors import InputError, shortened
from runtime.knobs import KNOBS, Knobs

MOST_RATE = 1000.0
"""Items/s that are offered unless a rate is given: one process sends these on time."""

StrategyName = Literal["adaptive", "dynamic"]


class BatcherSetting(NamedTuple):
    """What is tried: a strategy with knobs."""

    strategy: StrategyName
    knobs: KnobsField

    def __str__(self) -> str:
        return f"{self.strategy} {self.knobs}"

    def as_dict(self) -> dict[str, float]:
        """Its numbers: those of the knobs."""
        return self.knobs.as_dict()


def setting_of(knobs: Knobs, strategy: StrategyName | None) -> Knobs | BatcherSetting:
    """A setting of an engine, or of a batcher where there is a strategy."""
    return knobs if strategy is None else BatcherSetting(strategy, knobs)


class Inputs(Part):
    """The inputs it was profiled with."""

    file: Text
    items: Positive
    cost: Text | None = Field(description="the cost function by its name; null: every input costs 1")
    mean_cost: AboveZero


class Group(Part):
    """Calls of one group of inputs, and their median."""

    items: Positive
    cost: Positive
    ms: Amount


class ServiceTime(Part):
    """A call of n items that cost c takes ``fixed_ms + per_item_ms·n + per_cost_ms·c``."""

    fixed_ms: Amount
    per_item_ms: Amount
    per_cost_ms: Amount
    error: Amount = Field(description="median relative error over the groups")
    groups: tuple[Group, ...] = Field(min_length=1)
    beside: AboveZero = Field(default=1.0, description="how many times as long a call takes while all workers call")
    largest: Positive = Field(description="items of the largest call tried")
    ended: Text = Field(description="why no larger one was tried")
    capacity: AboveZero = Field(description="items/s that it can do in calls short enough for the SLO")
    capacity_size: Positive = Field(description="items in such a call")


def why_rate(rate_from: str, rate: float, capacity: float) -> str:
    """Why a callable that can do so many items/s is offered ``rate``."""
    if rate_from == "user":
        return "as requested"
    if rate == MOST_RATE:
        return "the most that is offered unless --rate asks for more"
    return f"{rate / capacity:.0%} of what it can do inside the SLO"


def items_per_s(rate: float) -> str:
    """``1,660 items/s``: three digits that count, and no power of ten up to a million."""
    return f"{float(f'{rate:.3g}'):,g} items/s"


class _Tried(Part):
    """What a point is of: its first fields in the file."""

    source: Literal["measured", "simulated"]
    strategy: StrategyName
    knobs: KnobsField


class CallablePoint(Tally, _Tried):
    """All runs of one setting of a batcher; its requests are items."""

    goodput: Amount = Field(description="items/s on time")
    e2e_p50_ms: Amount | None
    e2e_p99_ms: Amount | None
    items_per_call: Amount
    calls_per_s: Amount
    lateness_p99_ms: Amount = Field(description="how late the sender was; counted in the latencies")
    seeds: tuple[Count, ...]

    @property
    def setting(self) -> BatcherSetting:
        return BatcherSetting(self.strategy, self.knobs)


class CallableProfile(Part):
    """One profiling run of one callable, and the setting it recommends."""

    kind: Literal["callable"]
    schema_version: Literal[2]
    name: Text
    created: Moment
    command: str = Field(description="what was typed")
    status: Literal["complete", "stopped"]
    function: Text = Field(description="package.module:function")
    inputs: Inputs
    machine: Machine
    software: Software
    slo: SLOField
    slo_from: Text
    strategy: StrategyName = Field(
        description="of the batcher: adaptive takes the knobs as ceilings, dynamic does as they say"
    )
    knobs: KnobsField = Field(description="the recommended setting")
    replicas: Positive = Field(default=1, description="workers that called the function at a time")
    service: ServiceTime
    workload: LoadFacts
    points: tuple[CallablePoint, ...] = Field(min_length=1, description="what was tried, the recommended setting first")
    simulated: Count = Field(description="how many settings were simulated")
    verdict: Text
    slo_met: bool
    confidence: Confidence | None = Field(
        default=None, description="null: nothing was measured, or by an earlier version"
    )

    @model_validator(mode="after")
    def _consistent(self) -> CallableProfile:
        first = self.points[0]
        if (first.strategy, first.knobs) != (self.strategy, self.knobs):
            raise ValueError(f"knobs are {self.strategy} {self.knobs}; they must be those of the first of points")
        return self

    @property
    def why_rate(self) -> str:
        """Why settings were compared at its rate, in words."""
        return why_rate(self.workload.rate_from, self.workload.rate, self.service.capacity)

    @property
    def measured(self) -> bool:
        """Whether a setting was measured, and not all simulated alone."""
        return any(point.source == "measured" for point in self.points)

    @property
    def options(self) -> dict[str, Any]:
        """What ``Batcher(fn, **options)`` is given, beside ``cost``: of the knobs those that mean something to a batcher."""
        knobs = {spec.name: getattr(self.knobs, spec.name) for spec in KNOBS if spec.batcher}
        replicas = {"replicas": self.replicas} if self.replicas > 1 else {}
        return {"slo": str(self.slo), "strategy": self.strategy, **knobs, **replicas}


@functools.cache
def callable_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors and other programs."""
    return schema_of(CallableProfile, f"autotune profile of a callable, schema version {CALLABLE_VERSION}")


def save_callable_profile(profile: CallableProfile, path: Path) -> None:
    """Write ``path`` whole or not at all. Raises :class:`InputError` when the place cannot be written."""
    write_whole(path, dump_yaml(profile.model_dump(mode="json")))


def load_callable_profile(path: str | Path) -> CallableProfile:
    """Read and check the profile of a callable at ``path``. Raises :class:`InputError`: file, field, value, what is allowed."""
    return _callable_profile_of(read_yaml(path), path)


def _callable_profile_of(data: object, path: str | Path) -> CallableProfile:
    if not isinstance(data, dict) or data.get("kind") != "callable":
        kind = shortened(data.get("kind")) if isinstance(data, dict) and "kind" in data else "missing"
        raise InputError(
            f"{path}: is not the profile of a callable (kind is {kind}); `autotune profile --callable` makes one"
        )
    return checked(CallableProfile, migrated(data, path, CALLABLE_STEPS), path, callable_schema())


def load_either(path: str | Path) -> Profile | CallableProfile:
    """The profile at ``path``, of a callable or of a language model. Reads it once: it may be a pipe."""
    data = read_yaml(path)
    if isinstance(data, dict) and "kind" in data:
        return _callable_profile_of(data, path)
    return profile_of(data, path)
