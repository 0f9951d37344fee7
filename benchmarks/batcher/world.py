"""A service in virtual time: items arrive, a rule says when which of them are called together, workers take their time.

Nothing sleeps and nothing is measured by a clock, so a run is exact and repeatable. :func:`play` is the loop; a rule is
anything with the three methods of :class:`Rule`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol


@dataclass(slots=True, eq=False)
class Item:
    """``end``: when its answer came, inf if it never did. ``deadline`` is ``arrival`` + the SLO."""

    arrival: float
    deadline: float
    cost: float = 1.0
    end: float = inf

    @property
    def latency(self) -> float:
        return self.end - self.arrival


class Choice(NamedTuple):
    """What to call now (nothing: not yet), what to give up, and when to ask again at the latest."""

    batch: Sequence[Item] = ()
    dropped: Sequence[Item] = ()
    wake_at: float = inf


class Rule(Protocol):
    """When to call the service, and with what."""

    def offer(self, item: Item, now: float) -> None: ...

    def choose(self, now: float, free: int, running: int) -> Choice:
        """Asked whenever something has happened; ``free`` workers could take a call, ``running`` calls are being made."""
        ...

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None: ...


class Device(Protocol):
    """Where calls run."""

    def start(self, batch: Sequence[Item], now: float) -> None: ...

    def next_end(self) -> float: ...

    def ended(self, now: float) -> list[tuple[Sequence[Item], float]]:
        """Calls that have ended by ``now``, with when they began."""
        ...


class OwnDevices:
    """Each call takes ``seconds(batch)``, whatever else runs."""

    def __init__(self, seconds: Callable[[Sequence[Item]], float]) -> None:
        self._seconds = seconds
        self._ends: list[tuple[float, int, Sequence[Item], float]] = []
        self._number = 0

    def start(self, batch: Sequence[Item], now: float) -> None:
        self._number += 1
        heappush(self._ends, (now + self._seconds(batch), self._number, batch, now))

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else inf

    def ended(self, now: float) -> list[tuple[Sequence[Item], float]]:
        found = []
        while self._ends and self._ends[0][0] <= now:
            _, _, batch, began = heappop(self._ends)
            found.append((batch, began))
        return found


class SharedDevice:
    """Each call prepares by itself for ``base_s``, then works for ``item_s`` an item on one device that all share equally.

    Processor sharing: k calls on the device each go at 1/k of its speed, so how long a call takes depends on what the others do
    while it runs, not only on what ran when it began.
    """

    def __init__(self, base_s: float, item_s: float) -> None:
        self._base_s, self._item_s = base_s, item_s
        self._preparing: list[tuple[float, int, Sequence[Item], float]] = []
        self._work: dict[int, list[float]] = {}
        self._calls: dict[int, tuple[Sequence[Item], float]] = {}
        self._now = 0.0
        self._number = 0

    def start(self, batch: Sequence[Item], now: float) -> None:
        self._number += 1
        heappush(self._preparing, (now + self._base_s, self._number, batch, now))

    def _advance(self, now: float) -> None:
        if self._work:
            done = (now - self._now) / len(self._work)
            for left in self._work.values():
                left[0] -= done
        self._now = now

    def next_end(self) -> float:
        ready = self._preparing[0][0] if self._preparing else inf
        if not self._work:
            return ready
        return min(ready, self._now + max(0.0, min(left[0] for left in self._work.values())) * len(self._work))

    def ended(self, now: float) -> list[tuple[Sequence[Item], float]]:
        self._advance(now)
        found = []
        for number, left in list(self._work.items()):
            if left[0] <= 1e-12:
                del self._work[number]
                found.append(self._calls.pop(number))
        while self._preparing and self._preparing[0][0] <= now:
            _, number, batch, began = heappop(self._preparing)
            self._work[number] = [self._item_s * sum(item.cost for item in batch)]
            self._calls[number] = (batch, began)
        return found


@dataclass
class Played:
    """What became of it: the items in order of arrival, and every call as (began, items, cost)."""

    items: list[Item]
    calls: list[tuple[float, int, float]]

    def between(self, start: float, stop: float) -> list[Item]:
        return [item for item in self.items if start <= item.arrival < stop]

    def attainment(self, start: float = 0.0, stop: float = inf) -> float:
        """Share of the items that arrived then and were answered in time."""
        items = self.between(start, stop)
        return sum(item.end <= item.deadline + 1e-9 for item in items) / len(items)

    def latency(self, share: float, start: float = 0.0, stop: float = inf) -> float:
        """A percentile of those answered, s; inf when nothing was."""
        answered = sorted(item.latency for item in self.between(start, stop) if item.end < inf)
        return answered[min(len(answered) - 1, int(share * len(answered)))] if answered else inf


def play(rule: Rule, items: Sequence[Item], device: Device, workers: int = 1) -> Played:
    """``items`` (in order of arrival) through ``rule`` on ``workers`` that share ``device``, until nothing is left to happen."""
    calls: list[tuple[float, int, float]] = []
    running, at, wake = 0, 0, inf
    while True:
        arrival = items[at].arrival if at < len(items) else inf
        now = min(arrival, device.next_end(), wake)
        if now == inf:
            return Played(list(items), calls)
        for batch, began in device.ended(now):
            running -= 1
            for item in batch:
                item.end = now
            rule.finished(batch, began, now)
        while at < len(items) and items[at].arrival <= now:
            rule.offer(items[at], now)
            at += 1
        while True:
            choice = rule.choose(now, workers - running, running)
            if not choice.batch:
                wake = choice.wake_at
                if wake <= now:
                    raise RuntimeError(f"{type(rule).__name__} asks to be woken at {wake}, but it is {now}")
                break
            if running >= workers:
                raise RuntimeError(f"{type(rule).__name__} calls while no worker is free")
            device.start(choice.batch, now)
            running += 1
            calls.append((now, len(choice.batch), sum(item.cost for item in choice.batch)))


def poisson(
    phases: Sequence[tuple[float, float]],
    slo_s: float,
    seed: int,
    cost: Callable[[random.Random], float] = lambda _: 1.0,
) -> list[Item]:
    """Items at Poisson times; ``phases`` are (seconds, items a second), one after the other."""
    rng = random.Random(seed)
    items, ends = [], 0.0
    for seconds, rate in phases:
        now, ends = ends, ends + seconds
        while (now := now + rng.expovariate(rate)) < ends:
            items.append(Item(now, now + slo_s, cost(rng)))
    return items
