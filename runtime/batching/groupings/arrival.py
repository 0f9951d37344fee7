"""Arrival order: first come, first served. For items that cost about the same, or whose cost does not matter to others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from runtime.batching.item import WAITING, Item


class Line:
    """Items in the order they came; those that have left from the middle are skipped, and swept out when they are many."""

    __slots__ = ("_gone", "_items")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._gone = 0

    def __len__(self) -> int:
        return len(self._items) - self._gone

    def __iter__(self) -> Iterator[Item]:
        return (item for item in self._items if item.state is WAITING)

    def add(self, item: Item) -> None:
        self._items.append(item)

    def first(self, most: int) -> list[Item]:
        if not self._gone:
            return list(islice(self._items, most))
        return list(islice(self, most))

    def left(self, count: int) -> None:
        """``count`` of the items are no longer waiting."""
        items = self._items
        self._gone += count
        while items and items[0].state is not WAITING:
            items.popleft()
            self._gone -= 1
        if not items:
            self._gone = 0  # one whose submit was interrupted may have left without having come
        if self._gone > 64 and 2 * self._gone > len(items):
            self._items = deque(self)
            self._gone = 0

    def head(self) -> Item | None:
        return self._items[0] if self._items else None


class ArrivalOrder:
    """See the module."""

    padded = False
    in_order = True

    def __init__(self) -> None:
        self._line = Line()
        self.add = self._line.add
        self.first = self._line.first
        self.oldest = self._line.head

    def took(self, items: Sequence[Item]) -> None:
        self._line.left(len(items))

    def removed(self, item: Item) -> None:
        del item
        self._line.left(1)


class TokenBudgetGroups(ArrivalOrder):
    """Arrival order, in calls whose padded size (items × the longest) fits ``token_budget``.

    So a call is a rectangle of bounded area: many short items or few long ones. Without padding (packed calls) the budget
    bounds the sum instead, which is what plain arrival order does.
    """

    padded = True
