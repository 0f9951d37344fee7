"""Sends requests open-loop: each at its own time, whether or not earlier ones are done, and owns up to being late.

A closed loop, or a sender that waits, slows down with the engine it measures and hides its queue ("coordinated
omission"). Here a request that leaves late keeps its intended time: ``submit`` is told when it was due, and a latency
counted from there includes the delay. :class:`ReplayReport` says how late the sender itself was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from autotune.workload.spec import Arrival
from runtime.clock import Clock
from runtime.records import percentile

Submit = Callable[[Arrival, float], object]
"""``submit(arrival, due)``: send it now; ``due`` is when it should have been sent, on the replay's clock."""

Wait = Callable[[float], object]
"""``wait(seconds)``: come back after that long, or sooner. ``threading.Event().wait`` does, and can be set to end a replay."""

LONGEST_WAIT = 0.5  # s; how often ``stop`` is asked while nothing is due


class ReplayReport(NamedTuple):
    """What was sent, and how late. Lateness is seconds from a request's intended time to the call of ``submit``.

    ``start`` and ``end`` are on the replay's clock; ``stopped`` says that ``stop`` ended it before the last request.
    ``busy`` is the seconds spent inside ``submit``: a slow ``submit`` is what makes a sender late.
    """

    sent: int
    start: float
    end: float
    lateness_p50: float
    lateness_p99: float
    lateness_max: float
    busy: float
    stopped: bool

    def __str__(self) -> str:
        late = " / ".join(f"{1000 * s:.1f}" for s in (self.lateness_p50, self.lateness_p99, self.lateness_max))
        return f"sent {self.sent} in {self.end - self.start:.1f} s, late by {late} ms (p50 / p99 / max)"


def replay(
    arrivals: Iterable[Arrival],
    submit: Submit,
    clock: Clock,
    wait: Wait,
    *,
    start: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> ReplayReport:
    """Call ``submit(arrival, due)`` for each arrival at ``start + arrival.time`` on ``clock``; never wait for an answer.

    ``start`` is now unless given. ``wait`` may return early; ``stop`` is asked before every request and at least every
    :data:`LONGEST_WAIT` seconds. What ``submit`` raises (KeyboardInterrupt included) passes through: a request the engine
    rejects must be counted by ``submit`` itself, not raised.
    """
    origin = clock.now() if start is None else start
    lateness: list[float] = []
    busy = 0.0
    stopped = False
    for arrival in arrivals:
        due = origin + arrival.time
        while not (stopped := stop is not None and stop()) and (ahead := due - clock.now()) > 0:
            wait(min(ahead, LONGEST_WAIT))
        if stopped:
            break
        begun = clock.now()
        lateness.append(begun - due)
        submit(arrival, due)
        busy += clock.now() - begun
    return ReplayReport(
        sent=len(lateness),
        start=origin,
        end=clock.now(),
        lateness_p50=percentile(lateness, 50) or 0.0,
        lateness_p99=percentile(lateness, 99) or 0.0,
        lateness_max=max(lateness, default=0.0),
        busy=busy,
        stopped=stopped,
    )
