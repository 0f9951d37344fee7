"""A machine to profile in virtual time: additive step times, which rise in steps, where the fitted model is smooth."""

from __future__ import annotations

import errno
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.measure.evaluate import Interrupted
from autotune.measure.score import Score
from autotune.profile import ModelFacts
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import Run
from autotune.profiling.refit import cost_name
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.setup import Setup
from autotune.profiling.space import make_space
from autotune.profiling.stages.context import Context, MeasurementRequest
from autotune.profiling.study import open_study
from autotune.profiling.timing import Schedule
from autotune.simulate import SimulatedEngine
from autotune.simulate.scenario import Scenario
from autotune.workload import parse_workload
from runtime.clock import Clock, VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.step_model import StepFeatures

TARGETS = SLO(ttft_ms=300, tpot_ms=18)
LIMITS = KnobLimits(max_batch_size=256, max_wait_ms=50, token_budget=4096, chunk_size=4096)
WORKLOAD = "azure-conv:length=1/8"
FACTS = ModelFacts(
    name="fake", architecture="none", parameters=1, dtype="float32", random_weights=True, seed=0, max_model_len=4096,
    vocab_size=256, kv_bytes_per_token=1,
)  # fmt: skip
SCHEDULE = Schedule(None, window_s=3.0, warmup_s=0.5, calibrate_s=3.0, simulate_s=0.1)  # loads of FEWEST requests
LONG = replace(SCHEDULE, calibrate_s=6.0, simulate_s=2.0)  # 833 requests at 24 trials
FEWEST = 100
"""Requests of a simulated load. Too few to find the best setting by, enough for all that happens on the way."""


@dataclass(frozen=True)
class Padded:
    """Everything adds up; decodes are padded to a multiple of 8 and prompt tokens to one of 32."""

    base: float = 4e-3
    slow: float = 1.0

    def predict(self, step: StepFeatures) -> float:
        decodes = -(-step.decodes // 8) * 8
        tokens = -(-step.prefill_tokens // 32) * 32
        reads = step.decode_context + step.prefill_context
        return self.slow * (self.base + 8e-5 * decodes + 9e-5 * tokens + 1.5e-7 * reads + 1e-8 * step.prefill_attention)


class KeepingReporter(Silent):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.progressed: list[str] = []
        self.setup: Setup | None = None

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ready(self, setup: Setup) -> None:
        self.setup = setup

    def progress(self, share: float, count: str, note: str, left_s: float | None) -> None:
        self.progressed.append(note)

    def stage_done(self, count: str, note: str) -> None:
        self.done.append((count, note))


def machine(truth: Any = None, *, noise: float = 0.02, seed: int = 3, kv_tokens: int = 60_000) -> SimulatedEngine:
    return SimulatedEngine(truth or Padded(), kv_tokens=kv_tokens, limits=LIMITS, noise=noise, seed=seed)


def question(**changes: Any) -> Question:
    values: dict[str, Any] = {
        "workload": parse_workload(WORKLOAD), "slo": TARGETS, "rate": 35.0, "seed": 0, "trials": None,
        "budget_s": None, "space": make_space(LIMITS), "sim_trials": 12,
    }  # fmt: skip
    return Question(**(values | changes))


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none, as some that are shared over a network."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)


_SIMULATED: dict[bytes, Score] = {}
_SIMULATE = Scenario.measure_over


def _simulated_once(scenario: Scenario, knobs: Knobs, rate: float, *rest: Any, **options: Any) -> Score:
    """As ``Scenario.measure_over``. What one session has simulated no other simulates again: most ask for the same."""
    options.pop("stop", None)
    cost = scenario.cost
    world = {field.name: getattr(scenario, field.name) for field in fields(scenario) if field.name != "cost"}
    key = pickle.dumps((world, cost_name(cost), cost.facts.jitter, knobs, rate, rest, options))
    if key not in _SIMULATED:
        _SIMULATED[key] = _SIMULATE(scenario, knobs, rate, *rest, **options)
    return _SIMULATED[key]


def session(
    journal: Path,
    requested: Question | None = None,
    *,
    engine: Any = None,
    stop: Callable[[], bool] | None = None,
    schedule: Schedule = SCHEDULE,
    host: Clock | None = None,
) -> tuple[Findings, KeepingReporter]:
    reported, requested = KeepingReporter(), requested or question()
    with open_study(journal, {"q": 1}) as study, pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.profiling.simulator._FEWEST_REQUESTS", FEWEST)
        if stop is None and Scenario.measure_over is _SIMULATE:
            patch.setattr(Scenario, "measure_over", _simulated_once)
        host = host or VirtualClock()  # stands still: what the host takes to simulate must show nowhere
        found = Session(
            engine or machine(), FACTS, requested, study, reported, stop=stop, schedule=schedule, host=host
        ).run()
        if not found.stopped:
            study.finish(requested.trials, requested.budget_s, requested.sim_trials)
    return found, reported


def changed(
    factor: float,
    journal: Path,
    requested: Question,
    until: float = math.inf,
    last: float = math.inf,
    schedule: Schedule = LONG,
) -> tuple[Findings, KeepingReporter]:
    """A run on a machine whose steps take ``factor`` times as long once it has been calibrated, for so many measurements.

    ``last``: the measurement of which Ctrl-C leaves nothing.
    """
    serving: list[str] = []

    class Changing(Padded):
        def predict(self, step: Any) -> float:
            return super().predict(step) * (factor if 0 < len(serving) <= until else 1.0)

    real = Context._measure

    def measure(self: Any, request: MeasurementRequest, *rest: Any) -> Run:
        serving.append(request.key)
        if len(serving) >= last:
            raise Interrupted("interrupted")
        return real(self, request, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "_measure", measure)
        return session(journal, requested, engine=machine(Changing()), schedule=schedule)
