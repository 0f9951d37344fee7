"""Fair share: tenants that want more than they get share by work. Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

What a tenant queues starts, in virtual time, where the tenant's previous work ends, and lasts work / weight; the smallest start
goes first. A tenant that has nothing queued starts at the present virtual time: what it did not use is not saved up, and one that
queues its next request only when the last has been taken gets less than a share.

Virtual time is the start of what was taken last, and grows at least by the work taken / weight of the tenants that have
something queued, as in generalized processor sharing (Parekh and Gallager, IEEE/ACM Transactions on Networking 1, 1993). By
starts alone it would stand still while ever new tenants come, and who has been served once would wait for all of them.

Bound: with n tenants of like weights in the queue at a time, what starts w ahead of virtual time goes before all that comes
when n · w of work has been taken. Cost: constant, and O(log n) in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from runtime.ordering.protocol import Queued

_REMEMBERED = 1024  # tenants, before those that owe nothing and have nothing queued are forgotten


class Shares:
    """Virtual time (``now``), and where in it each tenant's next work starts. ``weights``: one for each tenant that is to get
    other than one share."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not 0 < weight < inf:
                raise ValueError(f"weight of tenant {tenant!r} is {weight!r}; it must be a number above 0")
        self.now = 0.0
        self.starts: dict[str, float] = {}
        self._queued: dict[str, int] = {}  # how often a tenant has joined and not left
        self._sharing = 0.0  # the weight of those in it
        self._share = 0.0  # of what was taken last: virtual time grows by it when more is taken
        self._most = _REMEMBERED

    def join(self, tenant: str) -> float:
        """``tenant`` queues work. Returns where it starts; one that had none has saved up nothing."""
        start, queued = self.starts.get(tenant, 0.0), self._queued.get(tenant, 0)
        if not queued:
            start = max(self.now, start)
            self._sharing += self._weights.get(tenant, 1.0)
        self.starts[tenant] = start
        self._queued[tenant] = queued + 1
        return start

    def leave(self, tenant: str) -> None:
        """The opposite of :meth:`join`."""
        count = self._queued.pop(tenant, 0)
        if count > 1:
            self._queued[tenant] = count - 1
        elif count:
            self._sharing = self._sharing - self._weights.get(tenant, 1.0) if self._queued else 0.0

    def lasts(self, queued: Queued) -> float:
        return queued.work / self._weights.get(queued.tenant, 1.0)

    def charge(self, queued: Queued, start: float) -> float:
        """What the tenant of ``queued``, which starts at ``start``, queues next starts when that ends. Returns how long."""
        lasts = self.lasts(queued)
        self.starts[queued.tenant] = start + lasts
        return lasts

    def refund(self, queued: Queued, start: float) -> None:
        """``queued``, which was charged from ``start`` on, does not run: what of it lies ahead of virtual time is not charged."""
        lasts = self.lasts(queued)
        ahead = min(lasts, start + lasts - self.now)
        if ahead > 0:
            self.starts[queued.tenant] -= ahead

    def advance(self, start: float, work: int) -> None:
        """What starts at ``start`` goes, ``work`` altogether; its tenants have not left yet. Every now and then, tenants that owe
        nothing and have nothing queued are forgotten."""
        self.now = max(self.now + self._share, start)
        self._share = work / (self._sharing or 1.0)
        if len(self.starts) > self._most:
            self.starts = {t: at for t, at in self.starts.items() if at > self.now or t in self._queued}
            self._most = max(_REMEMBERED, 2 * len(self.starts))


class FairShare:
    """The start is given when a request is queued, and stands. What ends before it runs is no longer charged."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(weights)

    def key(self, queued: Queued) -> float:
        start = self._shares.join(queued.tenant)
        self._shares.charge(queued, start)
        return start

    def took(self, queued: Queued, key: float) -> None:
        self._shares.advance(key, queued.work)
        self._shares.leave(queued.tenant)

    def left(self, queued: Queued, key: float) -> None:
        self._shares.refund(queued, key)
        self._shares.leave(queued.tenant)
