"""What a profiling run is asked, and what it has found so far."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.profile_parts import Capacity, Point
from autotune.profiling.points import Run, points
from autotune.profiling.setup import Setup
from autotune.profiling.space import SearchSpace
from autotune.workload import Workload
from runtime.slo import SLO


@dataclass(frozen=True)
class Question:
    """What is asked. ``slo`` and ``rate`` None: settled by the calibration. ``trials``, ``budget_s`` None: no bound."""

    workload: Workload
    slo: SLO | None
    rate: float | None
    seed: int
    trials: int | None
    budget_s: float | None
    space: SearchSpace


@dataclass
class Findings:
    """What a session has found so far. ``capacity`` None: not looked for."""

    setup: Setup | None
    runs: list[Run]
    failures: list[tuple[int, str]]
    capacity: Capacity | None
    stopped: bool
    validated: tuple[int, int]  # runs done, runs planned
    spent_s: float

    def comparable(self) -> list[Point]:
        """The points settings are chosen from: validated ones if the baseline and another are among them, else the search's."""
        validated = points(run for run in self.runs if run.stage == "validation")
        if len(validated) > 1:
            full = max(len(p.seeds) for p in validated)
            return [p for p in validated if len(p.seeds) == full]  # the same seeds each, or the comparison is luck
        return points(run for run in self.runs if run.stage == "search")
