"""Backpressure of a bounded queue: who offers an item while it is full stands in line for a place, a thread or a task."""

from __future__ import annotations

import threading

from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, NEW, WAITING, Item
from runtime.errors import RejectedError


class Backpressure:
    """The line before a full queue, in the order in which its items came. Every method needs ``lock``.

    Whoever frees a place gives it to the first in line at once. No caller has to run for that: one whose event loop has stopped
    holds nobody up, and newcomers find the queue full until the line is empty.
    """

    def __init__(self, lock: threading.RLock, core: BatchCore) -> None:
        self._lock = lock
        self._core = core
        self._line: dict[Item, _Place] = {}

    @property
    def admits(self) -> bool:
        """Whether the queue has a place, for which then nobody stands in line."""
        return self._core.state.waiting < self._core.max_queue

    def join(self, item: Item) -> None:
        """``item`` stands in line from now on."""
        item.held = True
        self._line[item] = _Place()

    def wait(self, item: Item) -> None:
        """Block this thread until ``item``, which stands in line, is in the queue or has ended. Raises what refused it."""
        place = self._line[item]
        place.left = threading.Condition(self._lock)
        while item in self._line:
            place.left.wait()
        if place.refused is not None:
            raise place.refused

    def leave(self, item: Item) -> None:
        """``item`` has ended; it may have stood in line."""
        if (place := self._line.pop(item, None)) is not None:
            place.leave()

    def fill(self, now: float) -> tuple[int, list[tuple[Item, Exception]]]:
        """Give free places to those who come first. Returns how many went in, and whom the strategy refused, and why, but for
        those whose threads wait: these raise it themselves."""
        entered = 0
        refused: list[tuple[Item, Exception]] = []
        while self._line and self.admits and self._core.fault is None:
            item = next(iter(self._line))
            place = self._line.pop(item)
            waited = now - item.arrival  # it arrives when it is let in: before, its caller was held back
            item.arrival += waited
            item.deadline += waited
            try:
                self._core.submit(item, now)
            except Exception as error:
                self._refuse(item, place, error, refused)
            except BaseException:  # such as Ctrl-C: it is the first in line again
                self._core.take_back(item)
                item.state = NEW
                self._line = {item: place, **self._line}
                raise
            else:
                entered += item.state is WAITING
                place.leave()
        return entered, refused

    def refuse(self, cause: str) -> list[tuple[Item, Exception]]:
        """Nobody is let in any more: the ``closed`` ones, but for those whose threads wait."""
        refused: list[tuple[Item, Exception]] = []
        line, self._line = self._line, {}
        for item, place in line.items():
            self._refuse(item, place, RejectedError(f"item {item.id}: {cause}", reason="closed"), refused)
        return refused

    @staticmethod
    def _refuse(item: Item, place: _Place, error: Exception, refused: list[tuple[Item, Exception]]) -> None:
        item.state = ENDED
        if place.left is None:
            refused.append((item, error))
        place.refused = error
        place.leave()


class _Place:
    """Where an item stands in line. ``left``: what its thread waits for, if one does; ``refused``: why it was not let in."""

    __slots__ = ("left", "refused")

    def __init__(self) -> None:
        self.left: threading.Condition | None = None
        self.refused: Exception | None = None

    def leave(self) -> None:
        if self.left is not None:
            self.left.notify()
