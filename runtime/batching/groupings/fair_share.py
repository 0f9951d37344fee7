"""Fair share of the workers by cost: :mod:`runtime.ordering.fair_share`, with the starts given when an item's turn comes.

The head of a tenant's line starts where what was *served* of that tenant ends. So an item that is dropped, cancelled or times
out costs its tenant nothing. A tenant that had items waiting but was passed over (they could not be on time, say) is owed what
it missed, up to some calls' worth.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from operator import itemgetter

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import Item
from runtime.ordering.fair_share import Shares

_OWED = 16  # calls of the dearest so far: what a tenant that was passed over can catch up with, at most
_FEW = 1 / 8  # of the tenants owed all they can be: up to so many more are put in one by one, else all are sorted
_start_of = itemgetter(0)


class FairShare:
    """See the module. ``weights``: one for each tenant that is to get other than one share."""

    padded = False
    in_order = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(weights)
        self._dearest = 0.0  # call, in virtual time
        self._lines: dict[str, Line] = {}  # of the tenants that have items waiting
        self._places: dict[str, int] = {}  # of these, by when they joined
        self._joined = 0
        self._earliest = 0.0  # start of those that are owed all they can be, of which who joined first goes first
        self._turns: list[tuple[float, int, str]] = []  # (start, place, tenant), ascending; -inf: the earliest start
        self._all = Line()  # by arrival, for the wait window
        self.oldest = self._all.head

    def _start(self, tenant: str) -> float:
        return max(self._shares.starts[tenant], self._shares.now - _OWED * self._dearest)

    def add(self, item: Item) -> None:
        tenant = item.tenant
        line = self._lines.get(tenant)
        if line is None:
            self._joined += 1
            self._places[tenant] = self._joined
            line = self._lines[tenant] = Line()
            self._shares.join(tenant)
            insort(self._turns, self._turn(tenant))
        line.add(item)
        self._all.add(item)

    def first(self, most: int) -> list[Item]:
        turns = list(islice(self._heads(), most))  # ascending, so a heap; later ones come after the heads of these
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

    def _heads(self) -> Iterator[tuple[float, int, Item, Iterator[Item]]]:
        """The first item of each tenant, and those behind it, in the order of their starts."""
        for start, place, tenant in self._turns:
            items = iter(self._lines.get(tenant, ()))
            head = next(items, None)
            if head is not None:
                yield max(start, self._earliest), place, head, items

    def took(self, items: Sequence[Item]) -> None:
        shares, counts = self._shares, Counter(item.tenant for item in items)
        for tenant in counts:
            self._leave_turns(tenant)
        latest, lasts, work = shares.now, 0.0, 0
        for item in items:
            start = self._start(item.tenant)
            latest = max(latest, start)
            lasts += shares.charge(item, start)
            work += item.work
        self._dearest = max(self._dearest, lasts)
        shares.advance(latest, work)
        for tenant, count in counts.items():
            self._left(tenant, count)
            if tenant in self._lines:
                insort(self._turns, self._turn(tenant))
        self._move_earliest()
        self._all.left(len(items))

    def removed(self, item: Item) -> None:
        self._left(item.tenant, 1)
        self._all.left(1)

    def _left(self, tenant: str, count: int) -> None:
        line = self._lines[tenant]
        line.left(count)
        if line.head() is None:
            self._leave_turns(tenant)  # first: where Ctrl-C comes in between, it is removed again
            del self._lines[tenant]
            self._places.pop(tenant, None)
            self._shares.leave(tenant)

    def _turn(self, tenant: str) -> tuple[float, int, str]:
        start = self._shares.starts.get(tenant, 0.0)  # Ctrl-C may have come before it joined
        return start if start > self._earliest else -inf, self._places[tenant], tenant

    def _leave_turns(self, tenant: str) -> None:
        """Unless it is not there any more, or not yet."""
        turns, turn = self._turns, self._turn(tenant)
        at = bisect_left(turns, turn)
        if turns[at : at + 1] == [turn]:
            del turns[at]

    def _move_earliest(self) -> None:
        """Virtual time has moved, or a call was the dearest so far."""
        turns, before = self._turns, self._earliest
        self._earliest = now = self._shares.now - _OWED * self._dearest
        owed = bisect_right(turns, -inf, key=_start_of)
        if now < before:
            if owed:
                self._turns = sorted(map(self._turn, self._lines))
            return
        end = bisect_right(turns, now, key=_start_of)
        more = [(-inf, place, tenant) for _, place, tenant in turns[owed:end]]
        if len(more) > _FEW * owed:
            turns[:end] = sorted(turns[:owed] + more)
            return
        del turns[owed:end]
        for turn in more:
            insort(turns, turn)
