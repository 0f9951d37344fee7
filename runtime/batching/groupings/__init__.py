"""Which waiting items go together: one file each, behind one protocol."""

from __future__ import annotations

from typing import cast

from runtime.batching.groupings.arrival import ArrivalOrder, TokenBudgetGroups
from runtime.batching.groupings.buckets import LengthBuckets
from runtime.batching.groupings.fair_share import FairShare
from runtime.batching.groupings.ordered import DeadlineOrder, Ordered, PriorityOrder, ShortestOrder
from runtime.batching.groupings.protocol import Grouping
from runtime.batching.groupings.sorted_windows import SortedWindows
from runtime.ordering import Ordering, is_ordering

GROUPINGS: dict[str, type[Grouping]] = {
    "arrival": ArrivalOrder,
    "deadline": DeadlineOrder,
    "priority": PriorityOrder,
    "shortest": ShortestOrder,
    "fair": FairShare,
    "buckets": LengthBuckets,
    "sorted": SortedWindows,
    "padded": TokenBudgetGroups,
}


def grouping_of(value: str | Grouping | Ordering) -> Grouping:
    """A fresh grouping by name, the given one, or one by the given ordering. Raises ``ValueError`` for anything else."""
    if isinstance(value, str) and value in GROUPINGS:
        return GROUPINGS[value]()
    if is_ordering(value) and not isinstance(value, type):
        return Ordered(cast(Ordering, value))
    needed = ("add", "first", "took", "removed", "oldest")
    if isinstance(value, str | type) or not all(callable(getattr(value, name, None)) for name in needed):
        raise ValueError(f"grouping is {value!r}; it must be one of {', '.join(GROUPINGS)}, a Grouping or an Ordering")
    return cast(Grouping, value)


__all__ = [
    "GROUPINGS",
    "ArrivalOrder",
    "DeadlineOrder",
    "FairShare",
    "Grouping",
    "LengthBuckets",
    "Ordered",
    "PriorityOrder",
    "ShortestOrder",
    "SortedWindows",
    "TokenBudgetGroups",
    "grouping_of",
]
