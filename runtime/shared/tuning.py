"""What the engine, the simulated engine and the batcher have in common as a controller sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from runtime.clock import Clock
from runtime.knobs import KnobLimits, Knobs
from runtime.shared.listeners import Listeners
from runtime.shared.settings import Settings
from runtime.shared.stand_ins import Held, ListenerStandIn, PolicyStandIn
from runtime.slo import SLO, SLOHistory
from runtime.tunable import Lease, Listener, SchedulerView, StepPolicy

T = TypeVar("T")


class Tuning(ABC):
    """Knobs, limits, SLOs, records and the lease: the one implementation of :class:`runtime.tunable.Tunable`.

    A subclass says how a change is made beside the threads that run, what follows from an SLO, and what the view is. Every
    call may come from any thread. ``threads``: whether there are threads that outlive this object; they get stand-ins of what
    is given to it (:mod:`runtime.shared.stand_ins`).
    """

    def __init__(
        self, settings: Settings, listeners: Listeners, clock: Clock, slos: dict[str, SLO], *, threads: bool = False
    ) -> None:
        self._threads = threads
        self._held_listeners: set[Held[Listener]] = set()
        self._held_policy: Held[StepPolicy] | None = None
        self._settings = settings
        self._listeners = listeners
        self.clock = clock
        """Of every record."""
        self._slos = slos
        self.slo_history = SLOHistory(dict(slos))
        """The SLOs over time, on ``clock``."""
        self._follow_slos = partial(self.slo_history.follow, slos, clock)  # does not hold this object
        self._lease = settings.lease

    @abstractmethod
    def _change(self, change: Callable[[], T]) -> T:
        """Make ``change`` at once, beside no other, and have the threads look at what follows. Raises EngineClosedError."""

    @abstractmethod
    def _put_slo(self, request_class: str, slo: SLO | None) -> None:
        """``slo`` is that of ``request_class`` from now on; None: it has none of its own. Followed by ``_follow_slos``."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it accepts nothing more and its knobs no longer move."""

    @abstractmethod
    def view(self) -> SchedulerView:
        """How the queue and what runs stand, between two steps."""

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings of the knobs."""
        return self._settings.limits

    @property
    def effective_limits(self) -> KnobLimits:
        """Ceilings in force: running out of memory lowers them below ``limits``."""
        return self._settings.effective_limits

    @property
    def knobs(self) -> Knobs:
        """Those in force."""
        return self._settings.knobs

    @property
    def wanted_knobs(self) -> Knobs:
        """Those last set: ``knobs`` are these, lowered to ``effective_limits``."""
        return self._settings.wanted

    @property
    def epoch(self) -> int:
        """The number of the knob setting in force."""
        return self._settings.epoch

    @property
    def slos(self) -> Mapping[str, SLO]:
        """The SLO of each request class; that of ``default`` is for classes not named."""
        return MappingProxyType(self._slos)

    def set_slo(self, slo: SLO | str, *, request_class: str = "default") -> None:
        """Hold requests of ``request_class`` to ``slo`` from now on."""
        self._put_slo(request_class, SLO.of(slo))

    def set_knobs(self, knobs: Knobs | None = None, *, lease: Lease | None = None, **changes: float) -> int:
        """Put ``knobs`` in force from the very next step on, or make the ``changes`` named: ``set_knobs(token_budget=512)``.

        Returns the epoch, the old one if nothing changed. Values between ``effective_limits`` and ``limits`` are lowered to the
        former. Raises ``ValueError`` above ``limits`` and for an unknown name, LeaseError if a controller holds the lease and
        ``lease`` is not its own, EngineClosedError.
        """
        if (knobs is None) != bool(changes) or not isinstance(knobs, Knobs | None):
            given = ", ".join([*([] if knobs is None else [repr(knobs)]), *changes]) or "nothing"
            raise ValueError(f"set_knobs takes Knobs(…), or knobs by name such as token_budget=512; given: {given}")

        def change() -> int:
            self._lease.check(lease)
            return self._settings.change_knobs(changes) if knobs is None else self._settings.set_knobs(knobs)

        return self._change(change)

    def acquire(self, owner: str) -> Lease:
        """Become the one who may turn the knobs; ``owner`` is what errors call the holder.

        Raises LeaseError while another holds them, EngineClosedError.
        """
        return self._change(lambda: self._lease.acquire(owner))

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        """Have ``policy`` give each step its own budget (tokens, or cost units), below the knob; None ends that.

        ``lease`` and what is raised are those of :meth:`set_knobs`.
        """

        held = Held(policy) if self._threads and policy is not None else None
        heeded = policy if held is None else PolicyStandIn(held)

        def change() -> None:
            self._lease.check(lease)
            self._settings.set_policy(heeded)
            self._held_policy = held

        self._change(change)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record, in the thread that ran the step; returns a function that ends it.

        One that holds the engine says so by ``holds_engine = True``: then an engine that nobody else holds is forgotten, and with
        it the listener.
        """
        if not (self._threads and getattr(listener, "holds_engine", False)):
            return self._listeners.subscribe(listener)
        held, everybody = Held(listener), self._held_listeners
        everybody.add(held)
        end = self._listeners.subscribe(ListenerStandIn(held))

        def ended() -> None:
            end()
            everybody.discard(held)

        return ended
