"""What the threads of an engine may use only as long as its user holds it: step policies, sources of rates, and listeners that
say that they hold the engine.

The threads outlive the :class:`~runtime.llm.engine.Engine` or batcher that its user holds, and end once that is forgotten.
If they held what holds the engine, as a controller does, nobody could ever forget it. So they hold stand-ins, and the engine
holds what these stand for. Other listeners they hold themselves: these hear the end of what a forgotten engine was at.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from runtime.records import RequestRecord, StepRecord
from runtime.tunable import Listener, SchedulerView, StepPolicy

T = TypeVar("T")


class Held(Generic[T]):
    """What holds ``target`` for a :class:`StandIn`."""

    __slots__ = ("__weakref__", "target")

    def __init__(self, target: T) -> None:
        self.target = target


class StandIn(Generic[T]):
    """Stands for ``held.target`` as long as somebody holds ``held``."""

    def __init__(self, held: Held[T]) -> None:
        self._held = weakref.ref(held)

    @property
    def target(self) -> T | None:
        """None once nobody holds it."""
        held = self._held()
        return None if held is None else held.target

    def __repr__(self) -> str:
        return repr(self.target)


class ListenerStandIn(StandIn[Listener]):
    def on_step(self, record: StepRecord) -> None:
        if (target := self.target) is not None:
            target.on_step(record)

    def on_request(self, record: RequestRecord) -> None:
        if (target := self.target) is not None:
            target.on_request(record)


class PolicyStandIn(StandIn[StepPolicy]):
    def budget(self, view: SchedulerView) -> int:
        target = self.target
        return view.knobs.token_budget if target is None else target.budget(view)
