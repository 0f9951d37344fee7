"""What contenders run on: an engine, live or simulated, and a core that may be taken from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autotune.engines import Engine
from autotune.profile import ModelFacts
from runtime.clock import Clock

NOISE = 0.05  # of simulated step times


class Core(Protocol):
    """A processor that can be taken away."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Machine:
    """``clock`` is the engine's. ``core``: None where no load takes one. ``drift``: how many times slower than at its
    fastest the machine has been since last asked."""

    engine: Engine
    facts: ModelFacts
    clock: Clock
    core: Core | None = None
    drift: Callable[[], float] = lambda: 1.0
