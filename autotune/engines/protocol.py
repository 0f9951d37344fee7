"""The one protocol of whatever is measured and tuned.

:class:`~runtime.tunable.Tunable` is what a controller sees: knobs, limits, SLOs, records, ``capabilities`` and ``facts``. An
:class:`Engine` also takes requests. An engine in virtual time is a :class:`VirtualEngine`; its capabilities say so, and
:func:`virtual` asks them. An :class:`EngineSource` starts engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason
from runtime.request import SamplingParams
from runtime.tunable import ModelInfo, Tunable

if TYPE_CHECKING:  # it loads scipy
    from autotune.workload import Arrival, ReplayReport


class Handle(Protocol):
    """A submitted request. Keep it until its record has come: an engine may end a request whose handle nobody has."""

    def cancel(self) -> object:
        """End it, whatever its state, unless it has ended or cannot be stopped any more."""
        ...


@runtime_checkable
class EndedForReason(Protocol):
    """A :class:`Handle` whose request can be ended by no wish of the client's."""

    def end_for(self, reason: FinishReason, cause: str) -> object:
        """As ``cancel``; the record has this reason and cause."""
        ...


class Engine(Tunable, Protocol):
    """Takes requests, and ends every one of them in exactly one record."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> Handle:
        """Queue a request of token ids (of a callable: ids of its inputs).

        Raises ``ValueError`` for one that can never run, :class:`~runtime.errors.RejectedError` when the queue is full, the
        request comes too late, or the engine is closed; a rejected one has a record, too, while there is an engine to tell it.
        """
        ...

    def close(self, drain: bool = True) -> None:
        """Accept nothing more; finish what was accepted, or cancel it without ``drain``. Any number of times."""
        ...


class VirtualEngine(Engine, Protocol):
    """An engine in virtual time: it makes steps only in these calls, in the caller's thread."""

    def serve(
        self,
        arrivals: Iterable[Arrival],
        *,
        start: float | None = None,
        label: str = "r",
        prompt_seed: int = 0,
        shared: bool | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> ReplayReport:
        """Offer each of ``arrivals`` at ``start`` (now, unless given) + its time, and return after the last.

        Request i is called ``<label>-<i>``. ``shared``: whether prompts may begin alike. ``stop`` ends it early.
        """
        ...

    def run(self, until: float = ..., *, stop: Callable[[], bool] | None = None) -> bool:
        """Make steps until nothing is left, or one ends at or after ``until``. False if ``stop`` ended it before."""
        ...

    def wait(self, seconds: float) -> None:
        """Let seconds pass, with the steps that are due in them."""
        ...

    def cancel_all(self, reason: FinishReason = ..., cause: str = ...) -> int:
        """End everything that runs or waits, by its client's wish unless ``reason`` and ``cause`` say otherwise; returns how many
        that were."""
        ...


class EngineSource(Protocol):
    """Starts engines that differ in what is fixed at start-up: knobs to begin with, limits and the seed of sampling."""

    @property
    def model(self) -> ModelInfo | None:
        """The language model that they serve; None if it is a callable, or nobody knows."""
        ...

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> Engine:
        """An engine of its own, at rest. None: the engine's own defaults. Raises ``ValueError`` for what is out of bounds."""
        ...


def virtual(engine: Engine) -> VirtualEngine | None:
    """``engine`` with the calls that let time pass; None if it lives in real time."""
    return cast(VirtualEngine, engine) if engine.capabilities.virtual_time else None


def waiting(engine: Engine) -> Callable[[float], object]:
    """How to let seconds pass for ``engine``: by sleeping, or, in virtual time, by running it for so long."""
    found = virtual(engine)
    return threading.Event().wait if found is None else found.wait
