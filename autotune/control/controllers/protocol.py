"""What a controller is: records in, proposals out. No clock, no thread, no engine.

A controller sees records and nothing else, and its ``now`` is the end of the last step. The same records therefore give
the same decisions, which is what makes a log replayable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import SchedulerView


class Proposal(NamedTuple):
    """What a controller wants. ``cause`` is one sentence for a person; ``evidence`` the figures behind it; ``unmet`` names the
    promises that no knobs can keep, and is told in the log when it changes although nothing else does."""

    knobs: Knobs
    regime: str
    cause: str
    evidence: dict[str, Any]
    unmet: str = ""


class Controller(Protocol):
    """One algorithm. Calls come from one thread, in the order in which things happened.

    Three more are used of a controller that has them: :class:`Promised`, :class:`Budgeted` and
    :class:`runtime.llm.prefill_rate.RateSource`.
    """

    @property
    def name(self) -> str: ...

    def observe_step(self, record: StepRecord) -> None: ...

    def observe_request(self, record: RequestRecord) -> None: ...

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        """What the knobs should be, ``knobs`` being in force and ``limits`` their ceilings."""
        ...

    def budget(self, view: SchedulerView) -> int:
        """The token budget of the coming step, at most ``view.knobs.token_budget``."""
        ...


@runtime_checkable
class Promised(Protocol):
    """A controller that goes by what is promised, and so is told when that changes."""

    def promise(self, slos: Mapping[str, SLO]) -> None:
        """From now on the promises are ``slos``, one for each request class; ``default`` is for classes not named."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A controller that turns knobs otherwise where they are all it has."""

    def budgets_apply(self, applied: bool) -> None:
        """Whether each step goes by :meth:`Controller.budget`, as it does unless this says otherwise."""
        ...


def check_controller(controller: object) -> None:
    """Raise ``ValueError`` if ``controller`` lacks a part of :class:`Controller`."""
    parts = ("name", "observe_step", "observe_request", "decide", "budget")
    if missing := [part for part in parts if not hasattr(controller, part)]:
        raise ValueError(f"controller is {controller!r}; a Controller has {', '.join(missing)} as well")
