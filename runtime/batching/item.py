"""What is batched: one item, and one call of the function with several of them. Plain data, no thread and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import Any, NamedTuple

from runtime.records import FinishReason


class ItemState(IntEnum):
    """Where an item is. It only ever moves forward, except that a worker's death puts it back to waiting."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    ENDED = 3


NEW, WAITING, RUNNING, ENDED = ItemState
UNTIL_SLO = -inf
"""A deadline that is to be taken from the SLO of the item's class."""


class Item:
    """One input of the function and its deadline. Times are seconds on the batcher's clock.

    ``cost`` in cost units; ``deadline`` by when the result is worth something (inf: any time), from the SLO unless given;
    ``expires`` when it times out, whatever its state. ``handle`` is whatever the caller wants back with the outcome.
    """

    __slots__ = (
        "arrival", "cost", "deadline", "epoch", "expires", "handle", "held", "id", "key", "payload", "priority",
        "request_class", "scheduled", "state", "tenant", "times", "tries",
    )  # fmt: skip

    def __init__(
        self,
        payload: Any,
        arrival: float,
        cost: int = 1,
        priority: int = 0,
        tenant: str = "",
        deadline: float = UNTIL_SLO,
        expires: float = inf,
        request_class: str = "default",
        id: str | int = "",
        handle: Any = None,
    ) -> None:
        self.payload = payload
        self.arrival = arrival
        self.cost = cost
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.expires = expires
        self.request_class = request_class
        self.id = id
        self.handle = handle
        self.state = NEW
        self.held = False  # whether it had to wait for room in the queue; its time-out runs from before that
        self.scheduled = inf  # when it first entered a call
        self.epoch = -1  # the knob setting of that call
        self.tries = 0  # calls it has entered
        self.times: list[float] | None = None  # of its outputs, when they come one by one
        self.key = 0.0  # its place in an ordering

    @property
    def size(self) -> int:
        return self.cost

    @property
    def work(self) -> int:
        return self.cost

    def __repr__(self) -> str:
        return f"<Item {self.id!r} cost={self.cost} {self.state.name.lower()}>"


class Call:
    """One call of the function. ``cost`` is what the grouping says it costs: the sum, or items × longest if padded.

    ``others``: calls running besides it when it began; after its end, the mean over its time. ``predicted``: seconds it was
    expected to take, None without a model. ``failed`` counts items that got no result. ``peak_bytes`` if memory is measured.
    """

    __slots__ = (
        "_busy", "cost", "end", "epoch", "failed", "items", "limited_by", "others", "peak_bytes", "predicted", "start",
        "stretched", "waiting", "waiting_cost", "worker",
    )  # fmt: skip

    def __init__(self, items: Sequence[Item], cost: int, worker: int, start: float, epoch: int, others: int) -> None:
        self.items = items
        self.cost = cost
        self.worker = worker
        self.start = start
        self.end = inf
        self.epoch = epoch
        self.others: float = others
        self.predicted: float | None = None
        self.limited_by: Any = None
        self.failed = 0
        self.stretched = False  # cut short, or more than one call of the function: no time to learn from
        self.peak_bytes: int | None = None
        self.waiting = 0  # items and cost left in the queue when it began
        self.waiting_cost = 0
        self._busy = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def informative(self) -> bool:
        """Whether it took as long as such a call does: it was one, and not all of its items failed."""
        return self.failed < len(self.items) and not self.stretched

    def __repr__(self) -> str:
        return f"<Call of {len(self.items)} items, cost {self.cost}, worker {self.worker}>"


class Ended(NamedTuple):
    """An item that ended without a result, and why. ``cut``: by the end of the batcher, which its caller hears of as of a
    cancel."""

    item: Item
    reason: FinishReason
    cause: str
    retry_after_s: float | None = None
    cut: bool = False


class Next(NamedTuple):
    """``call`` to run now, or None until ``wake_at``, an arrival or the end of a call. ``ended`` while deciding."""

    call: Call | None
    wake_at: float
    ended: Sequence[Ended]
