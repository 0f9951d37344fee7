"""Who goes next: one file a policy, for requests of the engine and items of the batcher alike.

An ordering gives each a key when it is queued; the smallest goes first. Keys do not change while something waits, so that a
queue is a heap: what grows with waiting grows alike for all, and what is learned goes into later keys. Where SLOs change, an
ordering that goes by them gives what waits another key. Every ordering
bounds how long it can pass somebody over: each key grows with the time of arrival (or, for fair share, with the work of its
tenant queued before and the work that others get), so that whoever waits is overtaken only so long.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.ordering.ageing import AGEING_STEP_S, Ageing
from runtime.ordering.deadline import NO_DEADLINE_S, Deadline
from runtime.ordering.fair_share import FairShare
from runtime.ordering.fcfs import Fcfs
from runtime.ordering.hybrid import ALPHA_S, Hybrid
from runtime.ordering.least_slack import LeastSlack
from runtime.ordering.priority import PRIORITY_STEP_S, Priority
from runtime.ordering.protocol import Learning, Leaving, Ordering, Queued
from runtime.ordering.shortest import SHORTEST_STEP_S, ShortestFirst
from runtime.ordering.shortest_expected import ShortestExpected
from runtime.slo import SLO

ORDERINGS: dict[str, type[Ordering]] = {
    "priority": Priority,
    "fcfs": Fcfs,
    "shortest": ShortestFirst,
    "shortest_expected": ShortestExpected,
    "ageing": Ageing,
    "deadline": Deadline,
    "least_slack": LeastSlack,
    "hybrid": Hybrid,
    "fair": FairShare,
}


def ordering_of(value: str | Ordering, slos: Mapping[str, SLO] | None = None) -> Ordering:
    """A fresh ordering by name, or the given one. ``slos``: the SLO of each request class, looked at when it is asked.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(value, str) and value in ORDERINGS:
        made = ORDERINGS[value]
        return made(slos) if issubclass(made, Deadline) else made()
    if isinstance(value, str | type) or not is_ordering(value):
        raise ValueError(f"ordering is {value!r}; it must be one of {', '.join(ORDERINGS)}, or an Ordering")
    return value


def is_ordering(value: object) -> bool:
    """Whether ``value`` has the methods of one."""
    return _has(value, "key", "took")


def learning(value: Ordering) -> Learning | None:
    """``value``, if it has the methods of one that learns."""
    return value if _has(value, "on_step", "on_request") else None  # type: ignore[return-value]  # just looked at


def leaving(value: Ordering) -> Leaving | None:
    """``value``, if it has the method of one that is told who ends before it runs."""
    return value if _has(value, "left") else None  # type: ignore[return-value]  # just looked at


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


__all__ = [
    "AGEING_STEP_S",
    "ALPHA_S",
    "NO_DEADLINE_S",
    "ORDERINGS",
    "PRIORITY_STEP_S",
    "SHORTEST_STEP_S",
    "Ageing",
    "Deadline",
    "FairShare",
    "Fcfs",
    "Hybrid",
    "Learning",
    "LeastSlack",
    "Leaving",
    "Ordering",
    "Priority",
    "Queued",
    "ShortestExpected",
    "ShortestFirst",
    "is_ordering",
    "learning",
    "leaving",
    "ordering_of",
]
