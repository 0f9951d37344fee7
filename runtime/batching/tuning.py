"""The batcher as a controller sees it: a :class:`runtime.tunable.Tunable`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from runtime.batching.pool import Pool
from runtime.batching.strategies import Strategy
from runtime.clock import Clock
from runtime.errors import EngineClosedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.slo import SLO
from runtime.tunable import (
    CallableInfo,
    Capabilities,
    Facts,
    Lease,
    LeaseHolder,
    Listener,
    SchedulerView,
    StepPolicy,
)


class TunableBatcher:
    """Knobs, limits, promises, records and the view. Every call may come from any thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lease = LeaseHolder()

    @property
    def capabilities(self) -> Capabilities:
        """An item is never cut, so there is no chunk size; and what comes too late is the strategy's business."""
        return Capabilities.live(none=("chunk_size",), admission=False, deadline_order=False)

    @property
    def facts(self) -> Facts:
        """A batcher has no KV pool: a call holds as much as its budget allows."""
        about = CallableInfo(self.strategy.name, self.workers, self.slots)
        return Facts("batcher", kv_tokens=self.limits.token_budget, callable=about)

    @property
    def clock(self) -> Clock:
        """The clock of every record."""
        return self._pool.clock

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings of the knobs."""
        return self._pool.core.settings.limits

    @property
    def effective_limits(self) -> KnobLimits:
        """Ceilings in force: running out of memory lowers them below ``limits``."""
        return self._pool.core.settings.effective_limits

    @property
    def strategy(self) -> Strategy:
        """What says when a call goes, and with which items."""
        return self._pool.core.strategy

    @property
    def workers(self) -> int:
        """How many call the function, each at its own pace."""
        return len(self._pool.core.loads)

    @property
    def slots(self) -> int:
        """How many calls may run at a time."""
        return self._pool.core.state.slots

    @property
    def knobs(self) -> Knobs:
        """Ceilings for the adaptive strategy; what the others do exactly."""
        return self._pool.core.knobs

    @property
    def epoch(self) -> int:
        """The number of the knob setting in force."""
        return self._pool.core.epoch

    @property
    def slos(self) -> Mapping[str, SLO]:
        """The promise to each request class; that of ``default`` is for classes not named."""
        return MappingProxyType(self._pool.core.slos)

    def set_slo(self, slo: SLO | str, *, request_class: str = "default") -> None:
        """Promise ``slo`` to items of ``request_class`` that come from now on."""
        with self._pool.lock:
            self._pool.core.promise(request_class, SLO.of(slo))

    @property
    def kv_tokens(self) -> int:
        """A batcher has no KV pool: as much as a call may hold."""
        return self.limits.token_budget

    @property
    def block_size(self) -> int:
        return 1

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        """Put ``knobs`` in force from the very next call on; returns the epoch, the old one if nothing changed.

        Values between ``effective_limits`` and ``limits`` are lowered to the former. Raises ``ValueError`` above
        ``limits``, LeaseError if a controller holds the batcher and ``lease`` is not its own, EngineClosedError.
        """
        pool = self._pool
        with pool.lock:
            if pool.closed:
                raise EngineClosedError("the batcher is closed")
            self._lease.check(lease)
            epoch = pool.core.settings.set_knobs(knobs)
            pool.wake()
        return epoch

    def acquire(self, owner: str) -> Lease:
        """Become the one who may turn the knobs. Raises LeaseError while another holds them."""
        with self._pool.lock:
            return self._lease.acquire(owner)

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        """Have ``policy`` give each call its own budget of cost units, below the knob."""
        with self._pool.lock:
            self._lease.check(lease)
            self._pool.core.settings.policy = policy

    @property
    def admission(self) -> None:
        """No admission policy: the strategy itself rejects what cannot meet its SLO."""
        return None

    def set_admission(
        self, policy: AdmissionPolicy | None, *, source: RateSource | None = None, lease: Lease | None = None
    ) -> None:
        """Raises ``ValueError`` for any policy."""
        if policy is not None:
            raise ValueError(
                f"admission is {policy}; it must be None for a batcher, whose strategy rejects what is late"
            )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record, in the thread in which the call ran; returns a function that ends it."""
        return self._pool.listeners.subscribe(listener)

    def view(self) -> SchedulerView:
        """How the queue and the calls stand."""
        with self._pool.lock:
            return self._pool.core.view(self._pool.clock.now())
