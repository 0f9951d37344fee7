"""Which of the items that wait are to go now, when not all of them can be on time.

A call ends for all of its items at once, so an item may go only with those that let it be on time.

- *most*: those that make the largest call in which everybody is on time; whoever has too little time left for it is passed
  over. Among the rest the cheapest are preferred (Moore, Management Science 15, 1968: drop the longest job whenever one is
  late). Serving in small calls what is nearly late would lose capacity, and with it more items than it saves.
- *rescue*, looked at where SLOs differ: from the earliest deadline on, as long as that is kept. Those with much time
  left can wait for the next call, so that the plan goes that gets most items there in this call and the next.
"""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from runtime.batching.item import Item
from runtime.batching.service_model import Price

_ALIKE = 0.75  # of the longest target: shorter ones are another kind
_deadline = operator.attrgetter("deadline")


class Bounds(NamedTuple):
    """Of a call: ``most`` items of ``budget`` cost; ``price`` in seconds nearly never exceeded (the margin is in it).

    ``free_at``: when another worker will be free for the call after it (inf: none but the one that runs it). ``padded``: it
    costs items × its longest one.
    """

    most: int
    budget: int
    price: Price
    free_at: float = inf
    padded: bool = False


def choose(items: Sequence[Item], now: float, bounds: Bounds, *, reorder: bool) -> list[Item]:
    """The items to go now. ``items`` can each make it alone. ``reorder``: they may go in any order (calls that pad keep to
    theirs: what one more item costs depends on the others)."""
    if not reorder or bounds.padded:
        return _in_order(items, now, bounds)
    most = _most(items, now, bounds)
    targets = [item.deadline - item.arrival for item in items]
    if min(targets) > _ALIKE * max(targets):
        return most
    rescue = _from_front(sorted(items, key=_deadline), now, bounds)
    return rescue if _in_two(rescue, items, now, bounds) > _in_two(most, items, now, bounds) else most


def _in_two(plan: Sequence[Item], items: Sequence[Item], now: float, bounds: Bounds) -> int:
    """Items on time in ``plan`` and in the best call after it."""
    gone = set(map(id, plan))
    after = min(bounds.free_at, now + bounds.price.of(len(plan), sum(item.cost for item in plan)))
    left = _latest_first(item for item in items if id(item) not in gone)
    if _one_cost(left):
        return len(plan) + len(_slice(left, after, bounds))
    return len(plan) + max(map(len, _sets(left, after, bounds)), default=0)


def _from_front(items: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """In order, as long as the tightest deadline of those taken holds."""
    fixed, per_item, per_cost = bounds.price
    due, cost, longest = inf, 0, 0
    taken: list[Item] = []
    for item in items:
        longest = max(longest, item.cost)
        cost = (len(taken) + 1) * longest if bounds.padded else cost + item.cost
        seconds = fixed + per_item * (len(taken) + 1) + per_cost * cost
        sooner = min(due, item.deadline)
        if now + seconds > sooner or len(taken) == bounds.most or (cost > bounds.budget and taken):
            break
        taken.append(item)
        due = sooner
    return taken


def _in_order(items: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """In order, passing over whoever would be late: the largest call, to within a quarter, that can be filled like that."""
    fixed, per_item, per_cost = bounds.price
    if not items:
        return []
    usual = max(item.cost for item in items) if bounds.padded else sum(item.cost for item in items) / len(items)
    each = per_item + per_cost * usual
    size = min(len(items), bounds.most)
    while size:
        until = now + fixed + each * size
        alive = [item for item in items if item.deadline >= until]
        if len(alive) >= size or size == 1:
            return _from_front(alive, now, bounds)
        size = max(size * 3 // 4, 1)
    return []


def _most(items: Sequence[Item], now: float, bounds: Bounds) -> list[Item]:
    """The most items that one call can hold with all of them on time.

    Items are added from the latest deadline to the earliest; whenever the call is too long for the one just added, or too
    large, the dearest is put out again (of equals the latest due). The largest set seen is the answer.
    """
    best, best_at = 0, -1
    ordered = _latest_first(items)
    if _one_cost(ordered):
        return list(reversed(_slice(ordered, now, bounds)))
    for at, heap in enumerate(_sets(ordered, now, bounds)):
        if len(heap) >= best:  # of equal sizes the one with the earlier deadlines: the others can wait
            best, best_at = len(heap), at
    best_sets = deque(_sets(ordered[: best_at + 1], now, bounds), maxlen=1)  # again: copies would cost more
    return [ordered[at] for heap in best_sets for at in sorted((entry[2] for entry in heap), reverse=True)]


def _slice(ordered: list[Item], now: float, bounds: Bounds) -> list[Item]:
    """The same of items that all cost the same, as they are ``ordered``, several times as fast: what is put out is the latest
    due, so that the set is always a slice."""
    fixed, per_item, per_cost = bounds.price
    cost = ordered[0].cost
    each, most = per_item + per_cost * cost, max(1, min(bounds.most, bounds.budget // cost))
    seconds, size, best, best_end = now + fixed, 0, 0, 0
    for end, item in enumerate(ordered, 1):
        seconds += each
        size += 1
        while size and (seconds > item.deadline or size > most):
            seconds -= each
            size -= 1
        if size >= best:
            best, best_end = size, end
    return ordered[best_end - best : best_end]


def _sets(ordered: Iterable[Item], now: float, bounds: Bounds) -> Iterator[list[tuple[int, float, int]]]:
    """What :func:`_most` holds after each of ``ordered``: one heap, the dearest first, that changes from one to the next.

    Of each item (−cost, −deadline, its place in ``ordered``).
    """
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
        yield heap


def _latest_first(items: Iterable[Item]) -> list[Item]:
    return sorted(items, key=_deadline, reverse=True)


def _one_cost(items: Sequence[Item]) -> bool:
    """Whether they are there, and all cost the same."""
    return len({item.cost for item in items}) == 1
