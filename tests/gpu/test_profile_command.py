"""The whole command on a CUDA device: calibrate, simulate, validate, and check the profile it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autotune.cli.main import run
from autotune.profile import load_profile


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_profile_of_a_gpu_is_written_and_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        ["profile", "--gpu", "--model", "tiny", "--workload", "azure-conv:length=1/8", "--budget", "60s", "--json"]
    )
    told = json.loads(capsys.readouterr().out)
    assert code in (0, 1) and told["file"] == "tiny-gpu.yaml"
    made = load_profile("tiny-gpu.yaml")
    assert made.machine.kind == "gpu" and made.machine.gpu is not None
    assert made.machine.gpu.name == torch.cuda.get_device_name(0)
    assert made.cost_model is not None and made.cost_model.error < 0.5 and made.points
    assert run(["simulate", "--profile", "tiny-gpu.yaml", "--requests", "100", "--seeds", "1", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["settings"]
    assert run(["export", "tiny-gpu.yaml", "--to", "vllm", "--model", "some/model", "--allow-lossy"]) == 0
    assert "max-num-seqs" in capsys.readouterr().out


@pytest.mark.slow
def test_check_knows_the_machine_it_was_made_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "--gpu", "--model", "tiny", "--budget", "40s", "--json"]) in (0, 1)
    capsys.readouterr()
    assert run(["check", "tiny-gpu.yaml", "--threshold", "50%"]) in (0, 1)  # read, loaded on the device and measured
    assert "instead of" not in capsys.readouterr().out
