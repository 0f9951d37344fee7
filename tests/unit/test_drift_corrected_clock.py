"""The clock that follows reference steps: what passes on it at another speed, and while it stands still."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.clocks.drift_corrected import _GRACE_S, _SMOOTH, DriftCorrectedClock, DriftCorrectingExecutor
from runtime.clock import VirtualClock
from runtime.llm.plan import StepResult


class Steps:
    """An executor whose steps take a second, and a reference step that takes what it is set to."""

    def __init__(self, base: VirtualClock, clock: DriftCorrectedClock) -> None:
        self.base, self.clock, self.reference_s = base, clock, 0.1
        self.released: list[Any] = []

    def execute(self, plan: Any, now: float, until: float) -> StepResult:
        del plan, now, until
        self.base.advance(1.0)
        return StepResult((self.clock.now(),), [])

    def release(self, sequence: Any) -> None:
        self.released.append(sequence)

    def step(self, clock: VirtualClock) -> float:
        clock.advance(self.reference_s)
        return self.reference_s


class Plan:
    empty = False


def test_a_clock_at_half_rate_and_one_that_stands_still() -> None:
    base = VirtualClock(100.0)
    clock = DriftCorrectedClock(base)
    begun = clock.now()
    base.advance(2.0)
    assert clock.now() - begun == pytest.approx(2.0)
    clock.run(0.5)
    base.advance(2.0)
    assert clock.now() - begun == pytest.approx(3.0)
    clock.run(0.0)
    base.advance(50.0)
    assert clock.now() - begun == pytest.approx(3.0)
    clock.run(1.0)
    base.advance(1.0)
    assert clock.now() - begun == pytest.approx(4.0)


def test_steps_of_a_slow_machine_take_what_they_take_on_a_fast_one_and_reference_steps_take_no_time() -> None:
    base = VirtualClock()
    clock = DriftCorrectedClock(base)
    steps = Steps(base, clock)
    corrected = DriftCorrectingExecutor(steps, steps, clock, usual=0.1)  # type: ignore[arg-type]  # plays both parts
    corrected.look()
    assert clock.now() == 0.0
    before = clock.now()
    corrected.execute(Plan(), 0.0, 1.0)  # type: ignore[arg-type]
    assert clock.now() - before == pytest.approx(1.0)
    steps.reference_s = 0.2
    for _ in range(_SMOOTH):
        corrected.look()
    before = clock.now()
    corrected.execute(Plan(), 0.0, 1.0)  # type: ignore[arg-type]
    assert clock.now() - before == pytest.approx(0.5)
    assert corrected.slowdowns[0] == pytest.approx(1.0) and corrected.slowdowns[-1] == pytest.approx(2.0)
    corrected.release("x")  # type: ignore[arg-type]
    assert steps.released == ["x"]


def test_a_patient_one_waits_for_two_usual_reference_steps_and_no_longer_than_it_does_not_wait() -> None:
    base = VirtualClock()
    clock = DriftCorrectedClock(base)
    steps = Steps(base, clock)
    times = iter([0.1, 0.3, 0.1, 0.3, 0.1, 0.1, 0.1])
    steps.step = lambda clock: (clock.advance(took := next(times)), took)[1]  # type: ignore[method-assign]
    corrected = DriftCorrectingExecutor(steps, steps, clock, usual=0.1, patient=True)  # type: ignore[arg-type]  # plays both parts
    corrected.look()
    assert corrected.waited == 0.0
    before = clock.now()
    corrected.look()
    assert next(times) == 0.1  # one is left
    assert corrected.waited == pytest.approx(0.1 + 0.3 + 0.1 + 0.1) and clock.now() == before

    steps.step = lambda clock: (clock.advance(0.2), 0.2)[1]  # type: ignore[method-assign]
    base.advance(10.0)
    before, since = clock.now(), base.now()
    corrected.look()
    # the grace and what passed otherwise, less what was waited before
    assert base.now() - since == pytest.approx(_GRACE_S + 10.0, abs=1.5)
    assert clock.now() == before and corrected.slowdowns[-1] == pytest.approx(2.0)
    since = base.now()
    corrected.look()
    assert base.now() - since == pytest.approx(0.2)


def test_one_that_is_not_patient_does_not_wait() -> None:
    base = VirtualClock()
    clock = DriftCorrectedClock(base)
    steps = Steps(base, clock)
    steps.reference_s = 0.4
    corrected = DriftCorrectingExecutor(steps, steps, clock, usual=0.1)  # type: ignore[arg-type]  # plays both parts
    corrected.look()
    assert base.now() == pytest.approx(0.4) and corrected.waited == 0.0
