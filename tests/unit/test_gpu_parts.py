"""The parts of the GPU script see what is wrong, and count what a step reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from benchmarks.gpu.parts import kernels
from benchmarks.gpu.parts.anatomy import cases, layer_parameters, weight_bytes
from benchmarks.gpu.place import Place, read
from runtime.torch_backend.cuda.language import INTERPRETED
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
