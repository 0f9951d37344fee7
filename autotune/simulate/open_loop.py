"""Requests offered in virtual time when they are due, whatever has become of those before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from autotune.workload import Arrival, ReplayReport
from runtime.clock import VirtualClock


class _Run(Protocol):
    """Lets time pass up to ``until``; False if ``stop`` ended it before."""

    def __call__(self, until: float, *, stop: Callable[[], bool] | None) -> bool: ...


def offer_open_loop(
    arrivals: Iterable[Arrival],
    clock: VirtualClock,
    run: _Run,
    offer: Callable[[int, Arrival, float], object],
    *,
    start: float | None,
    stop: Callable[[], bool] | None,
) -> ReplayReport:
    """Call ``offer(number, arrival, due)`` at ``start`` (None: now) + its time for each, and return after the last."""
    origin = clock.now() if start is None else start
    sent, going = 0, True
    for sent, arrival in enumerate(arrivals, start=1):
        due = origin + arrival.time
        if clock.now() < due:
            going = run(due, stop=stop)
            if not going:
                sent -= 1
                break
            clock.advance_to(due)
        offer(sent - 1, arrival, due)
    return ReplayReport(sent, origin, clock.now(), 0.0, 0.0, 0.0, 0.0, not going)
