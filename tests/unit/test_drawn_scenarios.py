"""Scenarios drawn at random: the same from the same seed, fit to be served, and counted as the module says."""

from __future__ import annotations

import json

import pytest

from benchmarks.controller import drawn as it
from benchmarks.controller.run import Bench


def test_a_seed_draws_the_same_scenario_each_time_and_each_seed_another() -> None:
    assert it.drawn(7) == it.drawn(7)
    assert len({str(it.drawn(seed)) for seed in range(1, 41)}) == 40


def test_what_is_drawn_varies() -> None:
    draws = [it.drawn(seed) for seed in range(1, 201)]
    assert {draw.scenario.hardware.name for draw in draws} == {machine.name for machine in it.MACHINES}
    assert {draw.start for draw in draws} == set(it.STARTS)
    assert {len(draw.scenario.phases) for draw in draws} == {1, 2, 3}
    shifts = sum(draw.scenario.shifts for draw in draws)
    assert 50 < shifts < 180


def test_a_named_class_has_one_slo_in_all_phases_and_shares_add_up() -> None:
    for seed in range(1, 301):
        phases = it.drawn(seed).scenario.phases
        assert len({part.slo_name for phase in phases for part in phase.parts if part.request_class == "other"}) <= 1
        for phase in phases:
            assert sum(part.share for part in phase.parts) == pytest.approx(1)
            assert phase.slo  # of the class that has no name


def test_a_flooded_machine_completes_more_of_short_requests() -> None:
    machine = next(m for m in it.MACHINES if m.name == "A100")
    brief = it.flooded(machine, (it.Part("brief", "inter"),), None)
    assert brief > 2 * it.flooded(machine, (it.Part("agent", "inter"),), None) > 0


def test_everybody_serves_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(it, "MOST", 200)
    monkeypatch.setattr(it, "FIXED", it.FIXED[:2])
    seed = next(
        s
        for s in range(1, 100)
        if len(it.drawn(s).scenario.phases) == 1 and it.drawn(s).scenario.hardware.name == "H200"
    )
    result = it.play(seed, Bench({}))
    assert set(result["met"]) == set(it.contenders(it.drawn(seed).start))
    assert all(0 <= met <= result["offered"] for met in result["met"].values())
    assert result == it.play(seed, Bench({}))
    start = it.drawn(seed).start
    same = f"fixed {start.max_batch_size}/{start.token_budget}/{start.chunk_size}"
    assert result["met"]["start, full"] == result["met"][same]


def test_only_scenarios_that_say_something_count() -> None:
    def one(seed: int, offered: int, best: int) -> dict[str, object]:
        return {"seed": seed, "offered": offered, "met": {"fixed 1/2/3": best, "fixed 4/5/6": 0}}

    results = [one(1, 400, 200), one(2, 400, 100), one(3, it.FEWEST - 1, 100), one(4, it.FEWEST, it.FEWEST)]
    assert [played.seed for played in it.counting(results)] == [1, 4]


def test_the_summary_compares_with_the_best_fixed_setting_and_with_the_start() -> None:
    met = {"fixed 1/2/3": 99, "fixed 4/5/6": 49, "start, full": 49, "start, knobs": 19}
    met |= {f"{name}, full": 49 for name in it.FULL} | {f"{name}, knobs": 19 for name in it.KNOBS}
    met |= {"predictive, full": 99, "predictive, knobs": 39, "aimd, full": 79}
    said: list[str] = []
    figures = it.summary([it.Played(1, met)] * 2, said.append)
    assert figures["full_vs_best_static_with_admission_mean"] == 1
    assert figures["full_vs_best_rival_with_admission_mean"] == 1.25  # AIMD's
    assert figures["knobs_vs_start_mean"] == figures["knobs_vs_start_min"] == 2
    assert any(line.startswith("aimd") and "0.800" in line and "100%" in line for line in said)


def test_the_spread_of_ratios() -> None:
    mean, tenth, least, below = it.Spread.of([0.5, 2.0, 1.0, 1.0])
    assert (mean, least, below) == (pytest.approx(1), 0.5, 0.25)
    assert 0.5 < tenth < 1


def test_the_command_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path_factory.mktemp("kept") / "drawn.jsonl"
    played: list[int] = []

    def play(seed: int, bench: Bench) -> dict[str, object]:
        played.append(seed)
        return {"seed": seed, "offered": 200, "met": dict.fromkeys(it.contenders(it.drawn(seed).start), 100)}

    monkeypatch.setattr(it, "play", play)
    for seeds in ("2", "3"):
        assert it.main(["--seeds", seeds, "--jobs", "1", "--keep", str(path)]) == 0
    assert played == [1, 2, 3]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["scenarios"] == 3
    assert last["knobs_vs_start_mean"] == 1
    assert it.main(["--seeds", "none"]) == 2
    assert it.main(["--seeds", "2", "--traces", str(path.parent)]) == 2
    assert "it must be a folder that holds" in capsys.readouterr().err
    assert played == [1, 2, 3]
