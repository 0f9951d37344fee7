"""Who goes next: one file a policy, for requests of the engine and items of the batcher alike.

An ordering gives each a key when it is queued; the smallest goes first. Keys do not change while something waits, so that a
queue is a heap. Every ordering bounds how long it can pass somebody over: each key grows with the time of arrival (or, for
fair share, with the work queued before), so that whoever waits is overtaken only so long.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.ordering.deadline import NO_DEADLINE_S, Deadline
from runtime.ordering.fair_share import FairShare
from runtime.ordering.fcfs import Fcfs
from runtime.ordering.priority import PRIORITY_STEP_S, Priority
from runtime.ordering.protocol import Ordering, Queued
from runtime.ordering.shortest import SHORTEST_STEP_S, ShortestFirst
from runtime.slo import SLO

ORDERINGS: dict[str, type[Ordering]] = {
    "priority": Priority,
    "fcfs": Fcfs,
    "shortest": ShortestFirst,
    "deadline": Deadline,
    "fair": FairShare,
}


def ordering_of(value: str | Ordering, slos: Mapping[str, SLO] | None = None) -> Ordering:
    """A fresh ordering by name, or the given one. ``slos``: the SLO of each request class, looked at when it is asked.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(value, str) and value in ORDERINGS:
        return Deadline(slos) if value == "deadline" else ORDERINGS[value]()
    if isinstance(value, str | type) or not is_ordering(value):
        raise ValueError(f"ordering is {value!r}; it must be one of {', '.join(ORDERINGS)}, or an Ordering")
    return value


def is_ordering(value: object) -> bool:
    """Whether ``value`` has the methods of one."""
    return callable(getattr(value, "key", None)) and callable(getattr(value, "took", None))


__all__ = [
    "NO_DEADLINE_S",
    "ORDERINGS",
    "PRIORITY_STEP_S",
    "SHORTEST_STEP_S",
    "Deadline",
    "FairShare",
    "Fcfs",
    "Ordering",
    "Priority",
    "Queued",
    "ShortestFirst",
    "is_ordering",
    "ordering_of",
]
