"""Batchers in virtual time, for the tests: arrivals, functions of known service time, and what every run must keep."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from autotune.simulate.virtual_pool import VirtualPool
from runtime.batching.core import BatchCore
from runtime.batching.groupings import Grouping
from runtime.batching.item import Call, Item
from runtime.batching.strategies import Strategy
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, percentile
from runtime.slo import SLO, attainment

LIMITS = KnobLimits(max_batch_size=4096, max_wait_ms=10000, token_budget=1048576, chunk_size=1048576)
SLO_400 = SLO.parse("e2e=400ms")


def knobs(size: int = 32, wait_ms: float = 10000, budget: int = 1048576) -> Knobs:
    return Knobs(max_batch_size=size, max_wait_ms=wait_ms, token_budget=budget, chunk_size=1)


def core_of(
    strategy: Strategy,
    grouping: str | Grouping = "arrival",
    *,
    slo: SLO | None = None,
    size: int = 32,
    wait_ms: float = 10000,
    budget: int = 1048576,
    **options: int,
) -> BatchCore:
    return BatchCore(strategy, grouping, slo=slo, knobs=knobs(size, wait_ms, budget), limits=LIMITS, **options)


def poisson(
    rate: float, seconds: float, seed: int, cost: Callable[[random.Random], int] = lambda _: 1, start: float = 0.0
) -> list[Item]:
    """Arrivals at ``rate`` a second."""
    rng = random.Random(seed)
    items, now = [], start
    while (now := now + rng.expovariate(rate)) < start + seconds:
        items.append(Item(None, now, cost(rng)))
    return items


def linear(call: Call) -> float:
    """20 ms and 2 ms for each item: 32 of them make 381 items a second."""
    return 0.020 + 0.002 * len(call.items)


CAPACITY = 32 / (0.020 + 0.002 * 32)


@dataclass
class Served:
    """What came of it: one record an item, in the order in which they ended, and every call."""

    records: list[RequestRecord] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def serve(
    core: BatchCore,
    arrivals: Iterable[Item],
    service: Callable[[Call], float],
    *,
    slowdown: Callable[[int], float] | None = None,
    events: Iterable[tuple[float, Callable[[float], None]]] = (),
) -> Served:
    """Serve ``arrivals`` (ascending) to the end. ``events``: (time, what to do then).

    Once nothing more can come the core is told that it is closing, so that strategies that wait for full calls come to an end.
    """
    served = Served()
    names = count()
    coming = iter(arrivals)
    following = next(coming, None)
    todo = sorted(((when, next(names), do) for when, do in events), key=lambda event: event[:2])
    heapq.heapify(todo)

    def tell(call: Call | None, records: list[RequestRecord]) -> None:
        if call is not None:
            served.calls.append(call)
        served.records += records

    pool = VirtualPool(core, service, tell, slowdown=slowdown)
    while True:
        arrival = inf if following is None else following.arrival
        event = todo[0][0] if todo else inf
        when = min(pool.due, arrival, event)
        if when == inf:
            if not core.has_work:
                return served
            if core.state.closing:
                raise RuntimeError(
                    f"the {core.strategy.name} strategy leaves {core.state.waiting} items waiting for ever"
                )
            core.state.closing = True
        else:
            pool.advance(when)
        now = pool.clock.now()
        for _, _, do in [heapq.heappop(todo) for _ in range(sum(entry[0] <= now for entry in todo))]:
            do(now)
        ask = core.hold_until <= now or bool(todo) or core.state.closing
        ask = pool.end_calls() or ask
        while following is not None and following.arrival <= now:
            item, following = following, next(coming, None)
            if item.id == "":
                item.id = next(names)
            try:
                pool.submit(item)
            except RejectedError as error:
                pool.reject(item, error)
        if following is None and not todo and not core.state.running:
            core.state.closing = True
        pool.begin_calls(ask=ask)


def share(served: Served, slo: SLO) -> float:
    """Of the items that were offered, those on time."""
    return attainment(served.records, slo).share


def latency(records: Sequence[RequestRecord], q: float) -> float:
    found = percentile([record.e2e for record in records if record.e2e is not None], q)
    assert found is not None
    return found


def run(core: BatchCore, items: list[Item], service: Callable[[Call], float] = linear, **options: object) -> Served:
    """Serve ``items``; every one of them must end exactly once, and no call may break a knob."""
    served = serve(core, items, service, **options)  # type: ignore[arg-type]
    assert len(served.records) == len(items)
    assert len({record.id for record in served.records}) == len(items)
    for call in served.calls:
        assert len(call.items) <= core.knobs.max_batch_size or core.epoch
        assert call.cost <= core.knobs.token_budget or len(call.items) == 1 or core.epoch
    assert not core.has_work
    return served
