"""When to call the function, and with which of the waiting items: the protocol of a strategy, and what it may look at."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from runtime.batching.groupings.protocol import Grouping, groups_of
from runtime.batching.item import WAITING, Call, Item
from runtime.knobs import Knobs
from runtime.records import LimitedBy


class State:
    """What a strategy may look at; kept by the core, which alone writes to it.

    ``waiting`` items of ``waiting_cost`` stand in ``queue``; ``running`` are the calls under way and ``idle`` how many more
    could be. ``slo_s``: the smallest target, None without an SLO. ``gap_s``: seconds between arrivals, lately
    (inf before the second). ``free_places``: items that the queue still takes.
    ``closing``: nothing more will come. ``wanted``: items that somebody waits for who brings nothing before they have come;
    ``pressed``: all that arrived until then are such.
    """

    __slots__ = (
        "closing", "free_places", "gap_s", "idle", "knobs", "last_arrival", "now", "pressed", "queue", "running",
        "slo_s", "slots", "waiting", "waiting_cost", "wanted",
    )  # fmt: skip

    def __init__(self, queue: Grouping, slots: int, knobs: Knobs) -> None:
        self.now = 0.0
        self.knobs = knobs
        self.queue = queue
        self.running: list[Call] = []
        self.slots = slots
        self.idle = slots
        self.waiting = 0
        self.waiting_cost = 0
        self.slo_s: float | None = None
        self.gap_s = inf
        self.last_arrival = -inf
        self.free_places = 1
        self.closing = False
        self.pressed = -inf
        self.wanted: list[Item] = []

    @property
    def oldest(self) -> float:
        """Arrival of the oldest item that waits; inf if none does."""
        item = self.queue.oldest()
        return inf if item is None else item.arrival

    @property
    def must_go(self) -> bool:
        """Whether holding items back can only lose: nothing more is coming, or there is no room for it."""
        return self.closing or self.free_places <= 0 or self.urged

    @property
    def urged(self) -> bool:
        """Whether somebody waits for what stands in the queue, and brings no more until it has come."""
        if self.wanted:
            self.wanted = [item for item in self.wanted if item.state is WAITING]
        return bool(self.wanted) or (self.pressed > -inf and self.oldest <= self.pressed)


class Decision(NamedTuple):
    """``items`` go into a call now, ``drop`` end as rejected. With no items: hold until ``wake_at``, the end of a call, or
    an arrival that makes ``wake_items`` wait. ``limited_by`` says what kept the call from holding more."""

    items: Sequence[Item] = ()
    drop: Sequence[Item] = ()
    wake_at: float = inf
    wake_items: int = 1
    limited_by: LimitedBy = LimitedBy.DEMAND


class Strategy(Protocol):
    """Asked under the batcher's lock: it must not block."""

    @property
    def name(self) -> str: ...

    def admit(self, item: Item, state: State) -> float | None:
        """None takes ``item`` in. A number refuses it (reason ``slo``): to be tried again after so many seconds."""
        ...

    def decide(self, state: State) -> Decision:
        """Asked while something waits and a worker is idle."""
        ...

    def began(self, call: Call, state: State) -> None:
        """``call``, as decided, begins; ``state.running`` does not hold it yet. May set ``call.predicted``."""
        ...

    def observe(self, call: Call, state: State) -> None:
        """``call`` has ended, at ``call.end``."""
        ...


class Fit(NamedTuple):
    """A batch that obeys the knobs, what it costs, and which knob ended it."""

    items: Sequence[Item]
    cost: int
    limited_by: LimitedBy


def fit(items: Sequence[Item], most: int, budget: int, padded: bool) -> Fit:
    """As many of ``items``, from the first on, as make at most ``most`` items of ``budget`` cost; at least the first."""
    cost = longest = taken = 0
    if padded:
        for item in items[:most]:
            longest = max(longest, item.cost)
            if (taken + 1) * longest > budget and taken:
                return Fit(items[:taken], cost, LimitedBy.BUDGET)
            taken += 1
            cost = taken * longest
    else:
        for item in items[:most]:
            if cost + item.cost > budget and taken:
                return Fit(items[:taken], cost, LimitedBy.BUDGET)
            cost += item.cost
            taken += 1
    return Fit(items[:taken], cost, LimitedBy.SLOTS if taken == most else LimitedBy.DEMAND)


def full_call(state: State) -> Fit | None:
    """A call that the knobs allow no more items in, if what waits makes one; of several the one whose oldest waits longest."""
    knobs, queue = state.knobs, state.queue
    for items in groups_of(queue, knobs.max_batch_size):
        found = fit(items, knobs.max_batch_size, knobs.token_budget, queue.padded)
        if found.limited_by is not LimitedBy.DEMAND:
            return found
    return None


def wake_items(state: State) -> int:
    """How many must wait before a call can be full, as far as their number shows."""
    queue = state.queue
    return state.knobs.max_batch_size if queue.in_order and not queue.padded else 1


def cost_of(items: Sequence[Item], padded: bool) -> int:
    """Of a call of ``items``."""
    costs = [item.cost for item in items]
    return len(costs) * max(costs) if padded else sum(costs)


class Plain:
    """What strategies that learn nothing and refuse nothing have in common."""

    def admit(self, item: Item, state: State) -> float | None:
        return None

    def began(self, call: Call, state: State) -> None:
        pass

    def observe(self, call: Call, state: State) -> None:
        pass
