"""Which waiting items go together, and in which order: the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.batching.item import Item


class Grouping(Protocol):
    """Holds the waiting items. Those that end while they wait are forgotten lazily: their state says so.

    ``padded``: a call costs items × its longest one, rather than the sum. ``in_order``: first come, first out, so that what
    stands ahead of a new item is everything that waits; a strategy may then also take them in another order.
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
