"""Fair share: tenants that want more than they get share by work. Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

What a tenant queues starts, in virtual time, where the tenant's previous work ends, and lasts work / weight; the smallest start
goes first. A tenant that has nothing queued starts at the present virtual time: what it did not use is not saved up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from runtime.ordering.protocol import Queued

_REMEMBERED = 1024  # tenants with nothing queued, before those that owe nothing are forgotten


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

    def join(self, tenant: str) -> float:
        """Where the work of ``tenant`` starts that had none; it saved up nothing."""
        start = self.starts[tenant] = max(self.now, self.starts.get(tenant, 0.0))
        return start

    def lasts(self, queued: Queued) -> float:
        return queued.work / self._weights.get(queued.tenant, 1.0)

    def charge(self, queued: Queued, start: float) -> float:
        """What the tenant of ``queued``, which starts at ``start``, queues next starts when that ends. Returns how long."""
        lasts = self.lasts(queued)
        self.starts[queued.tenant] = start + lasts
        return lasts

    def advance(self, start: float, busy: Collection[str] = ()) -> None:
        """What starts at ``start`` goes. Tenants that owe nothing, and are not ``busy``, need not be remembered."""
        self.now = max(self.now, start)
        if len(self.starts) > _REMEMBERED + len(busy):
            self.starts = {t: at for t, at in self.starts.items() if at > self.now or t in busy}


class FairShare:
    """The start is given when a request is queued, and stands: one that ends while it waits has still been charged."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(weights)

    def key(self, queued: Queued) -> float:
        start = self._shares.join(queued.tenant)
        self._shares.charge(queued, start)
        return start

    def took(self, queued: Queued, key: float) -> None:
        self._shares.advance(key)
