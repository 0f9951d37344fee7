"""The simulated engine as a controller sees it: a :class:`runtime.tunable.Tunable` that holds SLOs and a KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from runtime.clock import VirtualClock
from runtime.errors import EngineClosedError
from runtime.llm.core import EngineCore
from runtime.llm.tuning import TunableCore
from runtime.shared.listeners import Listeners
from runtime.slo import SLO
from runtime.tunable import Capabilities, Facts, Listener, SchedulerView

T = TypeVar("T")


class TunableSimulation(TunableCore):
    """A core in virtual time: changes are made where they are asked for. :meth:`set_slo` takes any class."""

    clock: VirtualClock

    def __init__(self, core: EngineCore, slos: dict[str, SLO], weights: Mapping[str, float], facts: Facts) -> None:
        super().__init__(core, Listeners(), VirtualClock(), slos, weights)
        self.core = core
        self._facts = facts
        self.scheduler = core.scheduler
        self._closed = False
        self._woken = False  # whether something has come that may end a wait

    @property
    def capabilities(self) -> Capabilities:
        """Those of the live engine, in virtual time."""
        return Capabilities.live(virtual_time=True)

    @property
    def facts(self) -> Facts:
        return self._facts

    def _change(self, change: Callable[[], T]) -> T:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._woken = True
        return change()

    def _post(self, change: Callable[[], None]) -> None:
        self._change(change)

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool."""
        return self.scheduler.kv.total * self.scheduler.kv.block_size

    @property
    def block_size(self) -> int:
        return self.scheduler.kv.block_size

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record; returns a function that ends it.

        A listener with ``on_run(record, ends)`` is told of identical steps at once: the record of all of them, and when each
        ended. Without it, every step is made and told by itself.
        """
        return super().subscribe(listener)

    def view(self) -> SchedulerView:
        return self.core.view(self.clock.now())
