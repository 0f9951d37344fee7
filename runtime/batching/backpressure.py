"""Backpressure of a bounded queue: who offers an item while it is full stands in line for a place, a thread or a task."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, NEW, WAITING, Item
from runtime.errors import RejectedError


class Backpressure:
    """The line before a full queue, in the order in which its items came. Every method needs ``lock``.

    Whoever frees a place gives it to the first in line at once. No caller has to run for that: one whose event loop has stopped
    holds nobody up, and newcomers find the queue full until the line is empty.
    """

    def __init__(
        self, lock: threading.RLock, core: BatchCore, refused: Callable[[tuple[Item, Exception]], None]
    ) -> None:
        """``refused`` is given each item that is not let in, and why, but for those whose threads wait: these raise it."""
        self._lock = lock
        self._core = core
        self._refused = refused
        self._line: OrderedDict[Item, _Place] = OrderedDict()  # the first of a dict lies behind all that have left it

    @property
    def admits(self) -> bool:
        """Whether the queue has a free place; nobody stands in line then."""
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
        if (place := self._line.get(item)) is not None:
            place.leave()
            del self._line[item]

    def fill(self, now: float) -> int:
        """Give free places to those who come first, but for those whom the strategy refuses. Returns how many went in."""
        entered = 0
        while self._line and self.admits and self._core.fault is None:
            item, place = next(iter(self._line.items()))
            place.leave()  # first, as everywhere: Ctrl-C may come in between, and its thread looks whether it is out of line
            waited = now - item.arrival  # it arrives when it is let in: before, its caller was held back
            item.arrival += waited
            item.deadline += waited
            try:
                del self._line[item]
                self._core.submit(item, now)
            except Exception as error:
                self._refuse(item, place, error)
            except BaseException:  # such as Ctrl-C: it is the first in line again
                self._core.take_back(item)
                item.state = NEW
                self._line = OrderedDict({item: place, **self._line})
                raise
            else:
                entered += item.state is WAITING
        return entered

    def refuse(self, cause: str) -> None:
        """Nobody is let in any more: all are refused, for ``closed``. Where Ctrl-C interrupts this, the rest stand in line."""
        for item, place in list(self._line.items()):
            self._refuse(item, place, RejectedError(f"item {item.id}: {cause}", reason="closed"))
            place.leave()
            del self._line[item]

    def _refuse(self, item: Item, place: _Place, error: Exception) -> None:
        place.refused = error
        item.state = ENDED
        if place.left is None:
            self._refused((item, error))


class _Place:
    """Where an item stands in line. ``left``: what its thread waits for, if one does; ``refused``: why it was not let in."""

    __slots__ = ("left", "refused")

    def __init__(self) -> None:
        self.left: threading.Condition | None = None
        self.refused: Exception | None = None

    def leave(self) -> None:
        if self.left is not None:
            self.left.notify()
