"""Profiling runs in virtual time that are stopped, or whose engine fails: taken up again, nothing is measured twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune.profiling.target as measuring
from autotune.measure.evaluate import EvaluationError, Interrupted, evaluate
from autotune.profiling.assemble import sidecar
from autotune.profiling.findings import Findings
from autotune.profiling.stages.engine_validation import EngineValidation
from runtime.errors import EngineClosedError
from runtime.knobs import Knobs
from tests.unit.profiled_machine import LIMITS, SCHEDULE, question, session
from tests.unit.profiles import profile

VLLM = LIMITS.clamp(Knobs(1024, 0, 8192, 8192))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the hardware is asked from here on: (setting, seed, prompt seed) of each measurement."""
    measured: list[tuple[str, int, int]] = []

    def spy(engine: Any, knobs: Knobs, *args: Any, **options: Any) -> Any:
        result = evaluate(engine, knobs, *args, **options)
        measured.append((str(knobs), options["seed"], options["prompt_seed"]))
        return result

    monkeypatch.setattr(measuring, "evaluate", spy)
    return measured


@pytest.mark.slow
def test_common_arrivals_but_no_common_prompts(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = counted(monkeypatch)
    found, _ = session(journal)
    assert len({prompts for _, _, prompts in measured}) == len(measured)
    assert {run.score.seed for run in found.simulated} == {found.simulated[0].score.seed}


class StopAt:
    """Asks to stop at the ``number``-th question from the moment a stage began."""

    def __init__(self, reported: list[str], name: str, number: int) -> None:
        self.reported, self.name, self.left = reported, name, number

    def __call__(self) -> bool:
        if self.name in self.reported:
            self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("name", "number"),
    [("simulating", 60), ("validating", 3), ("validating", 150), ("validating", 350)],
)
@pytest.mark.slow
def test_stopped_anywhere_the_same_question_goes_on(
    journal: Path, name: str, number: int, given: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = counted(monkeypatch)
    stages: list[str] = []
    monkeypatch.setattr("tests.unit.profiled_machine.KeepingReporter.stage", lambda self, name: stages.append(name))
    first, _ = session(journal, stop=StopAt(stages, name, number))
    assert first.stopped and stages[-1] == name
    if first.settings():
        assert profile(first, question()).status == "stopped"
    stages.clear()
    second, _ = session(journal)
    assert "calibrating" not in stages and not second.stopped
    assert [run.trial for run in second.simulated] == [run.trial for run in given.simulated]
    assert all(run in second.runs for run in first.runs)
    done = [(r.knobs, r.score.rate, r.score.seed) for r in second.runs]
    assert len(measured) == len(done)  # nothing measured twice
    assert second.hardware_s > first.hardware_s > 0
    again, _ = session(journal)
    assert len(measured) == len(done) and again.simulated == second.simulated  # from the study alone, to the last digit


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 2, 4])
def test_stopped_while_a_measurement_is_made_sense_of(
    journal: Path, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are simulated; until then it says nothing, and what was known before stands."""
    real, calls = EngineValidation._difference, itertools.count(1)

    def difference(*given: Any) -> Any:
        if next(calls) == last:
            raise Interrupted("interrupted")
        return real(*given)

    monkeypatch.setattr(EngineValidation, "_difference", difference)
    first, _ = session(journal)
    assert first.stopped and len(first.runs) >= last
    second, _ = session(journal)
    assert not second.stopped and all(run in second.runs for run in first.runs)


@pytest.mark.slow
def test_stopped_while_the_capacity_is_looked_for(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once while it is simulated, once in a measurement."""
    measured, free = counted(monkeypatch), question(rate=None, sim_trials=10, trials=2)
    stages: list[str] = []
    monkeypatch.setattr("tests.unit.profiled_machine.KeepingReporter.stage", lambda self, name: stages.append(name))
    before: Findings | None = None
    for number in (2, 30):
        stages.clear()
        first, _ = session(journal, free, stop=StopAt(stages, "capacity", number))
        assert first.stopped and stages[-1] == "capacity" and profile(first, free).status == "stopped"
        assert before is None or before.setup == first.setup
        before = first
    last, _ = session(journal, free)
    assert not last.stopped and last.setup == first.setup
    assert first.capacity is not None and last.capacity is not None
    assert len(last.capacity.tried) > len(first.capacity.tried)
    assert all(run in last.runs for run in first.runs) and len(measured) == len(last.runs)  # nothing measured twice


@pytest.mark.slow
@pytest.mark.parametrize("budget", [20.0, 45.0])
def test_who_comes_when_the_time_is_over_finds_all_that_was_found(
    journal: Path, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends among the measurements; a second session has none left, and counts every repeat all the same."""
    schedule = replace(SCHEDULE, budget_s=budget)
    first, _ = session(journal, question(rate=None, budget_s=budget), schedule=schedule)
    measured = counted(monkeypatch)
    again, _ = session(journal, question(rate=None, budget_s=budget), schedule=schedule)
    assert not measured and len(first.runs) >= 3
    assert again.measured == first.measured
    assert (again.expected, again.confidence, again.capacity) == (first.expected, first.confidence, first.capacity)
    assert again.settings() == first.settings()


@pytest.mark.slow
def test_stopped_while_calibrating_there_is_nothing_to_keep(journal: Path) -> None:
    calls = itertools.count()
    found, _ = session(journal, stop=lambda: next(calls) > 200)
    assert found.stopped and not found.settings() and found.cost is None
    again, reported = session(journal)
    assert reported.stages[0] == "calibrating" and again.settings()


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Knobs], bool]) -> None:
    def flaky(engine: Any, knobs: Knobs, *args: Any, **options: Any) -> Any:
        if fails(knobs):
            raise EvaluationError("request 7 failed: out of memory")
        return evaluate(engine, knobs, *args, **options)

    monkeypatch.setattr(measuring, "evaluate", flaky)


@pytest.mark.slow
def test_a_failed_measurement_is_told_and_not_made_again(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda knobs: knobs == VLLM)
    found, reported = session(journal)
    assert [(stage, knobs, cause) for stage, knobs, cause in found.unmeasured] == [
        ("validation", VLLM, "request 7 failed: out of memory")
    ]
    assert any("out of memory" in note for note in reported.notes)
    made = profile(found, question())
    assert made.baseline is None and made.knobs != VLLM
    assert json.loads(sidecar(found).splitlines()[-1])["failed"] == "request 7 failed: out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [35.0, None])
def test_an_engine_that_always_fails_is_given_up(
    journal: Path, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    failing(monkeypatch, lambda knobs: True)
    with pytest.raises(EvaluationError, match="out of memory"):
        session(journal, question(rate=rate))


@pytest.mark.slow
def test_a_live_engine_serves_a_load_before_the_first_measurement(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in a session that measures anything. It is no measurement, and its requests are not those of any."""
    loads: list[tuple[str, int, int]] = []

    def noting(engine: Any, knobs: Knobs, *args: Any, **options: Any) -> Any:
        loads.append((options["label"], options["seed"], options["prompt_seed"]))
        return evaluate(engine, knobs, *args, **options)

    monkeypatch.setattr(measuring, "evaluate", noting)
    made = measuring.EngineTarget.__init__

    def live(self: measuring.EngineTarget, *arguments: Any) -> None:
        made(self, *arguments)
        self.virtual = False  # what is simulated here counts as live

    monkeypatch.setattr(measuring.EngineTarget, "__init__", live)
    measured = question(sim_trials=8, trials=1)
    found, _ = session(journal, measured)
    labels, seeds, prompts = zip(*loads, strict=True)
    assert labels[0] == "warm-up-0" and not any(label.startswith("warm-up") for label in labels[1:])
    assert len(found.runs) == len(labels) - 1 and seeds[0] not in seeds[1:] and len(set(prompts)) == len(prompts)
    loads.clear()
    session(journal, measured)
    assert not loads, "nothing is left to measure, so nothing is warmed up"


def test_stopped_before_anything_is_measured_at_a_new_rate_there_is_a_profile_all_the_same(given: Findings) -> None:
    """Settings are then chosen from the trials, and what they are chosen from is in the profile."""
    assert given.setup is not None
    rate = given.setup.rate * 1.25
    stopped = replace(
        given, measured={}, paired=[], stopped=True, expected={}, baseline=None, confidence=None, capacity=None,
        setup=given.setup.model_copy(update={"rate": rate}),
        candidates=[point.model_copy(update={"rate": rate}) for point in given.candidates],
    )  # fmt: skip
    assert profile(stopped, question()).status == "stopped"


def test_what_was_compared_at_one_rate_stands_until_something_is_measured_at_another(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = session(journal)
    assert whole.setup is not None and whole.validated_at(whole.setup.rate)

    def elsewhere(self: Any, setup: Any) -> Any:
        raised = setup.model_copy(update={"rate": setup.rate * 1.25})
        self._context.found.setup = raised
        raise Interrupted("interrupted")

    monkeypatch.setattr("autotune.profiling.session.Session._measure", elsewhere)
    stopped, _ = session(journal)
    assert stopped.stopped and stopped.setup is not None and stopped.setup.rate == whole.setup.rate
    assert {run.knobs for run in stopped.validated_at(stopped.setup.rate)} == {
        run.knobs for run in whole.validated_at(whole.setup.rate)
    }


def test_an_engine_that_closes_ends_the_session_with_what_was_found(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def dies(engine: Any, knobs: Knobs, *args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise EngineClosedError("cuda:0 is lost")
        return evaluate(engine, knobs, *args, **options)

    monkeypatch.setattr(measuring, "evaluate", dies)
    found, _ = session(journal)
    assert found.stopped and found.fault == "cuda:0 is lost" and found.runs
    assert profile(found, question()).status == "stopped"
    monkeypatch.setattr(measuring, "evaluate", evaluate)
    again, _ = session(journal)
    assert not again.stopped and {*found.measured} <= {*again.measured}
