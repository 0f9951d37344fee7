"""A budget that ends early: what was measured by then still compares two settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.profiling.timing import Schedule
from autotune.workload import parse_workload
from runtime.slo import SLO
from tests.unit.profiled_machine import question, session


@pytest.mark.slow
def test_the_baseline_is_measured_before_any_repeat(tmp_path: Path) -> None:
    schedule = Schedule(9.0, window_s=2.0, warmup_s=0.3, calibrate_s=8.0, simulate_s=0.5)
    found, _ = session(tmp_path / "study.journal", question(budget_s=9.0), schedule=schedule)
    assert found.setup is not None
    rate = found.setup.rate  # of the comparison; the first run may have shown that another was looked for
    measured = [run.knobs for run in found.runs if run.stage == "validation" and run.score.rate == rate]
    assert len(set(measured)) == len(measured) >= 2  # the time is over before any is repeated
    assert found.confidence is not None and "No setting was measured twice" in found.confidence.sentence
    assert found.settings()["balanced"].knobs in measured and found.baseline in measured
    assert all(0 <= share <= 1 for share in found.expected.values())


@pytest.mark.slow
def test_long_answers_that_no_deadline_ends_are_in_the_first_guess(tmp_path: Path) -> None:
    """Each drains for eight seconds behind a window of one: three measurements fit the budget by their windows alone."""
    schedule = Schedule(24.0, window_s=1.0, warmup_s=0.2, calibrate_s=4.0, simulate_s=0.5)
    long = question(
        budget_s=24.0, slo=SLO(tpot_ms=50), rate=6.0, workload=parse_workload("poisson:prompt=100,output=1000,length=1")
    )
    found, _ = session(tmp_path / "study.journal", long, schedule=schedule)
    measured = [run for run in found.runs if run.stage == "validation"]
    drains = [run.score.wall_s - 1.2 for run in measured]
    assert min(drains) > 4, drains
    assert len({run.knobs for run in measured}) == len(measured) == 2, "the best and the baseline, without a repeat"
    assert found.hardware_s < 1.2 * 24.0
