"""Whole profiling runs on a paced engine: every stage, interrupted and taken up again, nothing measured twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autotune.profiling.session as sessions
from autotune.evaluate import EvaluationError
from autotune.profile import load_profile, save_profile
from autotune.profiling.findings import Findings, Question
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.space import make_space
from autotune.profiling.study import open_study
from autotune.profiling.timing import Schedule
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.unit.paced import FACTS, LIMITS, WORKLOAD, paced
from tests.unit.profiles import profile

QUICK = Schedule(None, window_s=0.2, warmup_s=0.05, saturate_s=0.2)
VLLM = Knobs(64, 0, 512, 512)


class Told(Silent):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)


def question(**changes: Any) -> Question:
    values: dict[str, Any] = {
        "workload": parse_workload(WORKLOAD), "slo": SLO(ttft_ms=200, tpot_ms=40), "rate": 60.0, "seed": 0, "trials": 5,
        "budget_s": None, "space": make_space(LIMITS),
    }  # fmt: skip
    return Question(**(values | changes))


def session(
    journal: Path,
    asked: Question,
    stop: Callable[[], bool] | None = None,
    schedule: Schedule = QUICK,
    base: float = 0.003,
    per_token: float = 0.0001,
) -> tuple[Findings, Told]:
    told = Told()
    with paced(base=base, per_token=per_token) as engine, open_study(journal, {"q": 1}) as study:
        found = Session(engine, FACTS, asked, study, told, stop=stop, schedule=schedule).run()
        if not found.stopped:
            study.finish(asked.trials, asked.budget_s)
    return found, told


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def test_every_stage_and_a_profile_at_the_end(journal: Path, tmp_path: Path) -> None:
    found, told = session(journal, question(rate=None, slo=SLO(ttft_ms=300, tpot_ms=60)), per_token=0.002)
    assert told.stages == ["calibrating", "searching", "validating", "capacity"]
    search = [r for r in found.runs if r.stage == "search"]
    assert len(search) == 5 and search[0].knobs == VLLM and search[0].label == "vLLM defaults"
    assert {r.score.seed for r in search} == {0}
    validated = [r for r in found.runs if r.stage == "validation"]
    assert {r.score.seed for r in validated} == {1, 2}
    assert VLLM in {r.knobs for r in validated}
    assert found.capacity is not None and len(found.capacity.tried) >= 2
    made = profile(found)
    save_profile(made, tmp_path / "a.yaml")
    assert load_profile(tmp_path / "a.yaml") == made
    assert set(made.settings) == {"interactive", "balanced", "throughput"}
    assert made.settings["balanced"].point.stage == "validation"


def test_common_arrivals_but_no_common_prompts(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, int]] = []
    real = sessions.evaluate

    def spy(*args: Any, **options: Any) -> Any:
        seeds.append((options["seed"], options["prompt_seed"]))
        return real(*args, **options)

    monkeypatch.setattr(sessions, "evaluate", spy)
    session(journal, question(trials=3))
    assert [seed for seed, _ in seeds[:3]] == [0, 0, 0]
    assert len({prompt for _, prompt in seeds}) == len(seeds)


@pytest.mark.parametrize("after", [1, 4, 7, 10])
def test_stopped_anywhere_the_same_question_goes_on(journal: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0
    real = sessions.evaluate

    def count(*args: Any, **options: Any) -> Any:
        nonlocal measured
        result = real(*args, **options)
        measured += 1
        return result

    monkeypatch.setattr(sessions, "evaluate", count)
    first, _ = session(journal, question(), stop=lambda: measured >= after)
    assert first.stopped and len(first.runs) == measured == after
    assert profile(first).status == "stopped"
    second, told = session(journal, question())
    assert "calibrating" not in told.stages
    assert not second.stopped
    assert second.runs[: min(after, 5)] == first.runs[:5]  # what was measured is kept to the last digit
    assert all(run in second.runs for run in first.runs)
    assert measured == len(second.runs) + len(second.failures) - sum(c == "interrupted" for _, c in second.failures)
    assert second.spent_s > first.spent_s


def test_a_failed_trial_is_told_and_costs_nothing_else(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = sessions.evaluate, 0

    def flaky(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise EvaluationError("request search-2-0 failed: out of memory")
        return real(*args, **options)

    monkeypatch.setattr(sessions, "evaluate", flaky)
    found, told = session(journal, question())
    assert found.failures == [(1, "request search-2-0 failed: out of memory")]
    assert len([r for r in found.runs if r.stage == "search"]) == 5
    assert any("out of memory" in note for note in told.notes)


def test_an_engine_that_always_fails_is_given_up(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise EvaluationError("no")

    monkeypatch.setattr(sessions, "evaluate", broken)
    with pytest.raises(EvaluationError, match="no"):
        session(journal, question())


def test_a_budget_ends_it_on_time(journal: Path) -> None:
    schedule = Schedule(6.0, window_s=0.2, warmup_s=0.05, saturate_s=0.2)
    found, _ = session(journal, question(trials=None, budget_s=6.0), schedule=schedule)
    assert len([r for r in found.runs if r.stage == "search"]) >= 3
    assert found.spent_s < 6.0 * 1.35


def test_pinned_knobs_stay_pinned(journal: Path) -> None:
    found, _ = session(journal, question(space=make_space(LIMITS, ["max_batch_size=5"], ["token_budget=20:40"])))
    for run in found.runs:
        if run.knobs != VLLM:
            assert run.knobs.max_batch_size == 5 and 20 <= run.knobs.token_budget <= 40


def test_an_slo_nobody_keeps_falls_short(journal: Path) -> None:
    found, _ = session(journal, question(slo=SLO(tpot_ms=0.5, ttft_ms=1), trials=2))
    made = profile(found)
    assert not made.slo_met and "was not met" in made.verdict


def test_the_search_prefers_what_serves_more_in_time(journal: Path) -> None:
    """Steps cost 8 ms whatever they hold: small batches starve, and the profile must say so."""
    found, _ = session(journal, question(trials=8, rate=150.0), base=0.008)
    assert profile(found).knobs.max_batch_size >= 5  # four tokens of 8 ms: 5 at a time make the 150 requests/s
