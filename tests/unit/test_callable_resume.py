"""A profile of a callable that was killed or stopped is gone on with: what was kept is neither called nor measured again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.profile.callable import load_callable_profile
from autotune.profile.fingerprint import machine
from autotune.profiling.callable import CallableTarget, identity
from autotune.profiling.calls import measure_calls
from autotune.profiling.study import differences, open_study
from autotune.profiling.subject import Subject
from runtime import SLO
from runtime.errors import InputError
from tests.integration.killing import measured
from tests.unit.callable_world import Ticking, interrupt_when_measured, new_study, question, subject

FUNCTION = """
import os, signal, threading, time
from pathlib import Path

def embed(texts):
    calibrating = threading.current_thread() is threading.main_thread()
    time.sleep(0.002 + 0.0002 * len(texts))
    with open("calls.log", "a") as log:
        log.write(f"{'calibrating' if calibrating else 'serving'}\\n")
    if Path("deadly").exists() and Path("embed.journal").read_text().count('"validation"') >= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(t) for t in texts]
"""
ARGUMENTS = ["profile", "--callable", "profiled_again:embed", "--inputs", "data.jsonl", "--budget", "4s",
             "--slo", "e2e=300ms@90%", "--rate", "60", "--most", "8"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "profiled_again", raising=False)
    (tmp_path / "data.jsonl").write_text("".join(f'"{"a" * n}"\n' for n in range(1, 30)))
    (tmp_path / "profiled_again.py").write_text(FUNCTION)
    return tmp_path


@pytest.mark.slow
def test_killed_while_it_measures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ARGUMENTS, "--budget", "12s"]  # on a slow machine, too, time for two settings
    (folder / "deadly").touch()
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", *arguments], capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (folder / "embed.yaml").exists()
    kept = measured(folder / "embed.journal")
    assert len(kept) == len(set(kept)) and sum(key.startswith("run/") for key in kept) == 1

    (folder / "deadly").unlink()
    (folder / "calls.log").write_text("")
    runs: list[str] = []
    original = CallableTarget.measure

    def counted(self: CallableTarget, *arguments: Any, **options: Any) -> Any:
        runs.append(str(arguments[0]))
        return original(self, *arguments, **options)

    monkeypatch.setattr(CallableTarget, "measure", counted)
    code = run(arguments)
    made = load_callable_profile("embed.yaml")
    assert code == (0 if made.slo_met else 1) and made.status == "complete"
    assert "resuming the study of an earlier run" in capsys.readouterr().out
    assert set((folder / "calls.log").read_text().split()) == {"serving"}, "nothing is calibrated again"
    both = [point for point in made.points if point.source == "measured"]
    seeds = sum(len(point.seeds) for point in both)
    assert 1 <= len(both) < seeds <= 16, "one of them is repeated at once"
    assert len(runs) == 1 + seeds - 1, "one run that nobody sees, and those that were missing"
    assert sorted(path.name for path in folder.glob("embed.*")) == ["embed.yaml"], "done: the next run begins anew"


class Killed(BaseException):
    pass


def test_killed_while_it_calibrates(tmp_path: Path) -> None:
    ticking = Ticking(0.020, 0.002)

    def deadly(items: Sequence[str]) -> list[str]:
        if len(items) == 8:
            raise Killed
        return ticking(items)

    requested = question(SLO(e2e_ms=400), 100.0, 60.0)
    (tmp_path / "inputs.jsonl").write_text('"x"\n')
    about = identity(subject(ticking), requested, tmp_path / "inputs.jsonl", machine())
    options: dict[str, Any] = {"seed": 0, "budget_s": 1e6, "most": 32, "clock": ticking.clock}
    with open_study(tmp_path / "a.journal", about) as study, pytest.raises(Killed):
        measure_calls(subject(deadly), study, **options)
    assert set(ticking.sizes) == {1, 2, 4}
    ticking.sizes.clear()
    with open_study(tmp_path / "a.journal", about) as study:
        found = measure_calls(subject(ticking), study, **options)
    assert sorted(set(ticking.sizes)) == [1, 8, 16, 32] and ticking.sizes.count(1) == 1, "one to wake it up"
    assert found.largest == 32 and found.price == pytest.approx((0.020, 0.002, 0.0), rel=0.02, abs=1e-6)
    ticking.sizes.clear()
    with open_study(tmp_path / "a.journal", about) as study:
        assert measure_calls(subject(ticking), study, **options) == found
    assert ticking.sizes == [], "nothing is called when all is known"


def test_a_study_is_of_one_cpu_and_of_the_torch_that_a_function_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking, inputs, here = Ticking(0.020, 0.002), tmp_path / "inputs.jsonl", machine()
    inputs.write_text('"x"\n')

    def about(**changes: Any) -> dict[str, Any]:
        return identity(subject(ticking), question(None, None, 60.0), inputs, here.model_copy(update=changes))

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("autotune.profiling.callable.package_version", lambda name: f"{name} 2")
    first = about(flags=("avx2",))
    assert first["torch"] == "torch 2"
    assert differences(first, about(flags=())) == ["machine.flags was ['avx2'], is now []"]
    monkeypatch.delitem(sys.modules, "torch")
    without = about(flags=("avx2",))
    assert "torch" not in without and differences(first, without) == []
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("autotune.profiling.callable.package_version", lambda name: f"{name} 3")
    assert differences(first, about(flags=("avx2",))) == ["torch was torch 2, is now torch 3"]


def test_time_of_earlier_sessions_counts(tmp_path: Path) -> None:
    ticking = Ticking(0.020, 0.002)
    about = {"function": "m:f"}
    options: dict[str, Any] = {"seed": 0, "most": 256, "clock": ticking.clock}

    class Once(Exception):
        pass

    def deadly(items: Sequence[str]) -> list[str]:
        if len(items) == 16:
            raise Once
        return ticking(items)

    whole = measure_calls(subject(ticking), new_study(), budget_s=1.1, **options)
    with open_study(tmp_path / "a.journal", about) as study, pytest.raises(Exception, match="Once"):
        measure_calls(subject(deadly), study, budget_s=1.1, **options)
    with open_study(tmp_path / "a.journal", about) as study:
        found = measure_calls(subject(ticking), study, budget_s=1.1, **options)
    assert found.largest == whole.largest and found.ended == whole.ended == "the time for calibrating was over"


@pytest.mark.slow
def test_stopped_and_gone_on_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import profiled_again as module  # type: ignore[import-not-found]

    interrupt_when_measured(module)
    assert run(ARGUMENTS) == 130
    assert "Run the same command to go on." in capsys.readouterr().out
    assert load_callable_profile("embed.yaml").status == "stopped"

    source = (folder / "profiled_again.py").read_text()
    (folder / "profiled_again.py").write_text(source + "# edited")
    assert run(ARGUMENTS) == 2
    assert "embed.journal: holds a study of something else (files of the function was " in capsys.readouterr().err
    (folder / "profiled_again.py").write_text(source)
    (folder / "data.jsonl").write_text('"other"\n')
    assert run(ARGUMENTS) == 2
    told = capsys.readouterr().err
    assert "embed.journal: holds a study of something else (inputs was " in told and told.count("\n") == 1
    assert (folder / "embed.journal").exists()
    assert run([*ARGUMENTS, "--fresh", "--budget", "3s"]) in (0, 1)
    assert load_callable_profile("embed.yaml").inputs.items == 1 and not (folder / "embed.journal").exists()


def test_a_function_that_fails_leaves_nothing_behind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profiled_again.py").write_text("def embed(texts):\n    return texts if len(texts) < 4 else []\n")
    assert run(ARGUMENTS) == 2
    assert "failed with 4 of the inputs" in capsys.readouterr().err
    assert not list(folder.glob("embed.*"))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def embed(texts):\n    raise SystemExit(3)\n", "failed with 1 of the inputs: SystemExit: 3"),
        (
            "def embed(texts):\n    return texts\ndef cost(text):\n    raise SystemExit\n",
            "failed on input 1 of data.jsonl: SystemExit",
        ),
        (
            "def embed(texts):\n    return texts\ncost = 3\n",
            "profiled_again:cost is int, not callable; it must take one input",
        ),
    ],
)
def test_a_function_or_cost_that_ends_the_program_or_is_none_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], code: str, says: str
) -> None:
    (folder / "profiled_again.py").write_text(code)
    assert run([*ARGUMENTS, *(["--cost", "profiled_again:cost"] if "cost" in code else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --c") and said.endswith(f"{says}\n") and said.count("\n") == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_function_prints_is_not_in_the_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def sweep(subject: Subject, *arguments: Any) -> int:
        subject.function([])
        print("{}", file=arguments[-1])
        return 0

    monkeypatch.setattr("autotune.cli.profile_callable._sweep", sweep)
    (folder / "profiled_again.py").write_text("print('imported')\ndef embed(texts):\n    print('called')\n")
    assert run([*ARGUMENTS, *["--json"] * as_json]) == 0
    captured = capsys.readouterr()
    assert captured.out == ("{}\n" if as_json else "imported\ncalled\n{}\n")
    assert captured.err == ("imported\ncalled\n" if as_json else "")


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_costs_nothing_that_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise InputError("embed.yaml cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("autotune.profile.callable.save_callable_profile", full)
        assert run(ARGUMENTS) == 2
    assert "No space left on device" in capsys.readouterr().err
    before = measured(folder / "embed.journal")
    assert before and not (folder / "embed.yaml").exists()
    assert run(ARGUMENTS) in (0, 1)
    assert load_callable_profile(folder / "embed.yaml").points and not (folder / "embed.journal").exists()
