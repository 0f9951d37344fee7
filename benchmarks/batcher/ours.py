"""Our Batcher's core as a rule of :mod:`benchmarks.batcher.world`: the class that the live Batcher drives, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf

from benchmarks.batcher.service import LARGEST
from benchmarks.batcher.world import Choice, Item
from runtime import SLO, KnobLimits, Knobs, RejectedError
from runtime.batching.core import BatchCore
from runtime.batching.item import Call
from runtime.batching.item import Item as Queued
from runtime.batching.strategies import Adaptive

_LIMITS = KnobLimits(max_batch_size=LARGEST, max_wait_ms=10_000, token_budget=1 << 20)


class Ours:
    """Given the SLO, the largest call, how many workers there are, and what a call costs; all else is learned.

    ``price_s``: what a call costs, in seconds that one item waits; inf: hold as long as the SLO allows.
    """

    def __init__(self, slo_s: float, workers: int = 1, price_s: float = 0.0) -> None:
        self._core = BatchCore(
            Adaptive(call_price_s=price_s),
            "arrival",
            slo=SLO(e2e_ms=slo_s * 1e3),
            knobs=Knobs(max_batch_size=LARGEST, max_wait_ms=10_000, token_budget=1 << 20),
            limits=_LIMITS,
            workers=workers,
        )
        self._calls: dict[int, Call] = {}

    def offer(self, item: Item, now: float) -> None:
        with suppress(RejectedError):  # it stays without an answer
            self._core.submit(Queued(item, item.arrival, cost=round(item.cost)), now)

    def choose(self, now: float, free: int, running: int) -> Choice:
        dropped = []
        while True:
            found = self._core.next(now)
            dropped += [ended.item.payload for ended in found.ended]
            if found.call is not None or not found.ended or found.wake_at > now:
                break
        if found.call is None:
            return Choice((), dropped, found.wake_at if self._core.state.waiting else inf)
        batch = [item.payload for item in found.call.items]
        self._calls[id(batch[0])] = found.call
        return Choice(batch, dropped)

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        self._core.done(self._calls.pop(id(batch[0])), now)
