"""Sorted windows: the oldest ``window`` items are sorted by cost and served in calls of neighbours, then the next window.

Padding shrinks with the window, and so does punctuality: an item waits at most for its own window. Best where there is a
backlog (a data set, an overnight job); with a short queue it is arrival order.
"""

from __future__ import annotations

from collections import deque
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
        self._open: deque[Item] = deque()
        self.add = self._line.add
        self.oldest = self._line.head

    def first(self, most: int) -> list[Item]:
        opened = self._open
        while opened and opened[0].state is not WAITING:
            opened.popleft()
        if not opened:
            opened.extend(sorted(self._line.first(self._window), key=lambda item: -item.cost))
        found: list[Item] = []
        for item in opened:
            if len(found) == most:
                break
            if item.state is WAITING:
                found.append(item)
        return found

    def took(self, items: Sequence[Item]) -> None:
        self._line.left(len(items))

    def removed(self, item: Item) -> None:
        del item
        self._line.left(1)
