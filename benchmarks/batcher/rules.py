"""Rules for when to call, others' and simple ones, written from their descriptions for :mod:`benchmarks.batcher.world`.

All of them make at most ``LARGEST`` items a call and take items in order of arrival. What they need to know of the service
they learn from its calls (:class:`Line`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from benchmarks.batcher.service import LARGEST
from benchmarks.batcher.world import Choice, Item


class Line:
    """seconds = base + slope · cost, by least squares over the last calls; a rule that knows less has ``default``."""

    def __init__(self, kept: int = 50, default: tuple[float, float] = (0.0, 0.0)) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=kept)
        self.base, self.slope = default

    def learn(self, cost: float, seconds: float, fit: bool = True) -> None:
        self._seen.append((cost, seconds))
        if fit:
            self.fit()

    def fit(self) -> None:
        n = len(self._seen)
        x = sum(c for c, _ in self._seen) / n
        y = sum(s for _, s in self._seen) / n
        square = sum((c - x) ** 2 for c, _ in self._seen)
        if square > 1e-9:
            self.slope = max(0.0, sum((c - x) * (s - y) for c, s in self._seen) / square)
        elif not self.slope:
            self.slope = 0.0
        self.base = max(0.0, y - self.slope * x)

    def predict(self, cost: float) -> float:
        return self.base + self.slope * cost


class _Queued:
    """Items wait in order of arrival."""

    def __init__(self) -> None:
        self._queue: deque[Item] = deque()

    def offer(self, item: Item, now: float) -> None:
        self._queue.append(item)

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        pass

    def _take(self, most: int) -> list[Item]:
        return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]


class SizeOrWait(_Queued):
    """The static rule: call once ``size`` items wait, or the oldest has waited for ``wait_s``."""

    def __init__(self, size: int, wait_s: float) -> None:
        super().__init__()
        self._size, self._wait_s = size, wait_s

    def choose(self, now: float, free: int, running: int) -> Choice:
        if not free or not self._queue:
            return Choice()
        due = self._queue[0].arrival + self._wait_s
        if len(self._queue) < self._size and due > now:
            return Choice(wake_at=due)
        return Choice(self._take(self._size))


class WhenFree(_Queued):
    """Call as soon as a worker is free, with all that waits; give up what would end too late by the learned service time."""

    def __init__(self) -> None:
        super().__init__()
        self._line = Line()

    def choose(self, now: float, free: int, running: int) -> Choice:
        dropped = []
        if not free:
            return Choice()
        while self._queue:
            cost = sum(item.cost for item, _ in zip(self._queue, range(LARGEST), strict=False))
            if self._queue[0].deadline >= now + self._line.predict(cost):
                break
            dropped.append(self._queue.popleft())
        return Choice(self._take(LARGEST), dropped)

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        self._line.learn(sum(item.cost for item in batch), now - began)


class _Limited(_Queued):
    """Call when free, at most ``limit`` items."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = 1.0

    def choose(self, now: float, free: int, running: int) -> Choice:
        return Choice(self._take(int(self._limit))) if free else Choice()


class Aimd(_Limited):
    """Call when free, at most ``limit`` items; + 1 after a call whose oldest item was in time, halved after one that was not.

    TCP's additive increase and multiplicative decrease (Chiu and Jain, Computer Networks and ISDN Systems 17, 1989) on what
    clients see, queueing included.
    """

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        late = now > batch[0].deadline
        self._limit = max(1.0, self._limit / 2) if late else min(LARGEST, self._limit + 1)


class Clipper(_Limited):
    """Clipper's rule: at most ``limit`` items; + 4 until a call itself takes longer than the SLO, then − 10%.

    Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System", NSDI 2017, section 4.3 (its step is "a fixed
    amount"; its delayed batching is off by default).
    """

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        over = now - began > batch[0].deadline - batch[0].arrival
        self._limit = max(1.0, self._limit * 0.9) if over else min(LARGEST, self._limit + 4)


class Bento(_Queued):
    """BentoML's adaptive batching, from its documentation and what version 1.4's dispatcher does.

    It learns seconds = a·n + b over the last 50 calls and the mean wait of their oldest items, refreshed every 5 s. It looks
    every millisecond: the oldest item is given up when its wait + a·n + b reaches the SLO; n items are held back while n
    times (the newest one's wait + 1 ms + a) is at most 95% of the mean wait. Its training on the first calls is left out.
    """

    TICK_S, REFRESH_S, DECAY, SKIPPED = 0.001, 5.0, 0.95, 2

    def __init__(self, slo_s: float) -> None:
        super().__init__()
        self._slo_s = slo_s
        self._line = Line(default=(slo_s / 30, slo_s * 2 / 30))
        self._waits: deque[float] = deque(maxlen=50)
        self._wait_s = 0.0
        self._calls, self._refreshed = 0, -inf

    def choose(self, now: float, free: int, running: int) -> Choice:
        dropped = []
        while (
            len(self._queue) > 1 and now - self._queue[0].arrival + self._line.predict(len(self._queue)) >= self._slo_s
        ):
            dropped.append(self._queue.popleft())
        if not self._queue:
            return Choice(dropped=dropped)
        n, newest = len(self._queue), now - self._queue[-1].arrival
        held = n < LARGEST and n * (newest + self.TICK_S + self._line.slope) <= self._wait_s * self.DECAY
        if not free or held:
            return Choice(dropped=dropped, wake_at=now + self.TICK_S)
        return Choice(self._take(LARGEST), dropped)

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        self._calls += 1
        if self._calls <= self.SKIPPED:
            return
        self._line.learn(len(batch), now - began, fit=False)
        self._waits.append(began - batch[0].arrival)
        if now - self._refreshed >= self.REFRESH_S:
            self._refreshed = now
            self._line.fit()
            self._wait_s = sum(self._waits) / len(self._waits)
