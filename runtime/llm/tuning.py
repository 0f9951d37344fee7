"""An engine core as a controller sees it: with an admission policy, and request classes of different worth."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

from runtime.clock import Clock
from runtime.errors import EngineClosedError
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.core import Adjustable, Core
from runtime.llm.loop import EngineLoop
from runtime.llm.prefill_rate import RateSource
from runtime.shared.listeners import Listeners
from runtime.shared.stand_ins import Held, StandIn
from runtime.shared.tuning import Tuning
from runtime.slo import SLO
from runtime.tunable import Capabilities, Lease, SchedulerView

T = TypeVar("T")


class TunableCore(Tuning):
    """``slos`` and ``weights`` are those of the request classes there are."""

    def __init__(
        self,
        core: Adjustable,
        listeners: Listeners,
        clock: Clock,
        slos: dict[str, SLO],
        weights: Mapping[str, float],
        *,
        threads: bool = False,
    ) -> None:
        super().__init__(core.settings, listeners, clock, slos, threads=threads)
        self._held_source: Held[RateSource] | None = None
        self._core = core
        self._admission = core.admission
        self._weights = dict(weights)

    @abstractmethod
    def _post(self, change: Callable[[], None]) -> None:
        """Make ``change`` between two steps, now or later. Raises EngineClosedError."""

    @property
    def capabilities(self) -> Capabilities:
        """Every knob is live, steps are recorded, and budgets of single steps and admission are heeded."""
        return Capabilities.live()

    def _put_slo(self, request_class: str, slo: SLO | None) -> None:
        for slos in (self._slos, self._core.slack.slos):
            if slo is None:
                slos.pop(request_class, None)
            else:
                slos[request_class] = slo
        self._follow_slos()
        with suppress(EngineClosedError):
            self._post(self._core.retarget)

    @property
    def weights(self) -> Mapping[str, float]:
        """What each request class is worth relative to others; those not named are worth 1."""
        return MappingProxyType(self._weights)

    @property
    def admission(self) -> AdmissionPolicy | None:
        """What is done about requests that come too late, as last set; None accepts all and computes all."""
        return self._admission

    def set_admission(
        self,
        policy: AdmissionPolicy | bool | None,
        *,
        source: RateSource | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Have ``policy`` (True: the default one) end what comes too late, from the next step on; None or False ends that.

        ``source`` says how fast prompts are computed, where that has not been measured yet. Raises LeaseError if a controller
        holds the engine and ``lease`` is not its own, EngineClosedError, and ``ValueError`` for what is no policy.
        """
        made = AdmissionPolicy.of(policy)
        held = Held(source) if self._threads and source is not None else None
        heeded = source if held is None else _Rates(held)

        def change() -> None:
            self._core.set_admission(made, weights=self._weights, source=heeded)
            self._held_source = held

        def put() -> None:  # beside no other, so that the last that is told is the last that comes into force
            self._lease.check(lease)
            self._post(change)
            self._admission = made

        self._change(put)


class _Rates(StandIn[RateSource], RateSource):
    @property
    def prefill_rate(self) -> float:
        return 0.0 if (target := self.target) is None else target.prefill_rate

    @property
    def prompts_per_step(self) -> int:
        return 1 if (target := self.target) is None else target.prompts_per_step

    @property
    def pair_tokens(self) -> float:
        return 0.0 if (target := self.target) is None else target.pair_tokens


class TunableEngine(TunableCore):
    """A core that a loop runs on a thread of its own."""

    def __init__(
        self, core: Core, loop: EngineLoop, clock: Clock, slos: dict[str, SLO], weights: Mapping[str, float]
    ) -> None:
        super().__init__(core, loop.listeners, clock, slos, weights, threads=True)
        self._loop = loop
        self._forgotten = weakref.finalize(self, loop.abandon)
        self._forgotten.atexit = False  # the loop sees to that itself

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or its thread has died: it accepts nothing more."""
        return self._loop.closed

    @property
    def error(self) -> BaseException | None:
        """What ended its thread, such as a :class:`~runtime.errors.DeviceError`; None while it runs or was closed."""
        return self._loop.error

    def close(self, drain: bool = True) -> None:
        """Accept nothing more, finish what was accepted (``drain=False``: cancel it) and wait for the thread to end.

        Any number of times, from any thread; ``close(drain=False)`` cuts short a ``close()`` that still waits elsewhere.
        From a listener it returns at once.
        """
        self._loop.close(drain)
        self._forgotten.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def _change(self, change: Callable[[], T]) -> T:
        return self._loop.locked(change)

    def _post(self, change: Callable[[], None]) -> None:
        self._loop.post(change)

    def _put_slo(self, request_class: str, slo: SLO | None) -> None:
        if request_class not in {"default", *self._slos}:
            known = ", ".join(sorted({"default", *self._slos}))
            raise ValueError(f"request_class is {request_class!r}; the classes are {known}")
        super()._put_slo(request_class, slo)

    def view(self) -> SchedulerView:
        """The scheduler between two steps: it waits for the step in progress."""
        return self._loop.ask(lambda: self._core.view(self.clock.now()))
