"""First come, first served. Priority is not looked at."""

from __future__ import annotations

from runtime.ordering.protocol import Queued


class Fcfs:
    """See the module."""

    def key(self, queued: Queued) -> float:
        return queued.arrival

    def took(self, queued: Queued, key: float) -> None:
        pass
