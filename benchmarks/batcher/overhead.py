"""What the batcher itself costs: CPU time of an item from ``submit`` to its result, the function doing nothing.

1. CPU µs an item, in batches of at most 32, of the whole process: submitting, queueing, deciding, calling, handing the
   result back, and reading it. With threads that submit and wait for futures, with ``map``, from an event loop, and with
   everything switched on (SLO, cost function, a listener that hears every record).
2. Memory over a long run: items go through one batcher, and the resident size is looked at along the way.
3. The same of the rules alone, in virtual time: what a decision costs, without threads.

Run ``python -m benchmarks.batcher.overhead``; the last line is JSON. ``cpu_us_per_item`` is the median of the first kind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import psutil

from benchmarks.command import at_least, command, exit_code
from runtime import Batcher, RequestRecord, StepRecord
from runtime.batching.core import BatchCore
from runtime.batching.item import Item
from runtime.batching.strategies import Adaptive
from runtime.errors import RejectedError
from runtime.knobs import Knobs
from runtime.slo import SLO

BATCH = 32


class Hears:
    """A listener that does nothing: from then on records are made."""

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        pass


def nothing(items: list[Any]) -> list[Any]:
    return items


def by_futures(batcher: Batcher, count: int) -> None:
    """At most 4,096 items on the way; each result is taken in turn."""
    running: deque[Any] = deque()
    for i in range(count):
        running.append(batcher.submit(i))
        if len(running) >= 4096:
            running.popleft().result()
    for future in running:
        future.result()


def by_map(batcher: Batcher, count: int, ordered: bool = True) -> None:
    found = sum(1 for _ in batcher.map(range(count), ordered=ordered))
    assert found == count, f"{found} results of {count} items"


def by_unordered_map(batcher: Batcher, count: int) -> None:
    by_map(batcher, count, ordered=False)


def by_event_loop(batcher: Batcher, count: int) -> None:
    """512 tasks, each awaiting one item after the other."""

    async def client(number: int) -> None:
        for i in range(number, count, 512):
            await batcher(i)

    async def clients() -> None:
        await asyncio.gather(*[client(n) for n in range(512)])

    asyncio.run(clients())


def everything(batcher: Batcher, count: int) -> None:
    forget = batcher.subscribe(Hears())  # the next call has its own
    by_futures(batcher, count)
    forget()


WAYS: dict[str, tuple[Callable[[Batcher, int], None], dict[str, Any]]] = {
    "futures": (by_futures, {}),
    "map": (by_map, {}),
    "map, unordered": (by_unordered_map, {}),
    "await": (by_event_loop, {}),
    "slo, cost, records": (everything, {"slo": "e2e=10s", "cost": lambda item: 1}),
}


def cpu_us(way: str, count: int) -> tuple[float, float]:
    """CPU µs an item, and items a call."""
    drive, options = WAYS[way]
    calls = 0

    def counted(items: list[Any]) -> list[Any]:
        nonlocal calls
        calls += 1
        return items

    with Batcher(counted, max_batch_size=BATCH, **options) as batcher:
        drive(batcher, 2000)
        gc.collect()
        calls, started = 0, time.process_time()
        drive(batcher, count)
        spent = time.process_time() - started
    return spent / count * 1e6, count / max(1, calls)


def memory(count: int, looks: int = 5) -> list[tuple[int, float]]:
    """(items so far, resident MiB) over a run of ``count`` items through one batcher."""
    process = psutil.Process()
    found = []
    with Batcher(nothing, max_batch_size=BATCH) as batcher:
        by_futures(batcher, 20_000)
        for look in range(looks):
            gc.collect()
            found.append((look * count // (looks - 1), process.memory_info().rss / 2**20))
            if look < looks - 1:
                by_futures(batcher, count // (looks - 1))
    return found


def rules_us(count: int, load: float) -> float:
    """CPU µs an item of core and strategy in virtual time: 20 ms and 2 ms an item, SLO 400 ms."""
    from autotune.simulate.virtual_pool import VirtualPool  # what it loads is no memory of the batcher's

    rate = load * BATCH / (0.020 + 0.002 * BATCH)
    core = BatchCore(Adaptive(), slo=SLO(e2e_ms=400), knobs=Knobs(max_batch_size=BATCH, max_wait_ms=10000))
    items = [Item(None, i / rate) for i in range(count)]
    pool = VirtualPool(core, lambda call: 0.020 + 0.002 * len(call.items), lambda call, records: None)
    started = time.process_time()
    for item in (*items, None):
        arrival = inf if item is None else item.arrival
        while (due := pool.due) < arrival:
            pool.advance(due)
            pool.end_calls()
            pool.begin_calls(ask=True)
        if item is not None:
            pool.advance(arrival)
            ended = pool.end_calls()
            with suppress(RejectedError):
                pool.submit(item)
            pool.begin_calls(ask=ended)
    return (time.process_time() - started) / count * 1e6


@exit_code()
def main() -> None:
    parser = command("batcher.overhead", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--items", type=at_least(1), default=50_000, help="items in each round")
    parser.add_argument(
        "--long", type=at_least(1), default=1_000_000, help="items of the run in which memory is looked at"
    )
    args = parser.parse_args()

    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            rows[way].append(cpu_us(way, args.items))
    print(f"CPU µs an item, batches of at most {BATCH}, {args.rounds} rounds of {args.items} items")
    print(f"{'way':>20} {'median':>8} {'least':>8} {'most':>8} {'items a call':>13}")
    for way, found in rows.items():
        costs = [cost for cost, _ in found]
        sizes = statistics.median(size for _, size in found)
        print(f"{way:>20} {statistics.median(costs):8.2f} {min(costs):8.2f} {max(costs):8.2f} {sizes:13.1f}")
    seen = memory(args.long)  # before the rules, for what those load
    print("\nthe rules alone, in virtual time, at a load of capacity")
    for load in (0.3, 0.9, 1.3):
        print(f"{load:>20} {rules_us(20_000, load):8.2f}")
    print("\nresident memory")
    for items, size in seen:
        print(f"{items:>20} {size:8.1f} MiB")
    found_json = {
        "cpu_us_per_item": round(statistics.median(cost for cost, _ in rows["futures"]), 2),
        "map_us_per_item": round(statistics.median(cost for cost, _ in rows["map"]), 2),
        "unordered_us_per_item": round(statistics.median(cost for cost, _ in rows["map, unordered"]), 2),
        "await_us_per_item": round(statistics.median(cost for cost, _ in rows["await"]), 2),
        "everything_us_per_item": round(statistics.median(cost for cost, _ in rows["slo, cost, records"]), 2),
        "items": args.long,
        "memory_growth_mib": round(seen[-1][1] - seen[1][1], 1),
    }
    print(json.dumps(found_json))


if __name__ == "__main__":
    sys.exit(main())
