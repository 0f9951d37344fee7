"""How long things may take. A budget is time, not trials: a busy machine gets fewer trials and still ends on time."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.clock import Clock

CALIBRATION, SEARCH, VALIDATION = 0.2, 0.46, 0.22  # of the budget; the rest is for the capacity and for slack
_RUNS = 23  # measurements the windows are sized for
_SHORTEST_RUN, _LONGEST_RUN = 2.0, 40.0
_UNBOUNDED_RUN = 6.0  # s a measurement when trials are counted instead
SATURATE_S = 4.0


@dataclass(frozen=True)
class Schedule:
    """Seconds of each part; ``search_end`` and the like are shares of what the whole study may spend (None: no bound)."""

    budget_s: float | None
    window_s: float
    warmup_s: float
    saturate_s: float

    @classmethod
    def of(cls, budget_s: float | None) -> Schedule:
        """Windows from the budget: a measurement is warm-up, window and about as much drain as warm-up."""
        run = _UNBOUNDED_RUN
        if budget_s is not None:
            run = min(_LONGEST_RUN, max(_SHORTEST_RUN, budget_s * 0.95 / _RUNS))
        saturate = SATURATE_S if budget_s is None else min(20.0, max(1.0, budget_s * CALIBRATION / 8))
        return cls(budget_s, window_s=round(run * 0.7, 2), warmup_s=round(run * 0.15, 2), saturate_s=round(saturate, 2))

    def until(self, share: float) -> float | None:
        """Seconds after which a stage ending at ``share`` of the budget is over."""
        return None if self.budget_s is None else self.budget_s * share


class Meter:
    """Time spent on a study, over all the sessions that worked on it, and how long a measurement takes."""

    def __init__(self, clock: Clock, spent_before: float) -> None:
        self._clock = clock
        self._begun = clock.now()
        self._before = spent_before
        self._runs: list[float] = []

    @property
    def spent(self) -> float:
        return self._before + self._clock.now() - self._begun

    def took(self, seconds: float) -> None:
        self._runs.append(seconds)

    def typical(self, guess: float) -> float:
        """Mean seconds of the last measurements."""
        recent = self._runs[-6:]
        return sum(recent) / len(recent) if recent else guess

    def fits(self, end: float | None, guess: float) -> bool:
        """Whether one more measurement ends before ``end`` (half of it may stick out)."""
        return end is None or self.spent + self.typical(guess) / 2 < end
