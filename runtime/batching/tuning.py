"""The batcher as a controller sees it: a :class:`runtime.tunable.Tunable`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol, TypeVar

from runtime.batching.core import BatchCore
from runtime.batching.strategies import Strategy
from runtime.clock import Clock
from runtime.errors import EngineClosedError
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.shared.listeners import Listeners
from runtime.shared.tuning import Tuning
from runtime.slo import SLO
from runtime.tunable import CallableInfo, Capabilities, Facts, Lease, SchedulerView

T = TypeVar("T")


class Tuned(Protocol):
    """What runs the calls of ``core``, as far as tuning goes: ``lock`` is held for every change, and :meth:`wake` follows it."""

    @property
    def closed(self) -> bool: ...

    @property
    def core(self) -> BatchCore: ...

    @property
    def lock(self) -> AbstractContextManager[bool]: ...

    @property
    def listeners(self) -> Listeners: ...

    @property
    def clock(self) -> Clock: ...

    def wake(self) -> None: ...


class TunableBatcher(Tuning):
    """Its knobs are ceilings for the adaptive strategy; they are what the others do exactly."""

    def __init__(self, pool: Tuned) -> None:
        super().__init__(pool.core.settings, pool.listeners, pool.clock, pool.core.slos, threads=True)
        self._pool = pool
        # changes may be put off, and made by another face of the same core
        pool.core.slos_changed.append(self._follow_slos)

    @property
    def capabilities(self) -> Capabilities:
        """An item is never cut, so there is no chunk size; and what comes too late is the strategy's business."""
        return Capabilities.live(none=("chunk_size", "draft_tokens"), admission=False)

    @property
    def facts(self) -> Facts:
        """A batcher has no KV pool: a call holds as much as its budget allows."""
        about = CallableInfo(self.strategy.name, self.workers, self.slots)
        return Facts("batcher", kv_tokens=self.limits.token_budget, callable=about)

    @property
    def closed(self) -> bool:
        return self._pool.closed

    def _change(self, change: Callable[[], T]) -> T:
        pool = self._pool
        with pool.lock:
            if pool.closed:
                raise EngineClosedError("the batcher is closed")
            result = change()
            pool.wake()
        return result

    def _put_slo(self, request_class: str, slo: SLO | None) -> None:
        with self._pool.lock:
            self._pool.core.set_slo(request_class, slo)

    @property
    def strategy(self) -> Strategy:
        """What says when a call goes, and with which items."""
        return self._pool.core.strategy

    @property
    def workers(self) -> int:
        """How many call the function, each at its own speed."""
        return len(self._pool.core.loads)

    @property
    def slots(self) -> int:
        """How many calls may run at a time."""
        return self._pool.core.state.slots

    @property
    def weights(self) -> Mapping[str, float]:
        """None but 1: a batcher's classes differ in their SLOs alone."""
        return MappingProxyType({})

    @property
    def admission(self) -> None:
        """No admission policy: the strategy itself rejects what cannot meet its SLO."""
        return None

    def set_admission(
        self, policy: AdmissionPolicy | None, *, source: RateSource | None = None, lease: Lease | None = None
    ) -> None:
        """Nothing for None; raises ``ValueError`` for any ``policy``, whatever ``source`` and ``lease``."""
        if policy is not None:
            raise ValueError(
                f"admission is {policy}; it must be None for a batcher, whose strategy rejects what is late"
            )

    def view(self) -> SchedulerView:
        """How the queue and the calls stand."""
        with self._pool.lock:
            return self._pool.core.view(self._pool.clock.now())
