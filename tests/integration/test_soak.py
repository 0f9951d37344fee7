"""The soak benchmark, half a minute of it: nothing is lost, and what it says adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.beside
def test_half_a_minute_past_capacity_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ends = ("answered", "hung_up", "cancelled", "rejected", "failed")
    assert found["sent"] == sum(found[end] for end in ends) > 50
    assert found["unaccounted"] == found["failed"] == found["lost_blocks"] == 0 and found["idle"]
    assert min(found["answered"], found["hung_up"], found["cancelled"]) > 0
    assert found["records"]["cancelled"] > 0 and found["decisions"] > 0
