"""A finished study is measured anew: what becomes of the one before, and of files that are called like its copy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.cli import profile_study
from autotune.cli.display import make_console
from autotune.cli.exits import INTERRUPTED
from autotune.cli.profile_output import Files, finish
from autotune.cli.profile_study import Requested, work
from autotune.profile import load_profile
from autotune.profile.fingerprint import machine
from autotune.profiling.findings import Findings
from autotune.simulate import SimulatedEngine
from runtime.errors import InputError
from runtime.knobs import KnobLimits
from tests.sample_profile import sample_model
from tests.unit.profiled_machine import Padded, question
from tests.unit.profiles import LARGE, SMALL, VLLM, findings, run


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each session to come is stopped, in order."""
    planned: list[bool] = []

    def session(*given: Any, **named: Any) -> Any:
        found = SimpleNamespace(stopped=planned.pop(0), fault="", settings=lambda: {"balanced": None})
        return SimpleNamespace(run=lambda: found)

    monkeypatch.setattr(profile_study, "Session", session)
    monkeypatch.setattr(profile_study, "started", lambda *given: SimpleNamespace(close=lambda drain=True: None))
    return planned


def once(folder: Path, *, fresh: bool = False) -> None:
    """``autotune profile``, its session left out."""
    source = cast(Any, SimpleNamespace(name="autotune-runtime", arguments={}))
    asked = Requested(source, sample_model(), machine(), "azure-conv", None, question())
    work(
        asked, Files.of(folder / "a.yaml", None), None, None, make_console(stderr=True), limits=KnobLimits(), fresh=fresh,
        stop=lambda: False, write=lambda *given: 0,
    )  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_study_before_is_kept_until_there_is_a_new_profile(sessions: list[bool], tmp_path: Path) -> None:
    sessions += [False, True, False]
    once(tmp_path)
    first = (tmp_path / "a.journal").read_bytes()
    once(tmp_path)  # stopped
    assert names(tmp_path) == {"a.journal", "a.journal.old"} and (tmp_path / "a.journal.old").read_bytes() == first
    once(tmp_path)  # goes on
    assert names(tmp_path) == {"a.journal"}


def test_a_file_that_is_there_is_not_overwritten_and_not_removed(
    sessions: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions += [False, True, False, False]
    mine, dangling = tmp_path / "a.journal.old", tmp_path / "a.journal.old.2"
    mine.write_text("mine")
    dangling.symlink_to(tmp_path / "nowhere")
    once(tmp_path)
    first = (tmp_path / "a.journal").read_bytes()
    once(tmp_path)
    assert (tmp_path / "a.journal.old.3").read_bytes() == first
    assert "the old study is kept as " in (told := capsys.readouterr().err) and told.rstrip().endswith(
        "a.journal.old.3"
    )
    once(tmp_path)
    assert names(tmp_path) == {"a.journal", mine.name, dangling.name} and mine.read_text() == "mine"
    (tmp_path / "a.journal.old.3").write_text("mine, too")
    once(tmp_path)  # anew, and to its end
    assert names(tmp_path) == {"a.journal", mine.name, dangling.name, "a.journal.old.3"}
    assert not (tmp_path / "nowhere").exists()


def test_a_fresh_study_goes_on_to_let_the_copies_go_and_no_file_of_somebody(
    sessions: list[bool], tmp_path: Path
) -> None:
    sessions += [False, True, False, False]
    (tmp_path / "a.journal.old").write_text("mine")
    once(tmp_path)
    once(tmp_path)  # anew, and stopped
    assert names(tmp_path) == {"a.journal", "a.journal.old", "a.journal.old.2"}
    once(tmp_path, fresh=True)
    assert names(tmp_path) == {"a.journal", "a.journal.old"} and (tmp_path / "a.journal.old").read_text() == "mine"
    (tmp_path / "a.journal.old.2").write_text("mine, too")
    (tmp_path / "a.journal").write_text('{"sum": damaged\n')
    once(tmp_path, fresh=True)  # of which nothing can be read
    assert names(tmp_path) == {"a.journal", "a.journal.old", "a.journal.old.2"}


def test_a_study_that_cannot_be_kept_is_not_begun_anew(
    sessions: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions += [False]
    once(tmp_path)
    before = (tmp_path / "a.journal").read_bytes()

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autotune.cli.profile_study.shutil.copyfileobj", full)
    with pytest.raises(InputError, match=r"a\.journal\.old: cannot be written \(No space left on device\)"):
        once(tmp_path)
    assert names(tmp_path) == {"a.journal"} and (tmp_path / "a.journal").read_bytes() == before


def written(folder: Path, found: Findings, *, as_json: bool = False) -> int:
    """What ``autotune profile`` does with ``found``."""
    source = cast(Any, SimpleNamespace(name="autotune-runtime", arguments={}))
    requested = Requested(source, sample_model(), machine(), "azure-conv", None, question())
    files, console = Files.of(folder / "a.yaml", None), make_console(stderr=True)
    return finish(
        found, requested, SimulatedEngine(Padded(), kv_tokens=4096), files, console, "autotune profile", as_json
    )


@pytest.mark.parametrize("fault", ["", "the device is lost"])
def test_what_was_measured_is_not_replaced_by_what_was_only_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    measured, simulated = (run(SMALL, 40), run(VLLM, 20)), run(LARGE, 30, "simulation")
    stopped = findings(simulated, stopped=True, fault=fault)
    written(tmp_path, stopped)  # nothing is there
    assert load_profile(tmp_path / "a.yaml").knobs == LARGE
    written(tmp_path, findings(simulated, *measured))
    files = [tmp_path / "a.yaml", tmp_path / "a.points.jsonl"]
    before = [file.read_bytes() for file in files]
    capsys.readouterr()
    for as_json in (False, True):
        assert (written(tmp_path, stopped, as_json=as_json) == INTERRUPTED) == (not fault)
        assert [file.read_bytes() for file in files] == before and names(tmp_path) == {"a.yaml", "a.points.jsonl"}
        told = capsys.readouterr()
        why = f"stopped, for {fault}, before" if fault else "stopped before"
        assert f"{why} a setting was measured; " in " ".join(told.err.split())
        said = {"file": str(files[0]), "status": "stopped"}
        assert json.loads(told.out) == said if as_json else not told.out
        assert "a.yaml stays as it was. Run the same command to go on." in " ".join(told.err.split())
    written(tmp_path, findings(simulated, run(LARGE, 39), stopped=True))  # measured, too
    assert load_profile(files[0]).knobs == LARGE and load_profile(files[0]).status == "stopped"
    files[0].write_text("schema_version: 99\nname: a\n")
    written(tmp_path, stopped)  # which no version reads
    assert load_profile(files[0]).knobs == LARGE
