"""The open-loop sender, on a clock that stands still until someone waits: exact times, no sleeping."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.workload import Arrival, parse_workload, replay
from runtime.clock import MonotonicClock, VirtualClock


def at(*times: float) -> list[Arrival]:
    return [Arrival(t, 1, 1, ((i, 1),)) for i, t in enumerate(times)]


class World:
    """A virtual clock; ``submit`` takes ``cost`` seconds of it."""

    def __init__(self, cost: float = 0.0, start: float = 100.0) -> None:
        self.clock = VirtualClock(start)
        self.cost = cost
        self.sent: list[tuple[float, float]] = []  # (called at, due)
        self.waits: list[float] = []

    def submit(self, arrival: Arrival, due: float) -> None:
        self.sent.append((self.clock.now(), due))
        self.clock.advance(self.cost)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.advance(seconds)


def test_every_request_leaves_on_time() -> None:
    world = World()
    report = replay(at(0, 0.25, 0.25, 3), world.submit, world.clock, world.wait)
    assert world.sent == [(t, t) for t in (100, 100.25, 100.25, 103)]
    assert (report.sent, report.start, report.end, report.stopped) == (4, 100, 103, False)
    assert report.lateness_max == report.busy == 0
    assert all(seconds <= 0.5 for seconds in world.waits)


def test_a_slow_submit_makes_it_late_and_it_says_so() -> None:
    """Three requests due at 0, 1, 2 s; each submit takes 1.5 s. Due times stay what was intended."""
    world = World(cost=1.5)
    report = replay(at(0, 1, 2), world.submit, world.clock, world.wait)
    assert world.sent == [(100, 100), (101.5, 101), (103, 102)]
    assert (report.lateness_p50, report.lateness_p99, report.lateness_max) == (0.5, 1.0, 1.0)
    assert report.busy == pytest.approx(4.5)
    assert str(report) == "sent 3 in 4.5 s, late by 500.0 / 1000.0 / 1000.0 ms (p50 / p99 / max)"


def test_a_start_in_the_past_is_lateness_and_in_the_future_a_wait() -> None:
    world = World()
    assert replay(at(0), world.submit, world.clock, world.wait, start=98.0).lateness_max == 2.0
    replay(at(0), world.submit, world.clock, world.wait, start=150.0)
    assert world.sent[-1] == (150, 150)


def test_stop_ends_it_between_requests() -> None:
    world = World()
    report = replay(at(0, 1, 2, 3), world.submit, world.clock, world.wait, stop=lambda: world.clock.now() >= 101.2)
    assert (report.sent, report.stopped) == (2, True)
    assert report.end < 102


def test_a_wait_that_comes_back_early_changes_nothing() -> None:
    world = World()
    early = World.wait
    replay(at(0.3, 0.9), world.submit, world.clock, lambda seconds: early(world, min(seconds, 0.07)))
    assert world.sent == [(pytest.approx(100.3), 100.3), (pytest.approx(100.9), 100.9)]


def test_nothing_to_send() -> None:
    world = World()
    report = replay([], world.submit, world.clock, world.wait)
    assert (report.sent, report.lateness_max) == (0, 0)


def test_what_submit_raises_passes_through() -> None:
    world = World()

    def submit(arrival: Arrival, due: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(at(0), submit, world.clock, world.wait)


@given(st.lists(st.floats(0, 20), max_size=30).map(sorted), st.floats(0, 2))
def test_lateness_is_what_was_seen(times: list[float], cost: float) -> None:
    world = World(cost=cost)
    report = replay(at(*times), world.submit, world.clock, world.wait)
    assert [due - 100 for _, due in world.sent] == pytest.approx(times)
    late = [called - due for called, due in world.sent]
    assert min(late, default=0) >= 0
    assert report.lateness_max == max(late, default=0)


def test_on_the_real_clock_an_event_both_waits_and_stops() -> None:
    done = threading.Event()
    sent: list[Arrival] = []

    def submit(arrival: Arrival, due: float) -> None:
        sent.append(arrival)
        if len(sent) == 5:
            done.set()

    began = time.monotonic()
    endless = parse_workload("fixed:rate=200").arrivals(0, duration=600)
    report = replay(endless, submit, MonotonicClock(), done.wait, stop=done.is_set)
    assert report.stopped and report.sent == 5
    assert time.monotonic() - began >= 0.025 and report.lateness_p50 >= 0
