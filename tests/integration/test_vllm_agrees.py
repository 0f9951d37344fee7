"""vLLM's own scheduler, steered, makes the steps that the simulated engine makes: what is simulated is what is served."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_environment import ENVIRONMENT, vllm_python

ROOT = Path(__file__).parents[2]
PREEMPTS = "vLLM preempts later"
LOADS = 60


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    command = [str(vllm_python()), str(Path(__file__).with_name("vllm_agrees.py")), str(LOADS), "2"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_steps_and_requests_are_equal_but_for_what_is_named(found: list[dict[str, Any]]) -> None:
    named = Counter(one["differs"].partition(":")[0] for one in found)
    unknown = [f"{one['load']}: {one['differs']}" for one in found if one["differs"].startswith("unknown")]
    assert not unknown, "\n".join(unknown)
    assert named.keys() <= {"", PREEMPTS}
    assert named[""] >= 0.9 * LOADS, named


@pytest.mark.slow
def test_only_a_full_pool_makes_a_difference(found: list[dict[str, Any]]) -> None:
    assert all(not one["differs"] for one in found if "blocks=4000" in one["load"] or "blocks=300" in one["load"])
    assert all(one["requests"] == 120 and one["blocks_left"] == 0 for one in found), "none is lost, and no block"


@pytest.mark.slow
def test_the_loads_are_of_every_kind(found: list[dict[str, Any]]) -> None:
    """Else their agreement says little."""
    assert sum(one["rejected"] > 0 for one in found) >= 5
    assert sum(one["preempted"] > 0 for one in found) >= 2
    assert sum("max_wait_ms=0" not in one["load"] for one in found) >= 10
    assert sum("by view" in one["load"] for one in found) >= 10
    assert sum("turns=3" in one["load"] for one in found) >= 10
