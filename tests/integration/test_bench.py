"""``autotune bench`` on a real model: calibrated or from a profile, plotted, and stopped halfway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.profile import save_profile
from tests.integration.llama_folder import LOAD_ON_CPU
from tests.unit.profiles import profile

LOAD = [*LOAD_ON_CPU, "--slo", "ttft=2s,tpot=500ms", "--rate", "10"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # the table of a narrow terminal folds its titles


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = run(["bench", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err  # one JSON object and nothing else


@pytest.mark.slow
@pytest.mark.beside
def test_calibrated_compared_and_plotted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--fixed", "max_batch_size=4,token_budget=32"]
    code, told, said = bench(
        capsys,
        "--model",
        model,
        *LOAD,
        "--duration",
        "1s",
        "--rounds",
        "2",
        *fixed,
        "--reject-late",
        "--out",
        "plot.html",
    )
    assert code == 0, said
    assert [c["name"] for c in told["contenders"]] == [
        "defaults", "control", "defaults, late rejected", "control, late rejected", "4/32",
    ]  # fmt: skip
    assert all(c["rounds"] == 2 and c["offered"] > 5 for c in told["contenders"])
    assert len({c["offered"] for c in told["contenders"]}) == 1
    assert told["contenders"][0]["knobs"] == {
        "max_batch_size": 1024, "max_wait_ms": 0.0, "token_budget": 8192, "chunk_size": 8192, "draft_tokens": 0,
    }  # fmt: skip
    assert [(d["name"], d["against"], d["rounds"]) for d in told["differences"]] == [
        ("control", "defaults", 2),
        ("defaults, late rejected", "defaults", 2),
        ("control, late rejected", "defaults", 2),
        ("4/32", "defaults", 2),
    ]
    assert told["slo"] == "ttft=2000ms,tpot=500ms@99%" and told["rate"] == 10 and len(told["turns"]) == 10
    assert told["contenders"][0]["attainment"]["value"] > 0.5
    assert "TTFT p99" in said and "10 req/s" in said and "plot  plot.html" in said
    assert Path("plot.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.beside
def test_with_a_profile_its_setting_and_its_load_are_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = profile()
    save_profile(made, Path("made.yaml"))
    code, told, said = bench(
        capsys, "--model", model, "--profile", "made.yaml", "--cpu", "--dtype", "float32", "--rate", "8",
        "--workload", "poisson:prompt=24,output=6", "--duration", "1s", "--rounds", "1",
    )  # fmt: skip
    assert code == 0, said
    assert [c["name"] for c in told["contenders"]] == ["defaults", "control", "profile", "control from profile"]
    assert told["contenders"][2]["knobs"] == told["contenders"][3]["knobs"] == made.knobs.as_dict()
    assert told["slo"] == str(made.slo)
    assert "calibrating" not in said


@pytest.mark.slow
@pytest.mark.beside
def test_interrupted_it_prints_what_it_has(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "bench", "--model", model, *LOAD]
    command += ["--duration", "2s", "--rounds", "50", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("measuring"):  # a line every ten seconds: some turns are done
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(said) + rest
    told = json.loads(out)
    assert told["status"] == "stopped" and 0 < len(told["turns"]) < 100
    assert f"stopped; {len(told['turns'])} of 100 turns were measured" in rest
