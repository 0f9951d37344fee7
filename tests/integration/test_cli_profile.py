"""``autotune profile`` as users run it: a real model, real files, interrupted in every way there is."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.cli.main import run
from autotune.profile import load_profile
from autotune.profile.schema import editor_line
from tests.integration.killing import measured
from tests.integration.llama_folder import LOAD_ON_CPU

QUICK = [*LOAD_ON_CPU, "--slo", "ttft=400ms,tpot=100ms"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Profiled:
    """``autotune profile`` and what it left: its exit code, what it printed, and the folder it ran in, to be read only."""

    command: list[str]
    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def profiled(model: str, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    command, folder = ["profile", "--model", model, *QUICK, "--budget", "10s"], tmp_path_factory.mktemp("profiled")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        code = run([*command, "--json"])
    return Profiled(command, code, out.getvalue(), err.getvalue(), folder)


def test_from_nothing_to_a_profile(
    profiled: Profiled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(profiled.folder)
    assert profiled.out, profiled.err
    told = json.loads(profiled.out)  # one JSON object and nothing else
    assert profiled.code == (0 if told["slo_met"] else 1), profiled.err
    assert told["file"] == "small-cpu.yaml" and told["status"] == "complete"
    assert sorted(p.name for p in Path().iterdir()) == ["small-cpu.journal", "small-cpu.points.jsonl", "small-cpu.yaml"]
    made = load_profile("small-cpu.yaml")
    assert Path("small-cpu.yaml").read_text().startswith(editor_line(Path("small-cpu.yaml")) + "schema_version: ")
    assert (made.model.name, made.model.architecture, made.model.dtype) == (
        told["profile"]["model"]["name"],
        "llama",
        "float32",
    )
    assert not made.model.random_weights
    assert made.command.startswith("autotune ")
    busy = any(
        "other programs" in warning for warning in made.warnings
    )  # then ten seconds may not do for vLLM's defaults, too
    assert busy if made.baseline is None else made.baseline.knobs.max_batch_size == 1024
    assert "validation" in {p.stage for p in made.points}
    assert made.capacity is not None and made.capacity.tried
    lines = [json.loads(line) for line in Path("small-cpu.points.jsonl").read_text().splitlines()]
    runs = [line for line in lines if "score" in line]
    assert sum(len(p.seeds) for p in made.points) == len([r for r in runs if r["stage"] != "simulation"])
    assert made.cost_model is not None and made.simulation is not None and made.confidence is not None
    planned = len([line for line in lines if line.get("kind") == "step"])
    assert made.cost_model.points >= planned  # more where a refit took in the steps of the runs
    assert made.simulation.trials == len([r for r in lines if r.get("stage") == "simulation"])
    assert {p.knobs for p in made.points if p.stage == "validation"} <= {p.knobs for p in made.simulated}
    assert "← recommended" in profiled.err and "simulating" in profiled.err and "fit error" in profiled.err
    assert run(["show", "small-cpu.yaml"]) == 0


@pytest.mark.slow
@pytest.mark.beside
def test_a_trace_is_replayed_on_the_real_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"2023-11-16 18:00:{i // 10:02d}.{i % 10}000000,{200 + 10 * (i % 7)},{8 + i % 9}" for i in range(590)]
    Path("trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    spec = "azure-conv:trace.csv,length=1/8"
    code = run(
        [
            "profile",
            "--cpu",
            "--model",
            model,
            "--workload",
            spec,
            "--trials",
            "2",
            "--budget",
            "10s",
            "--out",
            "t.yaml",
        ]
    )
    assert code in (0, 1), capsys.readouterr().err
    made = load_profile("t.yaml")
    assert made.workload.spec == spec and made.workload.length_scale == 0.125
    assert made.workload.mean_prompt == pytest.approx(230 / 8, rel=0.1)
    assert "replay of 590 requests" in made.workload.description
    assert all(p.offered > 0 for p in made.points)
    told = "".join(capsys.readouterr())
    moved = "comparing at" in told  # beside a busy neighbour: vLLM's defaults are measured all the same
    assert len({p.knobs for p in made.points if p.stage == "validation"}) <= 2 + moved, told


@pytest.mark.slow
@pytest.mark.beside
def test_two_classes_on_the_real_engine_from_the_question_to_the_bench(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = "chat=poisson:prompt=24,output=6@0.75+batch=poisson:prompt=48,output=12@0.25"
    classes = ["--class", "chat:ttft=400ms,tpot=100ms@90%", "--class", "batch:e2e=20s*0.2"]
    arguments = ["--cpu", "--dtype", "float32", "--model", model, "--workload", mix]
    code = run(["profile", *arguments, *classes, "--rate", "20", "--budget", "10s", "--out", "two.yaml", "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    told = json.loads(captured.out)
    assert code == (0 if told["slo_met"] else 1)
    made = load_profile("two.yaml")
    assert [str(one) for one in made.classes] == ["chat:ttft=400ms,tpot=100ms@90%", "batch:e2e=20000ms@99%*0.2"]
    measured = [p for p in made.points if p.stage == "validation"]
    assert measured and all({*p.classes} == {"chat", "batch"} for p in measured)
    assert all(p.offered == sum(c.offered for c in p.classes.values()) for p in measured)
    assert run(["profile", *arguments, "--class", "chat:ttft=1s", "--out", "two.yaml"]) == 2
    assert "holds a study of something else (classes was" in capsys.readouterr().err
    assert run(["bench", "--profile", "two.yaml", "--cpu", "--duration", "2s", "--rounds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == [str(one) for one in made.classes]
    for contender in told["contenders"]:
        assert {*contender["classes"]} == {"chat", "batch"}


def test_another_question_under_the_same_name_is_refused(
    profiled: Profiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(profiled.folder, tmp_path, dirs_exist_ok=True)
    before = Path("small-cpu.yaml").read_bytes()
    assert run([*profiled.command, "--seed", "4"]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and "small-cpu.journal: holds a study of something else" in error
        and "seed was 0, is now 4" in error
    )
    assert "--fresh" in error
    assert Path("small-cpu.yaml").read_bytes() == before


def test_a_model_that_cannot_be_measured_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.torch_backend.executor import TorchExecutor

    def broken(self: TorchExecutor, *args: object, **options: object) -> None:
        raise ArithmeticError("the weights melted")

    from autotune.profiling.session import Session

    real = Session.run

    def melting(self: Session) -> object:
        monkeypatch.setattr(TorchExecutor, "execute", broken)
        return real(self)

    monkeypatch.setattr(Session, "run", melting)
    assert run(["profile", "--model", model, *QUICK, "--budget", "10s"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: nothing could be measured: ") and error.count("\n") == 1
    assert not Path("small-cpu.yaml").exists()


@pytest.mark.slow
@pytest.mark.beside
def test_a_finished_study_is_kept_until_a_new_profile_is_written(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.measure.evaluate import EvaluationError
    from autotune.profiling.session import Session
    from autotune.profiling.study import SweepStudy

    studies: list[SweepStudy] = []

    def ends(self: Session) -> None:
        study: SweepStudy = self._context.study
        study.put("ran", len(studies))
        studies.append(study)
        study.finish(None, 10.0, 240)
        raise EvaluationError("that is all")

    command = ["profile", "--model", model, *QUICK, "--budget", "10s"]
    with monkeypatch.context() as patched:
        patched.setattr(Session, "run", ends)
        assert run(command) == 1
        first = Path("small-cpu.journal").read_bytes()
        assert "measuring anew" not in "".join(capsys.readouterr())
        assert run([*command, "--sim-trials", "300"]) == 1  # goes on
        assert "measuring anew" not in "".join(capsys.readouterr())
        longer = Path("small-cpu.journal").read_bytes()
        assert longer.startswith(first) and not Path("small-cpu.journal.old").exists()
        assert run(command) == 1
        captured = capsys.readouterr()
        assert (
            "measuring anew" in captured.out + captured.err and "small-cpu.journal.old" in captured.out + captured.err
        )
        assert Path("small-cpu.journal.old").read_bytes() == longer
    assert run(command) == 0
    assert Path("small-cpu.yaml").exists() and not Path("small-cpu.journal.old").exists()


def start(model: str, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "autotune.cli.main",
        "profile",
        "--model",
        model,
        *QUICK,
        "--out",
        "a.yaml",
        *options,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def wait_for_trials(process: subprocess.Popen[str], count: int) -> None:
    """Until ``count`` measurements are in the journal; what was found before them does not count."""
    give_up = time.monotonic() + 120
    journal = Path("a.journal")
    while not journal.exists() or len([key for key in measured(journal) if key.startswith("run/")]) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "no trial was done"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_best_so_far_and_the_same_command_goes_on(model: str, number: signal.Signals) -> None:
    process = start(model, "--budget", "30s")
    wait_for_trials(process, 2)
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert "stopped; best so far written to a.yaml (" in out and "Run the same command to go on." in out
    assert "Traceback" not in out + error
    first = load_profile("a.yaml")
    assert first.status == "stopped" and first.simulation is not None and first.simulation.trials >= 2
    if number is signal.SIGTERM:  # what it left is what SIGINT leaves
        return
    again = start(model, "--budget", "30s")
    out, error = again.communicate(timeout=120)
    assert again.returncode in (0, 1), error
    assert "resuming the study of an earlier run" in out and "calibrating" not in out
    second = load_profile("a.yaml")
    assert second.status == "complete" and second.calibration == first.calibration
    assert second.simulation is not None and second.simulation.trials >= first.simulation.trials
    assert {p.knobs for p in first.points} <= {p.knobs for p in second.points}


@pytest.mark.slow
@pytest.mark.beside
def test_a_second_ctrl_c_quits_at_once_and_breaks_nothing(model: str) -> None:
    process = start(model, "--budget", "40s")
    wait_for_trials(process, 1)
    for _ in range(2):  # nothing else may come between: the first is seen within 20 ms
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    begun = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - begun < 10
    assert not [p for p in Path().iterdir() if p.suffix == ".tmp"]
    if Path("a.yaml").exists():
        load_profile("a.yaml")
    again = start(model, "--trials", "2", "--budget", "20s")
    out, error = again.communicate(timeout=120)
    assert again.returncode in (0, 1), error
    assert "resuming the study of an earlier run" in out


@pytest.mark.slow
@pytest.mark.beside
def test_killed_in_a_trial_nothing_is_lost(model: str) -> None:
    process = start(model, "--trials", "4", "--budget", "40s")
    wait_for_trials(process, 2)
    process.kill()
    process.communicate(timeout=30)
    assert not Path("a.yaml").exists()
    again = start(model, "--trials", "4", "--budget", "40s")
    out, error = again.communicate(timeout=180)
    assert again.returncode in (0, 1), error
    assert "resuming the study of an earlier run" in out
    made = load_profile("a.yaml")
    lines = [json.loads(line) for line in Path("a.points.jsonl").read_text().splitlines()]
    numbers = [line["trial"] for line in lines if line.get("stage") == "simulation"]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 2
    assert made.status == "complete" and made.simulation is not None and made.simulation.trials == len(numbers)
    assert not [line for line in lines if line.get("failed") == "the process ended while it ran"]
