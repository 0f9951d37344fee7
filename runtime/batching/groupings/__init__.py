"""Which waiting items go together: one file each, behind one protocol."""

from __future__ import annotations

from runtime.batching.groupings.arrival import ArrivalOrder
from runtime.batching.groupings.buckets import LengthBuckets
from runtime.batching.groupings.fair_share import FairShare
from runtime.batching.groupings.ordered import DeadlineOrder, PriorityOrder
from runtime.batching.groupings.padded_budget import TokenBudgetGroups
from runtime.batching.groupings.protocol import Grouping
from runtime.batching.groupings.sorted_windows import SortedWindows

GROUPINGS: dict[str, type[Grouping]] = {
    "arrival": ArrivalOrder,
    "deadline": DeadlineOrder,
    "priority": PriorityOrder,
    "fair": FairShare,
    "buckets": LengthBuckets,
    "sorted": SortedWindows,
    "padded": TokenBudgetGroups,
}


def grouping_of(value: str | Grouping) -> Grouping:
    """A fresh grouping by name, or the given one. Raises ``ValueError`` for anything else."""
    if isinstance(value, str) and value in GROUPINGS:
        return GROUPINGS[value]()
    needed = ("add", "first", "took", "removed", "oldest")
    if isinstance(value, str | type) or not all(callable(getattr(value, name, None)) for name in needed):
        raise ValueError(f"grouping is {value!r}; it must be one of {', '.join(GROUPINGS)}, or a Grouping")
    return value


__all__ = [
    "GROUPINGS",
    "ArrivalOrder",
    "DeadlineOrder",
    "FairShare",
    "Grouping",
    "LengthBuckets",
    "PriorityOrder",
    "SortedWindows",
    "TokenBudgetGroups",
    "grouping_of",
]
