"""Fair share of the workers by cost: :mod:`runtime.ordering.fair_share`, with the starts given when an item's turn comes.

The head of a tenant's line starts where what was *served* of that tenant ends. So an item that is dropped, cancelled or times
out costs its tenant nothing. A tenant that had items waiting but was passed over (they could not be on time, say) is owed what
it missed, up to some calls' worth.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import Item
from runtime.ordering.fair_share import Shares

_OWED = 16  # calls of the dearest so far: what a tenant that was passed over can catch up with, at most


class FairShare:
    """See the module. ``weights``: one for each tenant that is to get other than one share."""

    padded = False
    in_order = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(weights)
        self._dearest = 0.0  # call, in virtual time
        self._lines: dict[str, Line] = {}  # of the tenants that have items waiting
        self._all = Line()  # by arrival, for the wait window
        self.oldest = self._all.head

    def _start(self, tenant: str) -> float:
        return max(self._shares.starts[tenant], self._shares.now - _OWED * self._dearest)

    def add(self, item: Item) -> None:
        tenant = item.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = Line()
            self._shares.join(tenant)
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
                heapq.heapreplace(turns, (start + self._shares.lasts(item), place, following, items))
        return found

    def took(self, items: Sequence[Item]) -> None:
        shares = self._shares
        latest, lasts, work = shares.now, 0.0, 0
        for item in items:
            start = self._start(item.tenant)
            latest = max(latest, start)
            lasts += shares.charge(item, start)
            work += item.work
        self._dearest = max(self._dearest, lasts)
        shares.advance(latest, work)
        for tenant, count in Counter(item.tenant for item in items).items():
            self._left(tenant, count)
        self._all.left(len(items))

    def removed(self, item: Item) -> None:
        self._left(item.tenant, 1)
        self._all.left(1)

    def _left(self, tenant: str, count: int) -> None:
        line = self._lines[tenant]
        line.left(count)
        if line.head() is None:
            del self._lines[tenant]
            self._shares.leave(tenant)
