"""The whole script on a CPU, so that it runs when there is a GPU at last; and what Ctrl-C leaves."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.vllm import PYTHON
from benchmarks.gpu.wheels import LIST, wheels
from runtime.torch_backend.executor import TorchExecutor
from tests.integration.vllm_environment import vllm_python_with_tests

pytestmark = [pytest.mark.slow, pytest.mark.beside]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--dry"]
GRAPHS = "max_batch_size" in inspect.signature(TorchExecutor).parameters


@pytest.mark.timeout(1300)
def test_a_dry_run_does_all_of_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != PYTHON}
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1250
    )
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == [part.name for part in PARTS]
    wrong = {name: (one["state"], one["why"]) for name, one in found.items() if one["state"] != "done"}
    left_out = {"served-vllm", "tuned-vllm"} | (set() if GRAPHS else {"graphs"})
    assert wrong.keys() == left_out and all(state == "left out" for state, _ in wrong.values()), (
        wrong,
        done.stderr[-3000:],
    )
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["not_begun"] == []
    answers = {name: one["found"] for name, one in found.items()}
    assert (
        all(case["error"] <= case["allowed"] for case in answers["kernels"].values()) and len(answers["kernels"]) >= 7
    )
    assert len(answers["self-tests"]) == 5 and all(one["passed"] for one in answers["self-tests"].values())
    eight = answers["fp8-kv"]
    assert (
        eight["fp8, pool"]["bytes_per_token"] * 4 == eight["auto, pool"]["bytes_per_token"]
        and eight["fp8, decode 2 × 20"]["ms"] > 0
    )
    assert eight["fp8, recorded"]["alike"] == eight["fp8, recorded"]["requests"] == 2
    steps = {name: step for name, step in answers["anatomy"].items() if name != "model"}
    assert "left_out" in steps.pop("too large")
    assert all(step["ms"] > 0 and step["over_floor"] > 0 for step in steps.values()) and len(steps) == 5
    assert len(answers["knob-change"]) == 4
    assert all(change["steps_with_old_knobs"] <= 1 for change in answers["knob-change"].values())
    memory = answers["fault-memory"]
    assert memory["engine"] == {"lives": True, "same_tokens_as_before": True}
    assert (
        memory["under_memory_pressure"]["short"] == "done"
        and memory["under_memory_pressure"]["limits"]["token_budget"] < 200
    )
    assert (
        answers["fault-sticky"]["engine"]["closed"]
        and "device-side assert" in answers["fault-sticky"]["engine"]["error"]
    )
    assert answers["served"]["steady"]["failed"] == 0 and answers["served"]["all at once"]["tokens_per_s"] > 0
    for model in ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"):
        assert answers[f"profile-{model}"]["settings"] and (tmp_path / answers[f"profile-{model}"]["file"]).exists()
    compared = {turn["contender"] for turn in answers["controller"]["turns"]}
    assert len(compared) == 5 and answers["controller"]["workload"] == "azure-code:length=1/2"
    text = (tmp_path / "results.md").read_text()
    assert "A dry run on a CPU" in text and all(f"## {part.title}" in text for part in PARTS)


@pytest.mark.timeout(900)
def test_vllm_is_served_and_profiled_tuned_made_to_reject_and_let_go(tmp_path: Path) -> None:
    environment = os.environ | {PYTHON: str(vllm_python_with_tests())}
    words = [*COMMAND, "--part", "served-vllm", "--part", "tuned-vllm", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=870)
    found = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0 and {one["state"] for one in found.values()} == {"done"}, (found, done.stderr[-3000:])
    assert found["served-vllm"]["found"]["steady"]["failed"] == 0
    answers = found["tuned-vllm"]["found"]
    assert answers["profile"]["engine"]["name"] == "vllm" and (tmp_path / answers["profile"]["file"]).exists()
    assert answers["rejection"]["status"] == 429 and "its target is 0.001 s" in answers["rejection"]["answer"]
    assert answers["all at once, after the kill"]["failed"] == 0 and answers["decisions"]["last"] == ["kill", "detach"]
    assert "## vLLM, profiled and tuned" in (tmp_path / "results.md").read_text()


@pytest.mark.timeout(200)
def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(tmp_path: Path) -> None:
    words = [*COMMAND, "--out", str(tmp_path), "--part", "fingerprint", "--part", "self-tests"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("self-tests"):
            break
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["state"] for one in found.values()] == ["done", "interrupted"]
    again = subprocess.run([*words, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert again.returncode == 0 and "1 parts are done, 1 are left" in again.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["state"] for one in found.values()] == ["done", "done"]


BARE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in sys.argv[1].split(",")
        return None if missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import benchmarks.gpu.__main__, benchmarks.gpu.running, benchmarks.gpu.page
parts = "fingerprint ceilings kernels graphs self_tests anatomy knob_change fault_memory fault_sticky"
for part in parts.split():
    __import__(f"benchmarks.gpu.parts.{part}")
"""


def test_what_needs_no_server_and_no_profiler_needs_only_torch_triton_transformers_numpy_and_psutil() -> None:
    given = {wheel.name.replace("-", "_") for wheel in wheels(LIST.read_text(encoding="utf-8"))}
    brought_along = {"typer", "annotated_doc", "click", "rich", "markdown_it_py", "mdurl", "pygments", "shellingham"}
    brought_along |= {"h11", "anyio", "idna", "attrs", "psutil"}
    words = [sys.executable, "-c", BARE, ",".join(sorted(given - brought_along))]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_a_part_is_left_out_and_says_why(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--part", "ceilings"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "sees no CUDA device; --dry runs on a CPU" in done.stderr
