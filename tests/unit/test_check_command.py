"""``autotune check`` as a command: profiles it refuses, words it does not understand, and how one machine is another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.cli.check import share
from autotune.cli.main import run
from autotune.profile import save_profile
from autotune.profile.fingerprint import OtherWork, machine, measured_elsewhere
from autotune.profiling.check import _WARM_UP
from runtime.errors import InputError
from tests.sample_profile import full_profile, sample_profile


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["check", *words]) == 2
    out, error = capsys.readouterr()
    assert "\n" not in out.rstrip() and error.count("\n") == 1
    return error.removeprefix("error: ").rstrip("\n")


def test_a_profile_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h200.yaml"
    save_profile(full_profile(), path)
    said = refused(capsys, str(path))
    assert said.startswith("profile was measured on NVIDIA H200, ") and said.endswith(
        "pass --anyway to check it all the same"
    )
    here = machine()
    save_profile(full_profile(machine=here.model_copy(update={"cores": here.cores + 1})), path)
    assert refused(capsys, str(path)) == (
        f"profile was measured on {here.cores + 1} cores, this machine has {here.cores}; pass --anyway to check it all the same"
    )


def test_a_profile_without_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.yaml"
    save_profile(sample_profile(machine=machine()), path)
    assert refused(capsys, str(path)) == (
        f"{path}: holds no cost model to compare with; profile again: autotune profile --gpu --model llama-3.1-8b"
    )


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    save_profile(full_profile(machine=machine()), path)
    assert refused(capsys, "nothing").startswith(
        "nothing: cannot be read (No such file or directory), and is no shipped "
    )
    assert refused(capsys, str(path), "--budget", "0.5s") == "--budget is 0.5s; it must be at least 1s"
    assert refused(capsys, str(path), "--threshold", "10").startswith('--threshold: "10" is not a share')
    assert refused(capsys, str(path), "--model", "./nowhere").startswith("model ./nowhere: no such directory")
    for text, value in (("10%", 0.1), ("0.05", 0.05), (" 7.5 % ", 0.075)):
        assert share(text) == pytest.approx(value)
    for text in ("0", "100%", "-5%", "nan", "inf", "", "%"):
        with pytest.raises(InputError):
            share(text)


def test_the_help_says_what_comes_on_top_of_the_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["check", "--help"]) == 0
    assert "warming up takes half as much again" in capsys.readouterr().out
    assert _WARM_UP == 0.5


def test_a_profile_of_another_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.yaml"
    save_profile(full_profile(machine=machine(), engine={"name": "vllm", "version": "0.32.0"}), path)
    assert refused(capsys, str(path), "--engine", "own") == (
        "profile was measured on vllm 0.32.0, not on own; pass --anyway to check it all the same"
    )
    assert refused(capsys, str(path), "--engine", "own", "--engine-arg", "dtype=float32").startswith(
        "--engine-arg: dtype"
    )
    save_profile(full_profile(machine=machine(), engine={"name": "sglang", "version": "1"}), path)
    assert refused(capsys, str(path)) == "engine sglang cannot be started here; --engine takes own or vllm"


def test_how_a_machine_is_another() -> None:
    here = machine()
    assert measured_elsewhere(here, gpu=False) == ""
    assert measured_elsewhere(here.model_copy(update={"memory_gib": 1.0, "os": "Linux 1"}), gpu=False) == ""
    other = here.model_copy(update={"cpu": "Old CPU"})
    assert measured_elsewhere(other, gpu=False) == f"profile was measured on Old CPU, this machine has {here.cpu}"
    h200 = sample_profile().machine
    assert measured_elsewhere(h200, gpu=False) == "profile was measured on NVIDIA H200, but this run uses the CPU"


@pytest.mark.slow
def test_work_of_others_is_seen_and_ones_own_is_not() -> None:
    work = OtherWork()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    orphan = '"$0" -c "while True: pass" > /dev/null 2>&1 & echo $!'  # no descendant of ours once the shell has ended
    busy = int(subprocess.run(["sh", "-c", orphan, sys.executable], capture_output=True, check=True).stdout)
    try:
        time.sleep(0.1)  # the interpreter's start
        with_other = OtherWork()
        time.sleep(0.6)
        theirs = with_other.cores()
    finally:
        os.kill(busy, signal.SIGKILL)
    assert theirs > 0.3
    assert work.taken(10**6) > work.taken(1) >= 0
