"""The simulated engine as a controller sees it: a :class:`runtime.tunable.Tunable` that holds SLOs and a KV pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.core import EngineCore
from runtime.llm.listeners import Listeners
from runtime.llm.prefill_rate import RateSource
from runtime.slo import SLO
from runtime.tunable import Lease, LeaseHolder, Listener, SchedulerView, StepPolicy


class TunableSimulation:
    """Knobs, limits, SLOs, records and the view of a core in virtual time."""

    def __init__(self, core: EngineCore, slos: dict[str, SLO], weights: Mapping[str, float]) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.clock = VirtualClock()
        self._slos = slos
        self._weights = dict(weights)
        self._leases = LeaseHolder()
        self._listeners = Listeners()
        self._woken = False  # whether something has come that may end a wait

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings of the knobs."""
        return self.core.limits

    @property
    def effective_limits(self) -> KnobLimits:
        return self.core.effective_limits

    @property
    def knobs(self) -> Knobs:
        return self.core.knobs

    @property
    def epoch(self) -> int:
        return self.core.epoch

    @property
    def slos(self) -> Mapping[str, SLO]:
        """The SLO of each request class; that of ``default`` is for classes not named."""
        return MappingProxyType(self._slos)

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool."""
        return self.scheduler.kv.total * self.scheduler.kv.block_size

    @property
    def block_size(self) -> int:
        return self.scheduler.kv.block_size

    @property
    def weights(self) -> Mapping[str, float]:
        """What each request class is worth relative to others; those not named are worth 1."""
        return MappingProxyType(self._weights)

    def set_slo(self, slo: SLO | str, *, request_class: str = "default") -> None:
        """Promise ``slo`` to a class from now on. A class of that name need not have been there before."""
        self._slos[request_class] = self.scheduler.slack.slos[request_class] = SLO.of(slo)

    @property
    def admission(self) -> AdmissionPolicy | None:
        """What is done about requests that come too late; None accepts all and computes all."""
        return self.core.admission

    def set_admission(
        self,
        policy: AdmissionPolicy | bool | None,
        *,
        source: RateSource | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Have ``policy`` (True: the default one) end what comes too late, from now on; None or False ends that."""
        self._leases.check(lease)
        self._woken = True
        self.core.set_admission(AdmissionPolicy.of(policy), weights=self._weights, source=source)

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        """Put ``knobs`` in force from the next step on; returns the epoch. Raises as :meth:`runtime.Engine.set_knobs`."""
        self._leases.check(lease)
        self._woken = True
        return self.core.set_knobs(knobs)

    def acquire(self, owner: str) -> Lease:
        return self._leases.acquire(owner)

    @property
    def step_budgets(self) -> bool:
        """Each step asks the step policy."""
        return True

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        self._leases.check(lease)
        self.core.policy = policy

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record; returns a function that ends it.

        A listener with ``on_run(record, ends)`` is told of identical steps at once: the record of all of them, and when each
        ended. Without it, every step is made and told by itself.
        """
        return self._listeners.subscribe(listener)

    def view(self) -> SchedulerView:
        return self.core.view(self.clock.now())
