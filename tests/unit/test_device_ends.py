"""When steps ended on a device, though the host looks late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.clock import VirtualClock
from runtime.torch_backend.transfer import DeviceEnds


class Marked:
    """A mark that the device passes at ``at`` of the clock; waiting moves the clock there. ``rate``: of the device's clock."""

    def __init__(self, clock: VirtualClock, at: float, rate: float = 1.0) -> None:
        self.clock, self.at, self.rate = clock, at, rate

    def synchronize(self) -> None:
        if self.clock.now() < self.at:
            self.clock.advance_to(self.at)

    def passed(self) -> bool:
        return self.clock.now() >= self.at

    def seconds_since(self, earlier: Marked) -> float:
        return (self.at - earlier.at) * self.rate


class Values:
    def __init__(self, mark: Marked | None) -> None:
        self.mark = mark

    def wait(self) -> list[torch.Tensor]:
        if self.mark is not None:
            self.mark.synchronize()
        return []


def read(ends: DeviceEnds, mark: Marked | None) -> float:
    values: Any = Values(mark)
    return ends.read(values)[1]


def test_a_step_that_was_waited_for_ends_when_the_wait_does() -> None:
    clock = VirtualClock()
    ends = DeviceEnds(clock)
    assert read(ends, Marked(clock, 1.0)) == 1.0
    assert read(ends, Marked(clock, 1.5)) == 1.5


def test_a_step_that_had_ended_ended_when_the_device_says() -> None:
    clock = VirtualClock()
    ends = DeviceEnds(clock)
    assert read(ends, Marked(clock, 1.0)) == 1.0
    clock.advance_to(1.011)  # the host launches the next step
    assert read(ends, Marked(clock, 1.005)) == pytest.approx(1.005)
    clock.advance_to(1.1)
    assert read(ends, Marked(clock, 1.02)) == pytest.approx(1.02)  # by the one before, which was not waited for either
    assert read(ends, Marked(clock, 1.2)) == pytest.approx(1.2)


def test_no_step_ends_after_the_host_has_seen_its_end() -> None:
    clock = VirtualClock()
    ends = DeviceEnds(clock)
    read(ends, Marked(clock, 1.0))
    clock.advance_to(1.3)
    fast = Marked(clock, 1.2, rate=4.5)
    assert read(ends, fast) == 1.3


def test_clocks_that_drift_apart_do_not_add_up() -> None:
    """An hour of steps that the host always looks at late, on a device whose clock is 50 millionths slow."""
    clock = VirtualClock()
    ends = DeviceEnds(clock)
    read(ends, Marked(clock, 1.0))
    worst, true = 0.0, 1.0
    for _ in range(4000):
        true += 0.9
        clock.advance_to(true + 0.011)
        mark = Marked(clock, true, rate=1 - 5e-5)
        worst = max(worst, abs(read(ends, mark) - true))
    assert worst < 0.012  # no more than the host's own lateness


def test_behind_a_step_whose_end_is_not_known_the_host_is_believed() -> None:
    clock = VirtualClock()
    ends = DeviceEnds(clock)
    read(ends, Marked(clock, 1.0))
    ends.forget()
    clock.advance_to(1.3)
    assert read(ends, Marked(clock, 1.2)) == 1.3
    assert read(ends, None) == 1.3  # a CPU has no marks
