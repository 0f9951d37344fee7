"""Which waiting items go together, and in which order: the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from runtime.batching.item import Item


class Grouping(Protocol):
    """Holds the waiting items. Those that end while they wait are forgotten lazily: their state says so.

    ``padded``: a call costs items × its longest one, rather than the sum. ``in_order``: first come, first out, so that what
    stands ahead of a new item is everything that waits; a strategy may then also take them in another order.

    A grouping of which only some items may go together may have a method ``groups(most)`` as well: what ``first`` would give
    for each of its groups, in their order. Without it what ``first`` gives is all there is to choose from.
    """

    padded: bool
    in_order: bool

    def add(self, item: Item) -> None:
        """Queue ``item``, which has just been given the state WAITING."""
        ...

    def first(self, most: int) -> list[Item]:
        """Up to ``most`` waiting items that may go in one call, in the order in which they would; none of them removed.

        Empty only if nothing waits.
        """
        ...

    def took(self, items: Sequence[Item]) -> None:
        """``items``, all of them shown by ``first``, have left the queue to run."""
        ...

    def removed(self, item: Item) -> None:
        """``item`` has ended while it waited."""
        ...

    def oldest(self) -> Item | None:
        """The earliest arrival that waits."""
        ...


def groups_of(queue: Grouping, most: int) -> Iterable[Sequence[Item]]:
    """The items that may go in one call, for each choice that ``queue`` gives, up to ``most`` of each."""
    groups = getattr(queue, "groups", None)
    return (queue.first(most),) if groups is None else groups(most)
