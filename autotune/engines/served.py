"""What measuring needs of an engine, live or in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from autotune.workload import Arrival, ReplayReport
from runtime.clock import Clock
from runtime.knobs import KnobLimits, Knobs
from runtime.request import SamplingParams
from runtime.tunable import Listener, SchedulerView


class Handle(Protocol):
    def cancel(self) -> object: ...


class Served(Protocol):
    """What measuring needs of an engine; :class:`runtime.Engine` has it."""

    @property
    def limits(self) -> KnobLimits: ...
    @property
    def effective_limits(self) -> KnobLimits: ...
    @property
    def knobs(self) -> Knobs: ...
    @property
    def epoch(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    def set_knobs(self, knobs: Knobs) -> int: ...
    def subscribe(self, listener: Listener) -> Callable[[], None]: ...
    def view(self) -> SchedulerView: ...
    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> Handle: ...


@runtime_checkable
class Simulated(Served, Protocol):
    """An engine in virtual time, such as :class:`autotune.simulate.SimulatedEngine`: it goes on when it is told to."""

    @property
    def clock(self) -> Clock: ...
    def serve(
        self,
        arrivals: Iterable[Arrival],
        *,
        start: float | None = None,
        label: str = "r",
        prompt_seed: int = 0,
        shared: bool | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> ReplayReport: ...
    def run(self, until: float = ..., *, stop: Callable[[], bool] | None = None) -> bool: ...
    def wait(self, seconds: float) -> None: ...
    def cancel_all(self, cause: str = ...) -> int: ...


def waiting(engine: Served) -> Callable[[float], object]:
    """How to let seconds pass for ``engine``: by sleeping, or, in virtual time, by running it for so long."""
    return engine.wait if isinstance(engine, Simulated) else threading.Event().wait
