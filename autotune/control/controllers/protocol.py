"""What a controller is: records in, proposals out. No clock, no thread, no engine.

A controller sees records, the view of each coming step, the SLOs, the knobs and their limits, and nothing else. Its ``now`` is
the end of the last step, or later where an operator acts in between. The same calls therefore give the same decisions, which
is what makes a log replayable.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import SchedulerView


class Proposal(NamedTuple):
    """What a controller wants. ``regime``: what limits now, in a word; empty is the controller's name. ``cause`` is one sentence
    for a person; ``evidence`` the figures behind it; ``unmet`` names the targets that no knobs can meet; a change of it alone is
    logged as well."""

    knobs: Knobs
    regime: str
    cause: str
    evidence: dict[str, Any]
    unmet: str = ""


class Controller(Protocol):
    """One algorithm. Calls come from one thread, in the order in which things happened.

    Four more are used of a controller that has them: :class:`SLOAware`, :class:`Budgeted`, :class:`Observing` and
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
class SLOAware(Protocol):
    """A controller that works towards the SLOs, and so must know when they change."""

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        """From now on the SLOs are ``slos``, one for each request class; ``default`` is for classes not named."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A controller that sets other knobs where no step goes by its budget."""

    def budgets_apply(self, applied: bool) -> None:
        """Whether each step goes by :meth:`Controller.budget`, as it does unless this says otherwise."""
        ...


@runtime_checkable
class Observing(Protocol):
    """A controller that learns something else where none of its proposals is put in force."""

    def only_observes(self) -> None:
        """None is, from the beginning on: what requests fare says nothing of them."""
        ...


METHODS = ("observe_step", "observe_request", "decide", "budget")
"""Of a :class:`Controller`."""


def check_controller(controller: object) -> None:
    """Raise ``ValueError`` if ``controller`` lacks a part of :class:`Controller`."""
    if missing := [part for part in ("name", *METHODS) if not hasattr(controller, part)]:
        raise ValueError(f"controller is {controller!r}; a Controller has {', '.join(missing)} as well")
    name = getattr(controller, "name", None)
    if not (isinstance(name, str) and name):
        raise ValueError(f"{type(controller).__qualname__}.name is {name!r}; it must be text that is not empty")


def checked_proposal(controller: Controller, found: object) -> Proposal:
    """``found``, which ``decide`` returned, with a regime.

    Raises ``TypeError`` if it is no :class:`Proposal`, and if it holds anything that a decision log cannot.
    """
    who = f"{type(controller).__qualname__}.decide"
    if not isinstance(found, Proposal):
        raise TypeError(f"{who} returned {found!r}; it must return a Proposal")
    for name in ("regime", "cause", "unmet"):
        if not isinstance(text := getattr(found, name), str):
            raise TypeError(f"{who} returned a Proposal whose {name} is {text!r}; it must be text")
    try:
        json.dumps(found.evidence, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{who} returned evidence that is no JSON: {error}; it is {found.evidence!r}") from None
    return found if found.regime else found._replace(regime=controller.name)


def failure(controller: object, error: BaseException) -> str:
    """What ``controller`` did wrong, as a clause: ``Mine.decide raised KeyError: 'chat' (mine.py:12)``."""
    kind = controller if isinstance(controller, type) else type(controller)
    steps = list(traceback.walk_tb(error.__traceback__))
    own = next((i for i, (frame, _) in enumerate(steps) if isinstance(frame.f_locals.get("self"), kind)), None)
    if own is None:  # what it returned cannot be used, and the error says so
        return f"{type(error).__name__}: {error}"
    method, file = steps[own][0].f_code.co_name, steps[own][0].f_code.co_filename
    line = [line for frame, line in steps if frame.f_code.co_filename == file][-1]  # not that of a function it called
    where = f"{os.path.basename(file)}:{line}"
    return f"{kind.__qualname__}.{method} raised {type(error).__name__}: {error} ({where})"
