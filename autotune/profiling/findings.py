"""What a profiling run is to find out, and what it has found so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

from autotune.profile import Purpose
from autotune.profile.parts import Capacity, Confidence, ObjectiveName, Point, Setting, StepPoint
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, Stage, by_setting, likely_better
from autotune.workload import Workload
from runtime.slo import SLO, RequestClass

SIM_TRIALS = 240


@dataclass(frozen=True)
class Question(Generic[SpaceT]):
    """What is asked.

    ``slo`` and ``rate`` None: found by the calibration and the simulation. ``space``: where settings are looked for.
    ``sim_trials``: settings to simulate, by ``workers`` processes.
    ``trials``: settings to measure on the hardware; ``budget_s``: time for everything. None: no bound. ``classes``: those with an
    SLO of their own. ``objective``: what settings are compared by.
    """

    workload: Workload
    slo: SLO | None
    rate: float | None
    seed: int
    trials: int | None
    budget_s: float | None
    space: SpaceT
    sim_trials: int = SIM_TRIALS
    workers: int = 1
    classes: tuple[RequestClass, ...] = ()
    objective: ObjectiveName = "goodput"


@dataclass
class Findings(Generic[SettingT, SetupT, CostT, SpaceT]):
    """What a session has found so far.

    ``setup``, ``steps``, ``cost``: the calibration (a callable has no ``steps``); ``simulated``: the trials of the simulated
    stage, in order; ``measured``: what was measured on the hardware, by its key in the study; ``failures``: (number, cause) of
    simulated trials; ``unmeasured``: what failed on the hardware, and why.

    ``candidates``: the simulation of the settings worth measuring, at the rate of the comparison; ``expected``: attainment that
    each validated setting is expected to have, measurement and simulation taken together. Of an LLM engine alone: ``paired``: the
    simulation of what was measured; ``capacity`` None: not looked for.

    ``hardware_s``: seconds the hardware was held, by its own clock, calibration included; ``simulating_s``, ``cpu_s``: of the
    host while simulating, by the wall and of CPU.
    """

    space: SpaceT
    setup: SetupT | None = None
    steps: list[StepPoint] = field(default_factory=list)
    cost: CostT | None = None
    simulated: list[Run] = field(default_factory=list)
    measured: dict[str, Run] = field(default_factory=dict)
    paired: list[Run] = field(default_factory=list)
    candidates: list[Point] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    unmeasured: list[tuple[Stage, SettingT, str]] = field(default_factory=list)
    expected: Mapping[SettingT, float] = field(default_factory=dict)
    noise: float = 0.0  # of a measured share; less tells nothing
    baseline: SettingT | None = None
    confidence: Confidence | None = None
    capacity: Capacity | None = None
    stopped: bool = False
    fault: str = ""  # that stopped it
    validated: tuple[int, int] = (0, 0)  # runs done, runs planned
    hardware_s: float = 0.0
    simulating_s: float = 0.0
    cpu_s: float = 0.0
    others: list[tuple[float, float]] = field(default_factory=list)  # s of measuring, cores that other programs used

    @property
    def runs(self) -> list[Run]:
        """What was measured on the hardware, each measurement once, in the order this session came to know of it."""
        return list(self.measured.values())

    @property
    def spent_s(self) -> float:
        return self.hardware_s + self.simulating_s

    def comparable(self) -> list[Point]:
        """The points settings are chosen from, all at the rate of the comparison: validated ones, else the simulated."""
        return list(self._compared().values())

    def _compared(self) -> dict[SettingT, Point]:
        validated = {} if self.setup is None else by_setting(self.validated_at(self.setup.rate))
        return validated or by_setting(self.simulated)

    def validated_at(self, rate: float) -> list[Run]:
        """What was measured to compare settings at ``rate``."""
        return [run for run in self.runs if run.stage == "validation" and run.score.rate == rate]

    def settings(self: Findings) -> dict[Purpose, Setting]:
        """What to recommend; empty while there is nothing to choose from."""
        found = self._eligible()
        if self.setup is None or not found:
            return {}
        return Objective.under(self.setup).choose(
            list(found.values()), self.expected, noise=self.noise, baseline=self.baseline, better=self.likely_better
        )

    def choice(self) -> tuple[SettingT, str]:
        """The setting to recommend, and why; something must have been simulated."""
        assert self.setup is not None
        return Objective.under(self.setup).balanced(
            self._eligible(), self.expected, noise=self.noise, baseline=self.baseline, better=self.likely_better
        )

    def _eligible(self) -> dict[SettingT, Point]:
        found = self._compared()
        found = {s: p for s, p in found.items() if s in self.expected} or found  # one run shows not what is expected
        return {s: p for s, p in found.items() if self.space.allows(s)} or found

    def likely_better(self, mine: SettingT, base: SettingT) -> bool:
        """Whether ``mine`` measured enough more goodput than ``base``, at the rate of the comparison, to be chosen."""
        assert self.setup is not None
        if self.setup.objective != "goodput":
            return False
        runs = self.validated_at(self.setup.rate)
        here, there = ([run for run in runs if run.setting == setting] for setting in (mine, base))
        return bool(here and there) and likely_better(here, there, self.noise)

    def measured_worse(self, setting: SettingT, chosen: SettingT) -> bool:
        """Whether measurements rule ``setting`` out, whatever is expected of it: ``chosen`` measured clearly more goodput; or
        more than noise is expected of ``setting``, and the baseline measured no less and clearly lower p99s."""
        assert self.setup is not None
        points = self._compared()
        base = None if self.baseline is None else points.get(self.baseline)
        more = self.expected.get(setting, 0.0) > self.expected.get(chosen, 0.0) + self.noise
        dominated = base is not None and more and Objective.under(self.setup).dominated(points[setting], base)
        return dominated or self.likely_better(chosen, setting)
