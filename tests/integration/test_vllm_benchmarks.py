"""The benchmarks of live vLLM, as small as they go, by the Python of an environment with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_environment import passes_in_vllm, vllm_python_with_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> dict[str, Any]:
    command = [str(vllm_python_with_tests()), "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_that_is_let_go_plans_as_stock() -> None:
    passes_in_vllm("vllm_let_go")


@pytest.mark.beside
def test_live_contest_and_agreement() -> None:
    found = run(
        "vllm_live", "--quick", "--small", "--rounds", "1", "--duration", "3", "--calibrate", "8", "--case", "light",
        "--part", "agreement", "--part", "contest",
    )  # fmt: skip
    assert found["agreement"]["differing"] == found["agreement"]["lost"] == 0 < found["agreement"]["served"]
    assert found["agreement"]["decisions"], "the last of them under a controller"
    assert found["failed_turns"] == 0
    light = found["cases"]["light"]
    assert light["ours"]["offered"] == light["best static"]["offered"] == light["stock"]["offered"] > 0
    assert found["vs_stock"] > 0 and light["stock"]["name"] == "stock"


def test_overhead_of_the_host(tmp_path: Path) -> None:
    from benchmarks.vllm.model import SMALL, model_folder

    folder = model_folder(tmp_path / "model", SMALL)
    found = run("vllm.overhead", "--rounds", "1", "--steps", "40", "--folder", str(folder))
    assert [host["sequences"] for host in found["hosts"]] == [16, 64] and found["host_overhead_of"] == "scheduler"
    assert all(0 < host["runner"] < host["stock"] for host in found["hosts"])
    assert all(0 < host["scheduler_runner"] < host["scheduler"] and host["engine"] > 0 for host in found["hosts"])
    shares = found["host_overhead"], found["host_overhead_beside_runner"]
    assert all(abs(share) < 2 for share in shares), "one round: the runner alone may vary by more than ours takes"


@pytest.mark.beside
def test_a_profile_made_by_the_command_and_what_is_simulated_from_it() -> None:
    found = run(
        "vllm_fidelity", "--quick", "--small", "--budget", "40", "--rounds", "1", "--duration", "4", "--share", "0.5"
    )  # fmt: skip
    assert found["check"] in ("fits", "does not fit")
    assert all(-1 < found[name] < 4 for name in ("tpot_p50", "throughput", "ttft_p50"))
    assert any(found[name] for name in ("tpot_p50", "throughput", "ttft_p50")), "something was compared"


@pytest.mark.beside
def test_our_engine_against_vllms_by_turns() -> None:
    """The same weights: of the same prompts comes the same, but for rounding."""
    small = "--preset", "nano", "--dtype", "float32", "--prompts", "32", "--rounds", "1"
    found = run("vllm.generation", *small, "--kind", "even")
    assert found["dtype"] == "float32" and found["alike"] > 0.8
    assert found["even_vs_vllm_cpu"] > 0 and "vs_vllm_cpu" not in found
