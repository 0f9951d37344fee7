"""A controller that begins with a wrong profile outgrows it in seconds, and says that it was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import control, save_profile
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import Decision
from autotune.cost.model import fit_cost_model
from runtime.knobs import Knobs
from runtime.slo import SLO, attainment
from tests.sample_profile import sample_profile
from tests.unit.control_world import VLLM, Hardware, SimulatedEngine, h200, poisson, slow_cpu
from tests.unit.test_cost_model import measured

TARGET = SLO(ttft_ms=500, tpot_ms=18)
LOAD = poisson(17, 20, 1500, 150, seed=10)
SETTLED_S = 5.0


def profile_of(hardware: Hardware, knobs: Knobs, path: Path) -> Path:
    facts = fit_cost_model(measured(hardware)).facts
    save_profile(sample_profile({"balanced": knobs}).model_copy(update={"cost_model": facts}), path)
    return path


def served(profile: Path, controller: str = "predictive") -> tuple[float, list[Decision]]:
    """(share of the later requests that kept the SLO, what was noted)."""
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET, profile=profile, admission=True, controller=controller) as attached:
        records = engine.play(LOAD)
        notes = [d for d in attached.decisions if d.action == "note"]
        if controller == "predictive":
            changed = [d.evidence["changes"] for d in attached.decisions if "changes" in d.evidence]
            assert bool(changed[-1]) == bool(notes), "and the evidence of decisions says that it was found"
    return attainment([r for r in records if r.arrival > SETTLED_S], TARGET).share, notes


@pytest.mark.parametrize(
    ("hardware", "knobs", "says"),
    [
        (lambda step: h200(step) / 5, VLLM, "steps take 5.0 times as long as the profile predicts"),
        (lambda step: h200(step) * 5, Knobs(4, 0, 64, 64), "steps take 0.2 times as long as the profile predicts"),
        (slow_cpu, Knobs(1, 50, 32, 32), "times as long as the profile predicts, by what they hold"),
    ],
    ids=["too fast", "too slow", "wrong shape"],
)
def test_it_is_outgrown_and_said(hardware: Hardware, knobs: Knobs, says: str, tmp_path: Path) -> None:
    share, notes = served(profile_of(hardware, knobs, tmp_path / "wrong.yaml"))
    assert share > 0.95
    assert any(says in d.cause for d in notes) and notes[0].at < 1 and len(notes) < 5
    assert all(d.evidence["ratio_p10"] <= d.evidence["ratio_p50"] <= d.evidence["ratio_p90"] for d in notes)


def test_a_right_one_is_not_called_wrong(tmp_path: Path) -> None:
    share, notes = served(profile_of(h200, Knobs(128, 0, 1024, 1024), tmp_path / "right.yaml"))
    assert share > 0.95 and not notes


@pytest.mark.parametrize("name", CONTROLLERS)
def test_whoever_controls(name: str, tmp_path: Path) -> None:
    _, notes = served(profile_of(lambda step: h200(step) / 5, VLLM, tmp_path / "wrong.yaml"), name)
    assert [d.cause for d in notes] == ["steps take 5.0 times as long as the profile predicts"]


def test_a_machine_that_gets_slower_and_recovers(tmp_path: Path) -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET, profile=profile_of(h200, VLLM, tmp_path / "mine.yaml")) as attached:
        for factor in (1.0, 3.0, 1.0):
            engine.formula.hardware = lambda step, factor=factor: factor * h200(step)  # type: ignore[misc]
            engine.play(poisson(4, 10, 800, 100, seed=1, start=engine.now))
        said = [d.cause for d in attached.decisions if d.action == "note"]
    assert said == [
        "steps take 3.0 times as long as the profile predicts",
        "steps take about as long as the profile predicts",
    ]
