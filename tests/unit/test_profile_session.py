"""Whole profiling runs in virtual time: every stage, interrupted and taken up again, nothing measured twice."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.defaults import VLLM_LABEL
from autotune.measure.evaluate import EvaluationError, evaluate
from autotune.profile import load_profile, save_profile
from autotune.profiling.assemble import sidecar
from autotune.profiling.findings import Findings
from autotune.profiling.space import make_space
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.unit.profiled_machine import (
    LIMITS,
    LONG,
    SCHEDULE,
    TARGETS,
    WORKLOAD,
    KeepingReporter,
    machine,
    question,
    session,
)
from tests.unit.profiles import profile

VLLM = LIMITS.clamp(Knobs(1024, 0, 8192, 8192))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


@pytest.fixture(scope="module")
def whole_told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, KeepingReporter]:
    """One run left in peace, which finds its own rate under loads as long as that takes, and windows that show a queue grow."""
    requested, schedule = question(rate=None, sim_trials=24), replace(LONG, window_s=12.0, warmup_s=2.0)
    return session(tmp_path_factory.mktemp("whole") / "a.journal", requested, schedule=schedule)


@pytest.fixture(scope="module")
def whole(whole_told: tuple[Findings, KeepingReporter]) -> Findings:
    return whole_told[0]


def truth(knobs: Knobs, rate: float) -> float:
    """Attainment on the machine itself, without noise, over more requests than the profiler ever sees."""
    load = parse_workload(WORKLOAD).at_rate(rate)
    scores = [
        evaluate(machine(noise=0.0), knobs, load, TARGETS, vocab_size=256, seed=seed, duration=40, warmup=4)
        for seed in (501, 502)
    ]
    return sum(s.met for s in scores) / sum(s.offered for s in scores)


@pytest.mark.slow
def test_every_stage_and_a_profile_at_the_end(whole_told: tuple[Findings, KeepingReporter], tmp_path: Path) -> None:
    found, reported = whole_told
    assert reported.stages == ["calibrating", "simulating", "validating", "capacity"]
    assert found.cost is not None and found.cost.facts.error < 0.1
    assert len(found.steps) <= found.cost.facts.points  # more where it was fitted to what was measured, too
    kept = found.cost.facts
    assert kept.jitter is not None and len(kept.jitter.quantiles) == 32 and 0 <= kept.serving_overhead_s < 1e-3
    assert [run.trial for run in found.simulated] == list(range(24))
    assert found.simulated[0].knobs == VLLM and found.simulated[0].label == VLLM_LABEL
    validated = [r for r in found.runs if r.stage == "validation"]
    assert VLLM in {r.knobs for r in validated} and len({r.knobs for r in validated}) >= 3
    assert not {r.score.seed for r in validated} & {r.score.seed for r in found.simulated}
    assert len(found.paired) == len(found.runs)
    assert found.capacity is not None and len(found.capacity.tried) >= 2
    assert found.simulating_s == 0.0 and found.spent_s == found.hardware_s > 0  # none of the host's time
    made = profile(found, question(), price=2.5)
    save_profile(made, tmp_path / "a.yaml")
    assert load_profile(tmp_path / "a.yaml") == made
    assert set(made.settings) == {"interactive", "balanced", "throughput"}
    assert made.settings["balanced"].point.stage == "validation"
    assert made.confidence is not None and made.cost_model is not None and made.price_per_hour == 2.5
    assert made.simulation is not None and made.simulation.trials == 24 and made.simulation.cpu_seconds > 0
    paired = {p.knobs for p in made.simulated if p.label == "paired"}
    assert paired == {p.knobs for p in made.points if p.stage == "validation"}
    lines = [json.loads(line) for line in sidecar(found).splitlines()]
    assert sum(line.get("kind") == "step" for line in lines) == len(found.steps)
    assert [line["trial"] for line in lines if line.get("stage") == "simulation"] == list(range(24))


@pytest.mark.slow
def test_the_choice_is_near_the_best_and_the_rate_near_capacity(whole: Findings) -> None:
    assert whole.setup is not None
    rate = whole.setup.rate
    grid = [
        Knobs(b, 0, t, c)
        for b, t, c in itertools.product((16, 48, 128, 256), (64, 128, 256, 512, 1024, 4096), (64, 256, 4096))
        if c <= t
    ]
    shares = {knobs: truth(knobs, rate) for knobs in grid}
    best = max(shares.values())
    assert 0.5 <= best <= 0.99  # near its capacity even the best cannot meet everything, and far above it nobody can
    assert min(shares.values()) < 0.5 * best  # settings differ there
    mine = truth(whole.settings()["balanced"].knobs, rate)
    assert mine >= 0.92 * best


@pytest.mark.slow
def test_the_confidence_says_what_was_seen(whole: Findings) -> None:
    sure = whole.confidence
    assert sure is not None
    assert 0 <= sure.noise < 0.1 and 0 <= sure.best <= 1 and 0 <= sure.regret < 0.05
    repeated = [(r.knobs, r.score.seed) for r in whole.runs if r.stage == "validation"]
    assert len(repeated) > len(set(repeated))  # one setting met one and the same load twice
    chance = "above 99%" if sure.best > 0.99 else f"of {sure.best:.0%}"
    assert f"the recommended setting is the best with a probability {chance}" in sure.sentence
    expected = whole.expected
    short = max(expected.values()) - expected[whole.settings()["balanced"].knobs]
    assert 0 <= short <= sure.regret, "the mean of the best of several is at least the best mean"


@pytest.mark.slow
def test_where_all_is_met_the_choice_is_one_of_equals(tmp_path: Path) -> None:
    found = session(tmp_path / "a.journal", question(rate=10.0, sim_trials=6, trials=2))[0]
    assert all(run.score.met == run.score.offered for run in found.runs) and len(found.expected) > 1
    sure = found.confidence
    assert sure is not None and sure.best < 0.7, "equals share it"
    assert "the recommended setting is as good as any measured with a probability " in sure.sentence
    assert f"{sure.best:.0%}" not in sure.sentence and "is the best" not in sure.sentence


@pytest.mark.slow
def test_simulated_figures_are_close_to_the_machine_they_never_saw(whole: Findings) -> None:
    paired = {(one.knobs, one.score.rate, one.score.seed): one for one in whole.paired}
    pairs = [(run, paired[run.knobs, run.score.rate, run.score.seed]) for run in whole.runs]
    errors = [abs(run.score.attainment - one.score.attainment) for run, one in pairs]
    assert sorted(errors)[len(errors) // 2] < 0.08


@pytest.mark.slow
def test_a_simulated_trial_that_cannot_be_is_a_failure_with_its_cause(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.profiling.simulator import Simulator

    real = Simulator.long

    def picky(self: Simulator, knobs: Knobs, rate: float, seed: int, **options: Any) -> Any:
        if knobs == VLLM:
            raise EvaluationError("no room for it")
        return real(self, knobs, rate, seed, **options)

    monkeypatch.setattr(Simulator, "long", picky)
    found, reported = session(journal)
    assert found.failures == [(0, "no room for it")] and len(found.simulated) == 11
    assert any("trial 0 failed" in note for note in reported.notes)


@pytest.mark.slow
def test_a_rate_given_is_a_rate_kept(journal: Path) -> None:
    found, _ = session(journal, question(rate=6.0))
    assert {run.score.rate for run in (*found.simulated, *found.runs)} == {6.0}
    assert found.capacity is not None and found.capacity.rate == 6.0 and len(found.capacity.tried) == 1


@pytest.mark.slow
def test_as_many_settings_as_asked_are_measured(journal: Path) -> None:
    """One more where the machine shows another speed than calibrated: the comparison begins anew, with another choice."""
    found, reported = session(journal, question(trials=2), engine=machine(seed=1))
    measured = {r.knobs for r in found.runs if r.stage == "validation"}
    began_anew = any("of its calibrated speed: comparing" in note for note in reported.notes)
    assert len(measured) in (2, 2 + began_anew) and VLLM in measured


@pytest.mark.slow
def test_pinned_knobs_stay_pinned(journal: Path) -> None:
    space = make_space(LIMITS, ["max_batch_size=24"], ["token_budget=100:400"])
    found, _ = session(journal, question(space=space))
    for run in (*found.simulated, *found.runs):
        if run.label in (VLLM_LABEL, "vLLM defaults, small GPU", "SGLang defaults, small GPU"):
            continue
        assert run.knobs.max_batch_size == 24 and 100 <= run.knobs.token_budget <= 400
    assert all(s.knobs.max_batch_size == 24 for s in found.settings().values())


@pytest.mark.slow
def test_an_slo_nobody_meets_falls_short(journal: Path) -> None:
    found, _ = session(journal, question(slo=SLO(tpot_ms=0.5, ttft_ms=1)))
    made = profile(found, question())
    assert not made.slo_met and "was not met" in made.verdict


@pytest.mark.slow
def test_many_processes_simulate_the_same_settings_of_the_start(journal: Path, given: Findings) -> None:
    found, _ = session(journal, question(workers=2, sim_trials=12), schedule=SCHEDULE)
    start = [r for r in given.simulated if r.label != "search"]
    assert [r.score for r in found.simulated[: len(start)]] == [r.score for r in start]
    assert len(found.simulated) == 12
