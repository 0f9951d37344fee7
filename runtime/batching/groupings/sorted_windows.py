"""Sorted windows: the oldest ``window`` items are sorted by cost and served in calls of neighbours, then the next window.

Padding shrinks with the window, and so does punctuality: an item waits at most for its own window. A window opens when the first
of its items goes, not when somebody looks at it, so what comes in between belongs to it. Dearest first; what is left of a
window and fills no call goes with the next one, which then begins at the same end of the scale: cheapest first after a
window of which the cheapest are left. Best where there is a backlog (a data set, an overnight job); with a short queue it is
arrival order.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import WAITING, Item


class SortedWindows:
    """See the module."""

    padded = True
    in_order = False

    def __init__(self, window: int = 256) -> None:
        if window < 1:
            raise ValueError(f"window is {window!r}; it must be at least 1")
        self._window = window
        self._line = Line()
        self._open: list[Item] = []  # what is left of the window, in the order in which it goes
        self._next: list[Item] = []  # the window after it, as it would be now
        self._dear_first = True  # how the open one is sorted
        self._next_dear_first = True
        self._fresh = False  # whether ``_next`` is up to date
        self.oldest = self._line.head

    def add(self, item: Item) -> None:
        self._line.add(item)
        self._fresh = self._fresh and len(self._next) + len(self._open) >= self._window

    def first(self, most: int) -> list[Item]:
        found = self._open[:most]
        if len(found) < most:
            found += self._following()[: most - len(found)]
        if len(found) < most:  # a call larger than the window
            known = set(found)
            found += [item for item in self._line.first(most) if item not in known][: most - len(found)]
        return found

    def _following(self) -> list[Item]:
        if not self._fresh:
            left = set(self._open)
            self._next_dear_first = not (left and self._dear_first)
            beyond = (item for item in self._line.first(self._window) if item not in left)
            self._next = sorted(beyond, key=lambda item: item.cost, reverse=self._next_dear_first)
            self._fresh = True
        return self._next

    def took(self, items: Sequence[Item]) -> None:
        gone = set(items)
        if not gone <= set(self._open):  # the next window opens
            self._dear_first = self._next_dear_first
            self._open += self._next
            self._next = []
        self._open = [item for item in self._open if item not in gone and item.state is WAITING]
        self._fresh = False
        self._line.left(len(items))

    def removed(self, item: Item) -> None:
        if item in self._open:
            self._open.remove(item)
        self._fresh = False
        self._line.left(1)
