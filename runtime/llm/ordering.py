"""Which waiting request goes next.

An ordering gives each request a key when it is queued; the smallest goes first. Keys do not change while a request waits, so
the queue (:mod:`runtime.llm.waiting`) is a heap. Every ordering bounds how long it can pass a request over: each key grows
with the arrival time (or, for fair share, with the work queued before it), so that whoever waits is overtaken only so long.
Preempted requests go before new ones: they hold a place in the order already.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Protocol

from runtime.request import Sequence
from runtime.slo import SLO, first_target

PRIORITY_STEP_S = 10.0
"""Seconds of waiting that outweigh one level of priority."""
SHORTEST_STEP_S = 0.01
"""Seconds of waiting that outweigh one prompt token, in shortest-job-first."""
NO_DEADLINE_S = 60.0
"""A request without a deadline is ordered as if it were due this long after its arrival."""


class Ordering(Protocol):
    def key(self, sequence: Sequence) -> float:
        """Asked once, when ``sequence`` is queued. The smallest goes first; ties go to the earlier."""
        ...

    def took(self, sequence: Sequence) -> None:
        """``sequence`` has left the queue to run."""
        ...


class Fcfs:
    """First come, first served; priority is not looked at."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival

    def took(self, sequence: Sequence) -> None:
        pass


class Priority(Fcfs):
    """Higher ``priority`` first, each level worth :data:`PRIORITY_STEP_S` of waiting. First come among equals."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival - PRIORITY_STEP_S * sequence.request.priority


class ShortestFirst(Fcfs):
    """Short prompts first, each token worth :data:`SHORTEST_STEP_S` of waiting."""

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival + SHORTEST_STEP_S * sequence.request.prompt_len


class Deadline(Fcfs):
    """Earliest deadline first, across classes: a request's own deadline, else its arrival + the TTFT (or E2E) target of its
    class in ``slos``, else :data:`NO_DEADLINE_S`."""

    def __init__(self, slos: Mapping[str, SLO] | None = None) -> None:
        self._slos = {} if slos is None else slos  # the scheduler's own, which may change

    def key(self, sequence: Sequence) -> float:
        request = sequence.request
        if request.deadline is not None:
            return request.deadline
        slo = self._slos.get(request.request_class) or self._slos.get("default")
        target = inf if slo is None else first_target(slo)
        return request.arrival + (target if target < inf else NO_DEADLINE_S)


class FairShare:
    """Tenants share the engine equally by tokens: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    A request starts, in virtual time, when its tenant's previous one ends; it lasts prompt + ``max_tokens`` tokens.
    """

    def __init__(self) -> None:
        self._virtual = 0.0
        self._ends: dict[str, float] = {}

    def key(self, sequence: Sequence) -> float:
        request = sequence.request
        start = max(self._virtual, self._ends.get(request.tenant, 0.0))
        self._ends[request.tenant] = start + request.prompt_len + request.max_tokens
        return start

    def took(self, sequence: Sequence) -> None:
        self._virtual = max(self._virtual, sequence.key)
        if len(self._ends) > 1024:  # tenants that owe nothing need not be remembered
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}


ORDERINGS: dict[str, type[Ordering]] = {
    "priority": Priority,
    "fcfs": Fcfs,
    "shortest": ShortestFirst,
    "deadline": Deadline,
    "fair": FairShare,
}


def ordering_named(name: str, slos: Mapping[str, SLO] | None = None) -> Ordering:
    """A fresh ordering; ``ValueError`` lists the valid names."""
    if name not in ORDERINGS:
        raise ValueError(f"ordering is {name!r}; it must be one of {', '.join(ORDERINGS)}")
    return Deadline(slos) if name == "deadline" else ORDERINGS[name]()


def ordering_of(value: str | Ordering, slos: Mapping[str, SLO] | None = None) -> Ordering:
    """A fresh ordering by name, or the given one. ``slos``: the promise to each request class, looked at when it is asked.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(value, str):
        return ordering_named(value, slos)
    if not (callable(getattr(value, "key", None)) and callable(getattr(value, "took", None))):
        raise ValueError(f"ordering is {value!r}; it must be one of {', '.join(ORDERINGS)}")
    return value
