"""A budget that ends early: what was measured by then still compares two settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.profiling.timing import Schedule
from tests.unit.profiled_machine import question, session


@pytest.mark.slow
def test_the_baseline_is_measured_before_any_repeat(tmp_path: Path) -> None:
    schedule = Schedule(9.0, window_s=2.0, warmup_s=0.3, calibrate_s=8.0, simulate_s=0.5)
    found, _ = session(tmp_path / "study.journal", question(budget_s=9.0), schedule=schedule)
    assert found.setup is not None
    rate = found.setup.rate  # of the comparison; the first run may have shown that another was looked for
    measured = [run.knobs for run in found.runs if run.stage == "validation" and run.score.rate == rate]
    assert len(set(measured)) == len(measured) >= 2  # the time is over before any is repeated
    assert found.confidence is not None and "nothing was measured twice" in found.confidence.sentence
    assert found.settings()["balanced"].knobs in measured and found.baseline in measured
    assert all(0 <= share <= 1 for share in found.expected.values())
