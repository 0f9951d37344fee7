"""Whether a call that could go now had better wait: for more items to share its price, or for another call to end.

**A price for each call** (money, a rate limit). Holding n items costs n seconds of waiting a second; a call that goes now
ends a cycle that cost P + A, with P the price in item-seconds and A what its items have waited in all, and lasted L = e + g:
the age e of the oldest item, and the gap g in which it was awaited. The cost of a second is least if a call goes when one
more second would cost more than the average one has (the rule of the economic order quantity; Harris 1913, and for Poisson
arrivals into batches Deb and Serfozo, Adv. Appl. Probab. 5, 1973)::

    hold while  n·(e + g) < P + A

n·e − A does not change while nobody comes, so only a gap that grows ends the wait by itself. Whatever the rule says, a call
goes when the item that is due first could otherwise be late, or the wait window (``max_wait_ms``) is over, or it is full.

**A device that others use.** Beside others a call takes longer, and makes theirs longer. With o running, k items to go, and
the first of them over in r seconds, now costs k·t(k, o) plus the delay it causes; waiting costs k·(r + t(k + arrivals,
o − 1)), and must meet the deadline unless it is over sooner even so. With a full call's worth waiting, what counts is whether
one more call at a time gets more items through. What would be late for that, and need not, does not wait for calls that are
longer than its own and have the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from runtime.batching.item import Call, Item
from runtime.batching.service_model import ServiceModel
from runtime.batching.strategies.protocol import State

_FELT = 1.05  # times as long that a call must take beside others for it to matter
_ONE_MORE, _ONE_LESS = 1.025, 1.005  # times as much that must get through for one more call at a time, and to keep it


def worth_more(waits_s: float, items: int, oldest: float, state: State, price: float) -> float:
    """Until when to hold a call of ``items`` that have waited ``waits_s`` in all, for its price to be shared; or ``now``."""
    if price == inf:
        return inf
    surplus = price + waits_s - items * (state.now - oldest)
    gap = max(state.gap_s, state.now - state.last_arrival)
    if items * gap >= surplus:
        return state.now
    return state.last_arrival + surplus / items


def time_left(call: Call, now: float) -> float:
    """Seconds until ``call``, which runs, should be over; 0 if it takes longer than was predicted."""
    return max(0.0, call.start + (call.predicted or 0.0) - now)


def likely_left(call: Call, now: float) -> float:
    """The same, but one that is over its time by a second is thought to take another."""
    return abs(call.start + (call.predicted or 0.0) - now)


def lanes(now: int, slots: int, items: int, cost: float, model: ServiceModel) -> int:
    """How many full calls at a time get the most items through, beginning at the ``now`` that are thought so already.

    One more must bring more than noise does, one less may lose next to nothing; between the two it stays as it is.
    """

    def rate(count: int) -> float:
        return count / max(model.predict(items, cost, count - 1), 1e-9)

    while now < slots and rate(now + 1) > _ONE_MORE * rate(now):
        now += 1
    while now > 1 and rate(now) < _ONE_LESS * rate(now - 1):
        now -= 1
    return now


def in_time_beside(items: Sequence[Item], cost: int, state: State, model: ServiceModel) -> bool:
    """Whether more than half of the ``items`` that are not lost are on time if they go now, while every call that runs takes
    longer than theirs, and stays on time beside it."""
    running, now = state.running, state.now
    beside, alone = model.price(len(running)), model.price(len(running) - 1)
    each = cost / len(items)
    soonest = now + model.margin * beside.of(1, each)
    dues = sorted(item.deadline for item in items if item.deadline >= soonest)
    took = model.margin * beside.of(len(dues), each * len(dues))
    if dues and dues[(len(dues) - 1) // 2] < now + took:
        return False
    for call in running:
        n, c = len(call.items), call.cost
        left = model.margin * likely_left(call, now)
        longer = left + took * (beside.of(n, c) / max(alone.of(n, c), 1e-9) - 1)
        dues = [item.deadline for item in call.items if item.deadline >= now + left]  # the others are late anyway
        if left < took or (dues and now + longer > min(dues)):
            return False
    return True


def better_alone(items: Sequence[Item], cost: int, due: float, state: State, model: ServiceModel) -> bool:
    """Whether ``items``, no full call and due at ``due``, had better wait for a call in ``state.running`` to end."""
    running, now = state.running, state.now
    others, k = len(running), len(items)
    beside, alone = model.price(others), model.price(others - 1)
    took = beside.of(k, cost)
    if took < _FELT * alone.of(k, cost):
        return False
    delay, soonest = 0.0, inf
    for call in running:
        n, c = len(call.items), call.cost
        left = time_left(call, now)
        soonest = min(soonest, left)
        delay += n * min(left, took) * (beside.of(n, c) / max(alone.of(n, c), 1e-9) - 1)
    more = (
        0.0 if state.gap_s in (0.0, inf) else min(soonest / state.gap_s, float(max(0, state.knobs.max_batch_size - k)))
    )
    later = soonest + alone.of(k, cost) + more * (alone.per_item + alone.per_cost * cost / k)
    if later < took:
        return True
    return k * later < k * took + delay and now + model.margin * later <= due
