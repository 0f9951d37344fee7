"""How long things may take. A budget is time, not trials: a busy machine gets fewer measurements and still ends on time.

Time of the hardware and time of simulating are kept apart. On a live engine both are seconds of the same clock, one after
the other; on a simulated one the hardware's time is virtual, and what the host takes to simulate is none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runtime.clock import Clock

CALIBRATION, SIMULATION, VALIDATION, CAPACITY = 0.2, 0.2, 0.38, 0.14
"""Shares of the budget, one stage after the other; the rest is for what is simulated at the end, and slack."""

RATE, TRIALS, RATE_AGAIN, CANDIDATES = 0.03, 0.12, 0.02, 0.03
"""Shares of the parts of simulating. Both of the latter come again whenever the hardware's speed is found to be another."""

TRIALS_AGAIN = 0.05
"""Of the trials made anew when measurements have changed the cost model; out of the time to validate."""

SIMULATED_CAPACITY, PAIRED = 0.04, 0.05
"""Shares of what is simulated before the capacity is measured, and at the end."""

_RUNS = 8  # validating measurements the windows are sized for
_SHORTEST_RUN, _LONGEST_RUN = 2.0, 40.0
_WINDOW, _WARM_UP = 0.7, 0.15  # of a measurement
LONGEST_WINDOW_S = round(_LONGEST_RUN * _WINDOW, 2)
_UNBOUNDED_RUN = 6.0  # s a measurement when settings are counted instead
_LONGEST_CALIBRATION = 90.0  # s; more rounds teach nothing new
_LONGEST_TRIALS = 180.0  # s; hundreds of trials are done by then on any machine
CALIBRATE_S = 20.0


@dataclass(frozen=True)
class Schedule:
    """Seconds of each part. ``budget_s`` None: no bound on everything; ``simulate_s``: when the trials end, None: no bound.
    ``validation``: the share of the budget that validating has."""

    budget_s: float | None
    window_s: float
    warmup_s: float
    calibrate_s: float
    simulate_s: float | None = None
    validation: float = VALIDATION

    @classmethod
    def of(cls, budget_s: float | None, *, capacity: bool = True) -> Schedule:
        """Windows from the budget: a measurement is warm-up, window and about as much drain as warm-up. Where the SLO gives no
        deadline and answers are long, a drain is longer, and there are fewer measurements.

        ``capacity``: whether it is looked for; else its time is for validating too.
        """
        run, calibrate, simulate = _UNBOUNDED_RUN, CALIBRATE_S, None
        validation = VALIDATION if capacity else VALIDATION + CAPACITY
        if budget_s is not None:
            run = min(_LONGEST_RUN, max(_SHORTEST_RUN, budget_s * validation / _RUNS))
            calibrate = min(_LONGEST_CALIBRATION, budget_s * CALIBRATION * 0.8)  # a slow machine takes longer
            simulate = min(_LONGEST_TRIALS, budget_s * (RATE + TRIALS))
        return cls(
            budget_s,
            window_s=round(run * _WINDOW, 2),
            warmup_s=round(run * _WARM_UP, 2),
            calibrate_s=round(calibrate, 2),
            simulate_s=simulate,
            validation=validation,
        )

    def until(self, *shares: float) -> float | None:
        """Seconds spent, on the hardware and on simulating, after which stages of these ``shares`` of the budget are over."""
        return None if self.budget_s is None else self.budget_s * sum(shares)


class Meter:
    """Time spent on a study, over all the sessions that worked on it, and how long a measurement takes.

    ``hardware_s``: seconds during which the hardware was held, by its own clock; ``simulating_s``: of the host's. What it is made
    with, other sessions have spent.
    """

    def __init__(self, clock: Clock, host: Clock, hardware_s: float = 0.0, simulating_s: float = 0.0) -> None:
        self._clock, self._host = clock, host
        self.others(hardware_s, simulating_s)
        self._hardware = self._simulating = 0.0
        self._since: float | None = None
        self._simulating_since: float | None = None
        self._runs: list[float] = []

    def others(self, hardware_s: float, simulating_s: float) -> None:
        """What other sessions have spent by now."""
        self._others = hardware_s, simulating_s

    @property
    def own(self) -> dict[str, float]:
        """What this session has spent."""
        hardware = 0.0 if self._since is None else self._clock.now() - self._since
        simulating = 0.0 if self._simulating_since is None else self._host.now() - self._simulating_since
        return {"hardware_s": self._hardware + hardware, "simulating_s": self._simulating + simulating}

    @contextmanager
    def hardware(self) -> Iterator[None]:
        """Count what passes inside as time of the hardware."""
        self._since = self._clock.now()
        try:
            yield
        finally:
            self._hardware += self._clock.now() - self._since
            self._since = None

    @contextmanager
    def simulating(self) -> Iterator[None]:
        """Count what passes inside as time of simulating."""
        self._simulating_since = self._host.now()
        try:
            yield
        finally:
            self._simulating += self._host.now() - self._simulating_since
            self._simulating_since = None

    @property
    def hardware_s(self) -> float:
        return self._others[0] + self.own["hardware_s"]

    @property
    def simulating_s(self) -> float:
        return self._others[1] + self.own["simulating_s"]

    @property
    def spent_s(self) -> float:
        return self.hardware_s + self.simulating_s

    def late(self, end: float | None) -> bool:
        """Whether ``end`` seconds have been spent. None: never."""
        return end is not None and self.spent_s >= end

    def took(self, seconds: float) -> None:
        """A measurement, with what was simulated for it, took that long."""
        self._runs.append(seconds)

    def typical(self, guess: float) -> float:
        """Mean seconds of the last measurements."""
        recent = self._runs[-6:]
        return sum(recent) / len(recent) if recent else guess

    def fits(self, end: float | None, guess: float, runs: int = 1) -> bool:
        """Whether ``runs`` more measurements end before ``end`` seconds are spent (half of the last may stick out)."""
        return end is None or self.spent_s + (runs - 0.5) * self.typical(guess) < end
