"""A batcher under a controller, in virtual time: the real core, strategies, records, lease and guardrails."""

from __future__ import annotations

import threading
from typing import Any, cast

import autotune
from autotune.control.loop import Control
from runtime.batching.accounts import call_record, item_record
from runtime.batching.core import BatchCore
from runtime.batching.item import Call, Item
from runtime.batching.options import BATCHER_LIMITS
from runtime.batching.pool import Pool
from runtime.batching.strategies import Strategy
from runtime.batching.tuning import TunableBatcher
from runtime.knobs import Knobs
from runtime.records import FinishReason
from runtime.shared.listeners import Listeners
from runtime.slo import SLO
from tests.unit.batching_world import Served, linear, serve


class Core(BatchCore):
    """Tells its records as the pool of a live batcher does."""

    listeners: Listeners
    now = 0.0

    def done(self, call: Call, end: float) -> None:
        super().done(call, end)
        self.now = end
        records = [item_record(item, FinishReason.STOP, end, self.epoch) for item in call.items]
        self.listeners.tell(call_record(call, 0), records)


class VirtualPool:
    """What a tunable batcher needs of its pool, without threads."""

    closed = False

    def __init__(self, core: Core) -> None:
        self.core = core
        self.lock = threading.Lock()
        self.listeners = core.listeners = Listeners()
        self.clock = self

    def now(self) -> float:
        return self.core.now

    def wake(self) -> None: ...


class ControlledBatcher(TunableBatcher):
    """``serve`` runs to the end of ``items``, under a controller unless told otherwise."""

    def __init__(self, strategy: Strategy, knobs: Knobs, slo: SLO, grouping: str = "arrival") -> None:
        self.core = Core(strategy, grouping, slo=slo, knobs=knobs, limits=BATCHER_LIMITS)
        self.slo = slo
        self.control: Control | None = None
        super().__init__(cast(Pool, VirtualPool(self.core)))

    def serve(self, items: list[Item], service: Any = linear, *, controlled: bool = True, **options: Any) -> Served:
        if not controlled:
            return serve(self.core, items, service)
        with autotune.control(self, slo=self.slo, **options) as self.control:
            return serve(self.core, items, service)
