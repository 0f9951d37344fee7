"""What differs by what is profiled, as type parameters. Unless others are named they are those of an LLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from typing_extensions import TypeVar

from autotune.cost.model import CostModel
from autotune.profiling.setup import Comparison, Setup
from autotune.profiling.space import SearchSpace
from runtime.knobs import Knobs


class Tried(Protocol):
    """A setting: hashable, named by its ``str``, its numbers by ``as_dict``."""

    def __hash__(self) -> int: ...

    def as_dict(self) -> Mapping[str, float]: ...


class Allowing(Protocol):
    """Where settings are looked for."""

    def allows(self, setting: Any, /) -> bool:
        """Whether a setting may be recommended: one of another engine's that was tried beside them may not."""
        ...


SettingT = TypeVar("SettingT", bound=Tried, default=Knobs)
"""What is tried: knobs, or a strategy of the batcher with knobs."""

SettingT_contra = TypeVar("SettingT_contra", bound=Tried, default=Knobs, contravariant=True)

SetupT = TypeVar("SetupT", bound=Comparison, default=Setup)
"""What a calibration decides: the load, the SLO and the windows of a measurement."""

CostT = TypeVar("CostT", default=CostModel)
"""What predicts time: of a step, or of a call."""

SpaceT = TypeVar("SpaceT", bound=Allowing, default=SearchSpace)
"""Where settings are looked for."""
