"""The engine as a controller sees it: a :class:`runtime.tunable.Tunable`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from runtime.clock import Clock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.core import EngineCore
from runtime.llm.loop import EngineLoop
from runtime.llm.prefill_rate import RateSource
from runtime.slo import SLO
from runtime.tunable import Capabilities, Lease, LeaseHolder, Listener, SchedulerView, StepPolicy


class TunableEngine:
    """Knobs, limits, promises, records and the view of a core that a loop runs. Every call may come from any thread.

    ``slos`` and ``weights`` are those of the request classes there are.
    """

    def __init__(
        self, core: EngineCore, loop: EngineLoop, clock: Clock, slos: dict[str, SLO], weights: Mapping[str, float]
    ) -> None:
        self._core = core
        self._loop = loop
        self._clock = clock
        self._slos = slos
        self._weights = dict(weights)
        self._lease = LeaseHolder()

    @property
    def capabilities(self) -> Capabilities:
        """Every knob is live, steps are recorded, and budgets of single steps and admission are heeded."""
        return Capabilities.live()

    @property
    def clock(self) -> Clock:
        """The clock of every record."""
        return self._clock

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings of the knobs."""
        return self._core.limits

    @property
    def effective_limits(self) -> KnobLimits:
        """Ceilings in force: running out of memory lowers them below ``limits``."""
        return self._core.effective_limits

    @property
    def knobs(self) -> Knobs:
        return self._core.knobs

    @property
    def epoch(self) -> int:
        """The number of the knob setting in force."""
        return self._core.epoch

    @property
    def slos(self) -> Mapping[str, SLO]:
        """The promise to each request class; that of ``default`` is for classes not named."""
        return MappingProxyType(self._slos)

    @property
    def weights(self) -> Mapping[str, float]:
        """What each request class is worth relative to others; those not named are worth 1."""
        return MappingProxyType(self._weights)

    def set_slo(self, slo: SLO | str, *, request_class: str = "default") -> None:
        """Promise ``slo`` to a class from now on. Raises ``ValueError`` for a class that there is not."""
        if request_class not in {"default", *self._slos}:
            known = ", ".join(sorted({"default", *self._slos}))
            raise ValueError(f"request_class is {request_class!r}; the classes are {known}")
        self._slos[request_class] = self._core.scheduler.slack.slos[request_class] = SLO.of(slo)

    @property
    def admission(self) -> AdmissionPolicy | None:
        """What is done about requests that come too late; None accepts all and computes all."""
        return self._core.admission

    def set_admission(
        self,
        policy: AdmissionPolicy | bool | None,
        *,
        source: RateSource | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Have ``policy`` (True: the default one) end what comes too late, from the next step on; None or False ends that.

        ``source`` says how fast prompts are computed, where that has not been measured yet.
        """
        self._lease.check(lease)
        made = AdmissionPolicy.of(policy)
        self._loop.post(partial(self._core.set_admission, made, weights=self._weights, source=source))

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        """Put ``knobs`` in force from the very next step on; returns the epoch, the old one if nothing changed.

        Values between ``effective_limits`` and ``limits`` are lowered to the former. Raises ``ValueError`` above
        ``limits``, LeaseError if a controller holds the engine and ``lease`` is not its own, EngineClosedError.
        """

        def change() -> int:
            self._lease.check(lease)
            return self._core.set_knobs(knobs)

        return self._loop.locked(change)

    def acquire(self, owner: str) -> Lease:
        """Become the one who may turn the knobs. Raises LeaseError while another holds them."""
        return self._loop.locked(lambda: self._lease.acquire(owner))

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        """Have ``policy`` give each step its own token budget, below the knob."""

        def change() -> None:
            self._lease.check(lease)
            self._core.policy = policy

        self._loop.locked(change)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record, in the engine's thread; returns a function that ends it."""
        return self._loop.listeners.subscribe(listener)

    def view(self) -> SchedulerView:
        """The scheduler between two steps: it waits for the step in progress."""
        return self._loop.ask(lambda: self._core.view(self._clock.now()))
