"""The parts of the GPU script see what is wrong, and count what a step reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from benchmarks.gpu import verb
from benchmarks.gpu.parts import PARTS, anatomy, controller, fp8_kv, kernel_tests, kernels, recorded_prompts, switches
from benchmarks.gpu.parts.anatomy import cases, fitting, layer_parameters, weight_bytes
from benchmarks.gpu.place import LeftOutError, Place, read
from benchmarks.gpu_projection.steps import Step
from runtime.torch_backend.cuda.language import INTERPRETED
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.loading import from_model, load_model
from runtime.torch_backend.presets import PRESETS, Preset, build_preset

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="what lies on a CPU needs interpreted kernels")


def test_a_wrong_kernel_fails_the_part_at_its_end_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, place = kernels.gated, Place(tmp_path, tmp_path / "kernels.jsonl", dry=True)

    def wrong(gate_up: Tensor) -> Tensor:
        out = right(gate_up)
        out[0, 0] += 0.01
        return out

    def raises(*args: Any, **options: Any) -> Tensor:
        raise ValueError("a shape that does not fit")

    monkeypatch.setattr(kernels, "gated", wrong)
    monkeypatch.setattr(kernels, "greedy", raises)
    monkeypatch.setattr(kernels, "DRY", kernels.DRY[:1])
    monkeypatch.setattr(kernels, "_sampled", lambda *_: {"error": 0.0, "allowed": 1.0})
    with pytest.raises(RuntimeError, match=r"2 of 7 kernels are wrong: gate 3 × 48 float32, greedy float32"):
        kernels.run(place, "")
    found = read(place.file)
    assert found["greedy float32"] == {"failed": "ValueError: a shape that does not fit"}
    gate = found["gate 3 × 48 float32"]
    assert gate["error"] > gate["allowed"]
    others = found.keys() - {"gate 3 × 48 float32", "greedy float32"}
    assert len(others) == 5 and all(found[name]["error"] <= found[name]["allowed"] for name in others)


ABORTING = """
import os, runpy, sys

class Pinned:
    abort = os.abort

    def __del__(self):
        self.abort()

pinned = Pinned()
sys.argv[1:] = ["fault-sticky", "--dry", "--out", sys.argv[1]]
runpy.run_module("benchmarks.gpu.part", run_name="__main__")
"""
"""Runs a part where the end of the interpreter aborts, as tensors in pinned memory do once their device is lost."""


@pytest.mark.slow
def test_a_part_that_loses_its_device_ends_with_the_code_it_earned(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", ABORTING, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("> engine: ")
    assert read(tmp_path / "fault-sticky.jsonl")["engine"]["closed"]


def test_what_was_not_written_is_an_error() -> None:
    expected = torch.ones(4, dtype=torch.float64)
    found = expected.float()
    found[2] = float("nan")
    told = kernels._reported(found, expected, torch.float32, 1.0, 1.0)
    assert told["error"] == float("inf") > told["allowed"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_weights_but_an_embedding_that_is_no_head(tied: bool) -> None:
    fields = {**PRESETS["nano"].fields, "num_hidden_layers": 1, "vocab_size": 400, "tie_word_embeddings": tied}
    if tied:
        loaded = from_model(build_preset(Preset("x", "qwen3", 0, "", fields), device=CPU, dtype=torch.bfloat16))
        ends = 400 * fields["hidden_size"]
        assert weight_bytes(loaded) == 2 * loaded.parameters and layer_parameters(loaded) == loaded.parameters - ends
    else:
        loaded = load_model("nano", dtype="bfloat16", device="cpu")
        ends = fields["hidden_size"] * PRESETS["nano"].fields["vocab_size"]
        assert weight_bytes(loaded) == 2 * (loaded.parameters - ends)
        assert layer_parameters(loaded) == loaded.parameters - 2 * ends


def test_steps_are_those_that_are_asked_for() -> None:
    full = cases(dry=False)
    assert {f"decode {b} × {c}" for b in (1, 8, 64, 256) for c in (128, 1024, 8192)} < full.keys()
    assert len(full["decode 64, skewed"].context) == 64 and max(full["decode 64, skewed"].context) == 8192
    assert sum(full["64 decodes and 512 of a prompt"].new) == 64 + 512


def test_steps_that_do_not_fit_are_left_out_with_a_reason(tmp_path: Path) -> None:
    """Each sequence may grow by 64 tokens: 20 take six blocks of 16."""
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    steps = {"small": Step.decodes(20), "large": Step.decodes(20, 20, 20), "middle": Step.decodes(20, 20)}
    assert fitting(place, steps, 13, "fp8, ") == ({"small": steps["small"], "middle": steps["middle"]}, 12)
    assert read(place.file) == {"fp8, large": {"left_out": "its 60 tokens of context do not fit beside the weights"}}
    with pytest.raises(LeftOutError, match=r"^no step fits the 5 KV blocks that there is memory for$"):
        fitting(place, steps, 5)


@pytest.mark.parametrize("part", ["fp8-kv", "switches", "recorded-prompts"])
def test_a_part_without_memory_for_its_steps_is_left_out(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, tmp_path / "x.jsonl", dry=True)
    monkeypatch.setattr(fp8_kv, "self_test", lambda loaded: None)
    monkeypatch.setattr(fp8_kv, "pool_blocks", lambda *_: 1)
    monkeypatch.setattr(recorded_prompts, "tokens_of", lambda *_, **__: [[1]] * 3)
    for module in (switches, recorded_prompts):
        monkeypatch.setattr(module, "default_kv_blocks", lambda *_: 1)
    runs: dict[str, Callable[[], object]] = {
        "fp8-kv": lambda: fp8_kv._tried(place, "nano", "auto"),
        "switches": lambda: switches.run(place, "nano"),
        "recorded-prompts": lambda: recorded_prompts.run(place, "nano"),
    }
    with pytest.raises(LeftOutError, match="no step fits the 1 KV blocks"):
        runs[part]()


def test_the_pool_of_steps_that_failed_is_freed_before_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU two of them do not fit."""
    pools, alive, steps = WeakSet[KVPool](), list[int](), iter([False, True, False])

    class Executor(TorchExecutor):
        def __init__(self, *args: Any, **options: Any) -> None:
            alive.append(len(pools))
            super().__init__(*args, kv_blocks=options["kv_blocks"], block_size=options["block_size"])
            pools.add(self.pool)

    def measured(executor: TorchExecutor, *_: object) -> dict[str, Any]:
        if next(steps):
            raise RuntimeError("a step that fails")
        return {"ms": 1.0}

    monkeypatch.setattr(anatomy, "TorchExecutor", Executor)
    monkeypatch.setattr(anatomy, "measured", measured)
    monkeypatch.setattr(anatomy, "cases", lambda dry: {str(n): Step.decodes(n) for n in (20, 21, 22)})
    place = Place(tmp_path, tmp_path / "anatomy.jsonl", dry=True)
    with pytest.raises(RuntimeError, match=r"^1 steps failed: 21$"):
        anatomy.run(place, "nano")
    assert alive == [0, 0]
    assert read(place.file)["21"] == {"failed": "RuntimeError: a step that fails"} and "22" in read(place.file)


def test_all_tests_that_take_a_gpu_are_run_on_it() -> None:
    """But for the profile command, which parts of their own run."""
    tests = Path(__file__).parents[1]
    on_device = {f.stem for f in (tests / "unit").glob("test_kernel_*.py") if "import DEVICE" in f.read_text()}
    assert on_device and on_device <= {f"test_kernel_{name}" for name in kernel_tests.FILES}
    on_gpu = {f.stem for f in (tests / "gpu").glob("test_*.py")} - {"test_profile_command"}
    assert on_gpu == {f"test_{name}" for name in kernel_tests.ON_GPU}


def test_parts_have_the_time_that_they_take() -> None:
    """A minute for each setting of an 8B model, whose kernels are compiled; and what is stopped may still say what it has."""
    limits = {part.name: part.limit_s for part in PARTS}
    assert limits["switches"] >= 60 * len(switches.SETTINGS)
    assert limits["controller"] > controller._WITHIN_S + verb._PATIENCE_S
