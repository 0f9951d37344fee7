"""Which of the items that wait are to go now, when not all of them can be on time.

A call ends for all of its items at once, so an item may go only with those that let it be on time. Three plans are made
and the one that gets most items there in time, in this call and the next, is taken (ties: in this order):

- *half*: from the front, as long as the call takes no more than half of the promised time: what comes while it runs can then
  wait for its end and still be served;
- *rescue*: from the front, as long as the item that is due first makes it;
- *most*: those that make the largest call in which everybody is on time; whoever has too little time left is passed over.
  Among the rest the cheapest are preferred (Moore, Management Science 15, 1968: drop the longest job whenever one is late).

With room to spare the first two rescue what has little time left. Under overload passing it over costs nothing, for the
call stays full: serving what is nearly late in small calls is what loses capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from runtime.batching.item import Item
from runtime.batching.service_model import Price


class Bounds(NamedTuple):
    """Of a call: ``most`` items of ``budget`` cost; ``price`` in seconds nearly never exceeded (the margin is in it)."""

    most: int
    budget: int
    price: Price
    half_s: float


def choose(items: Sequence[Item], now: float, bounds: Bounds, *, reorder: bool) -> list[Item]:
    """The items to go now. ``items`` can each make it alone. ``reorder``: the cheap may pass the dear."""
    plans = [_from_front(items, now, bounds, bounds.half_s), _from_front(items, now, bounds, float("inf"))]
    plans.append(_most(items, now, bounds) if reorder else _in_order(items, now, bounds))
    best: list[Item] = []
    score = 0
    for plan in plans:
        if not plan:
            continue
        gone = set(map(id, plan))
        rest = [item for item in items if id(item) not in gone]
        after = now + bounds.price.of(len(plan), sum(item.cost for item in plan))
        value = len(plan) + len((_most if reorder else _in_order)(rest, after, bounds))
        if value > score:
            best, score = plan, value
    return best


def _from_front(items: Sequence[Item], now: float, bounds: Bounds, longest_s: float) -> list[Item]:
    """In order, as long as the tightest deadline of those taken holds and the call takes at most ``longest_s``."""
    fixed, per_item, per_cost = bounds.price
    due, seconds, cost = now + longest_s, fixed, 0
    taken: list[Item] = []
    for item in items:
        seconds += per_item + per_cost * item.cost
        cost += item.cost
        sooner = min(due, item.deadline)
        if taken and (now + seconds > sooner or len(taken) == bounds.most or cost > bounds.budget):
            break
        taken.append(item)
        due = sooner
    return taken


def _in_order(items: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """In order, passing over whoever would be late in the call as it would be full."""
    front = items[: bounds.most]
    until = now + bounds.price.of(len(front), sum(item.cost for item in front))
    return _from_front([item for item in items if item.deadline >= until], now, bounds, float("inf"))


def _most(items: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """The most items that one call can hold with all of them on time.

    Items are added from the latest deadline to the earliest; whenever the call is too long for the one just added, or too
    large, the dearest is put out again (of equals the latest due). The largest set seen is the answer.
    """
    fixed, per_item, per_cost = bounds.price
    seconds, cost = now + fixed, 0
    heap: list[tuple[int, float, int]] = []  # dearest first
    best, best_at = 0, -1
    ordered = sorted(items, key=_deadline, reverse=True)
    for at, item in enumerate(ordered):
        heapq.heappush(heap, (-item.cost, -item.deadline, at))
        seconds += per_item + per_cost * item.cost
        cost += item.cost
        while heap and (seconds > item.deadline or len(heap) > bounds.most or (cost > bounds.budget and len(heap) > 1)):
            out = -heapq.heappop(heap)[0]
            seconds -= per_item + per_cost * out
            cost -= out
        if len(heap) >= best:  # of equal sizes the one with the earlier deadlines: the others can wait
            best, best_at = len(heap), at
    if best_at < 0:
        return []
    return _replay(ordered[: best_at + 1], now, bounds)


def _replay(ordered: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """The set that :func:`_most` held after the last of ``ordered``."""
    fixed, per_item, per_cost = bounds.price
    seconds, cost = now + fixed, 0
    heap: list[tuple[int, float, int]] = []
    for at, item in enumerate(ordered):
        heapq.heappush(heap, (-item.cost, -item.deadline, at))
        seconds += per_item + per_cost * item.cost
        cost += item.cost
        while heap and (seconds > item.deadline or len(heap) > bounds.most or (cost > bounds.budget and len(heap) > 1)):
            out = -heapq.heappop(heap)[0]
            seconds -= per_item + per_cost * out
            cost -= out
    return [ordered[at] for at in sorted((entry[2] for entry in heap), reverse=True)]


def _deadline(item: Item) -> float:
    return item.deadline
