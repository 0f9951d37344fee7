"""Fair share: tenants that want more than they get share the workers by cost.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with the tags given when an item's turn comes rather than when
it arrives: the head of a tenant's line starts, in virtual time, where what was *served* of that tenant ends, and lasts
cost / weight; the smallest start goes first. So an item that is dropped, cancelled or times out costs its tenant nothing. A
tenant that had nothing waiting starts at the present virtual time: what it did not use is not saved up. One that had, but was
passed over (its items could not be on time, say), is owed what it missed, up to some calls' worth.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import Item

_OWED = 16  # calls of the dearest so far: what a tenant that was passed over can catch up with, at most
_REMEMBERED = 1024  # tenants without items, before those that owe nothing are forgotten


class FairShare:
    """See the module. ``weights``: one for each tenant that is to get other than one share."""

    padded = False
    in_order = False

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not 0 < weight < inf:
                raise ValueError(f"weight of tenant {tenant!r} is {weight!r}; it must be a number above 0")
        self._virtual = 0.0  # the latest start of what was served
        self._starts: dict[str, float] = {}  # where each tenant's next item starts
        self._dearest = 0.0  # call, in virtual time
        self._lines: dict[str, Line] = {}  # of the tenants that have items waiting
        self._all = Line()  # by arrival, for the wait window
        self.oldest = self._all.head

    def _start(self, tenant: str) -> float:
        return max(self._starts[tenant], self._virtual - _OWED * self._dearest)

    def _lasts(self, item: Item) -> float:
        return item.cost / self._weights.get(item.tenant, 1.0)

    def add(self, item: Item) -> None:
        tenant = item.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = Line()
            self._starts[tenant] = max(self._virtual, self._starts.get(tenant, 0.0))
        line.add(item)
        self._all.add(item)

    def first(self, most: int) -> list[Item]:
        turns: list[tuple[float, int, Item, Iterator[Item]]] = []
        for place, (tenant, line) in enumerate(self._lines.items()):
            items = iter(line)
            head = next(items, None)
            if head is not None:
                turns.append((self._start(tenant), place, head, items))
        heapq.heapify(turns)
        found: list[Item] = []
        while turns and len(found) < most:
            start, place, item, items = turns[0]
            found.append(item)
            following = next(items, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (start + self._lasts(item), place, following, items))
        return found

    def took(self, items: Sequence[Item]) -> None:
        latest = self._virtual
        for item in items:
            start = self._start(item.tenant)
            latest = max(latest, start)
            self._starts[item.tenant] = start + self._lasts(item)
        self._virtual = latest
        self._dearest = max(self._dearest, sum(map(self._lasts, items)))
        for tenant, count in Counter(item.tenant for item in items).items():
            self._left(tenant, count)
        self._all.left(len(items))
        if len(self._starts) > _REMEMBERED + len(self._lines):
            self._starts = {t: at for t, at in self._starts.items() if at > self._virtual or t in self._lines}

    def removed(self, item: Item) -> None:
        self._left(item.tenant, 1)
        self._all.left(1)

    def _left(self, tenant: str, count: int) -> None:
        line = self._lines[tenant]
        line.left(count)
        if line.head() is None:
            del self._lines[tenant]
