"""Warnings are found, kept, and said by whatever shows the profile or predicts from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune import save_profile
from autotune.cli.main import run
from autotune.cost.model import fit_cost_model
from autotune.profile.fingerprint import affine_cpus
from autotune.profile.parts import StepPoint
from autotune.profiling.assemble import sure_of
from autotune.profiling.findings import Findings
from autotune.profiling.posterior import confidence
from autotune.profiling.space import make_space
from autotune.profiling.warnings import extrapolated, warnings
from autotune.report import profile_table as table
from benchmarks.controller.hardware import h200
from runtime.knobs import Knobs
from runtime.step_model import StepFeatures
from tests.sample_profile import sample_profile
from tests.unit.profiled_machine import LIMITS
from tests.unit.profiles import setup

pytestmark = pytest.mark.unit


def test_a_bad_fit_and_a_busy_machine_are_warnings() -> None:
    cores = float(len(affine_cpus()))
    found = Findings(space=make_space(LIMITS), cost=h200())
    assert warnings(found) == ()
    found.others = [(10.0, 0.05 * cores), (10.0, 0.1 * cores)]
    assert warnings(found) == ()
    found.others.append((30.0, 0.5 * cores))
    found.cost = type(h200())(h200().facts.model_copy(update={"error": 0.32}))
    rough, busy = warnings(found)
    assert rough == "the cost model's error is 32%"
    assert busy == f"other programs used {0.33 * cores:.1f} cores while it was measured"


def test_an_engine_that_serves_far_beyond_what_was_measured_is_a_warning() -> None:
    def point(decodes: int, context: int, prefill: int = 0, **more: Any) -> StepPoint:
        step = StepFeatures(
            decodes, decodes * context, prefill, prefill, prefill * (prefill + 1) // 2, int(prefill > 0)
        )
        return StepPoint(
            **step._asdict(), seconds=h200().predict(step) * (1.05 if decodes % 2 else 0.95), repeats=3, **more
        )

    steps = [point(n, c, region="decode", spread=0.0) for n in (1, 2, 3, 4, 5, 6) for c in (10, 20, 40)]
    cost = fit_cost_model([*steps, *(point(n, 20, 64, region="mixed", spread=0.0) for n in (1, 2, 3))])
    within = setup(fitted=Knobs(4, 0, 64, 64), mean_prompt=20.0, mean_output=8.0)
    beyond = setup(fitted=Knobs(256, 0, 512, 512), mean_prompt=1500.0, mean_output=200.0)
    found = Findings(space=make_space(LIMITS), cost=cost, steps=steps, setup=within)
    assert extrapolated(found) is None
    found.setup = beyond
    said = extrapolated(found)
    assert said is not None and said in warnings(found)
    assert "where 256 sequences decode over 409,600 tokens: the calibration saw 240 at most" in said
    assert said.endswith("(a longer --budget with --fresh sees more)")


def test_a_thin_calibration_is_a_warning_and_makes_the_choice_less_sure() -> None:
    found = Findings(space=make_space(LIMITS), cost=h200())
    found.steps = [
        StepPoint(
            region="decode", decodes=1, decode_context=n, prefill_tokens=0, prefill_context=0, prefill_attention=0,
            seconds=0.1, spread=0.0, repeats=3,
        )
        for n in (11, 30)
    ]  # fmt: skip
    (thin,) = warnings(found)
    assert thin.startswith(
        "the calibration saw no batch of decodes, no prompt beside decodes, no chunk behind computed tokens"
    )
    assert "no served load" in thin and thin.endswith("(a longer --budget with --fresh sees more)"), "kept is kept"
    found.confidence = confidence(0.97, 0.01, None, 0.02, 3)
    made = sure_of(found)
    assert (
        made is not None
        and made.best == 0.97
        and "less certain than that, because the calibration saw no batch" in made.sentence
    )
    found.steps = []
    assert sure_of(found) is found.confidence


def test_they_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = sample_profile(cost_model=h200().facts, warnings=("the cost model's error is 32%",))
    console = Console(width=200, record=True, quiet=False)
    table.show(profile, console)
    said = "warning: the cost model's error is 32%; profile again when nothing else runs on this machine"
    assert "The cost model's error is 32%." in console.export_text()
    save_profile(profile, tmp_path / "a.yaml")
    capsys.readouterr()
    run(
        [
            "simulate",
            "--profile",
            str(tmp_path / "a.yaml"),
            "--workload",
            "poisson:prompt=700,output=60",
            "--rate",
            "2",
            "--requests",
            "50",
        ]
    )
    assert said in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
