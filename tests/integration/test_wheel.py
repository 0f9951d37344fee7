"""The wheel: what is inside, and that installed somewhere else it profiles a machine and goes on with a run that was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.profile import Profile, load_profile

ROOT = Path(__file__).parents[2]
EASY = "ttft=60s,tpot=10s@50%"  # kept on the slowest machine, so that the exit code is known


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_what_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        meta = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(meta).decode()
        entry = archive.read(meta.replace("METADATA", "entry_points.txt")).decode()
    files = [path for room in ("autotune", "runtime") for path in (ROOT / room).rglob("*") if path.is_file()]
    here = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    shipped = ROOT / "profiles"
    profiles = {f"autotune/_profiles/{path.relative_to(shipped)}" for path in shipped.rglob("*") if path.is_file()}
    dist_info = {name for name in names if ".dist-info/" in name}
    assert names - dist_info == here | profiles
    assert {
        "autotune/py.typed",
        "runtime/py.typed",
        "autotune/_profiles/README.md",
        "autotune/_profiles/profile.schema.json",
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in dist_info)
    assert "License-Expression: Apache-2.0" in metadata
    assert "autotune = autotune.cli.entry:main" in entry


class Installed:
    """The wheel in an environment of its own, used from a folder outside the repository."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def start(self, *words: str, log: str) -> subprocess.Popen[str]:
        """``autotune`` with ``words``. Its output goes to a file: a full pipe would stop it."""
        own = ("PYTHON", "VIRTUAL_ENV", "COVERAGE")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"HF_HUB_OFFLINE": "1"}
        command = [str(self.python.with_name("autotune")), *words]
        with (self.folder / log).open("w") as file:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=file, stderr=file, text=True)

    def run(self, *words: str, log: str = "out.txt") -> tuple[int, str]:
        process = self.start(*words, log=log)
        try:
            return process.wait(timeout=400), (self.folder / log).read_text()
        finally:
            process.kill()
            process.wait()

    def finished_trials(self, name: str) -> dict[int, float | None]:
        """The value of every complete trial, read from a copy of the journal: the original is being written."""
        journal, copy = self.folder / f"{name}.journal", self.folder / "copy.journal"
        if not journal.exists():
            return {}
        data = journal.read_bytes()
        copy.write_bytes(data[: data.rfind(b"\n") + 1])
        storage = JournalStorage(JournalFileBackend(str(copy)))
        (study,) = optuna.get_all_study_names(storage) or [None]
        trials = optuna.load_study(study_name=study, storage=storage).trials if study else []
        return {trial.number: trial.value for trial in trials if trial.state is TrialState.COMPLETE}

    def profile(self, name: str) -> Profile:
        return load_profile(self.folder / f"{name}.yaml")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    home = tmp_path_factory.mktemp("elsewhere")
    assert ROOT not in home.parents
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, timeout=120)
    python = home / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, cwd=home, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (home / "run").mkdir()
    yield Installed(python, home / "run")
    shutil.rmtree(home)  # 1.4 GB


pytestmark = pytest.mark.timeout(1500)


@pytest.mark.slow
@pytest.mark.beside
def test_it_profiles_a_machine(installed: Installed) -> None:
    code, output = installed.run("profile", "--cpu", "--slo", EASY, "--budget", "20s", "--out", "plain.yaml")
    assert code == 0, output
    made = installed.profile("plain")
    assert made.status == "complete" and made.slo_met
    assert str(made.slo) == "ttft=60000ms,tpot=10000ms@50%"
    assert made.model.name in ("nano", "tiny") and made.machine.kind == "cpu"
    assert made.baseline is not None and made.points
    assert (installed.folder / made.points_file).is_file()
    code, shown = installed.run("show", "plain.yaml")
    assert code == 0 and "← recommended" in shown
    code, shown = installed.run("report", "plain.yaml")
    assert code == 0 and (installed.folder / "plain.html").stat().st_size > 1_000_000, shown  # plotly is inside


@pytest.mark.slow
@pytest.mark.beside
def test_it_finds_the_shipped_profiles(installed: Installed) -> None:
    code, output = installed.run("profiles", "--json")
    assert code == 0, output
    listed = json.loads(output)
    shipped = ROOT / "profiles"
    assert set(listed) == {str(path.relative_to(shipped).with_suffix("")) for path in shipped.rglob("*.yaml")} != set()
    for entry in listed.values():
        assert Path(entry["path"]).is_relative_to(installed.python.parents[1]), "not those of the repository"


@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("profile", "--slo", "tpot=50"), 'error: --slo: "tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
        (("profile", "--model", "./nothing-here"), "nothing-here"),
        (("show", "nothing-here.yaml"), "error: nothing-here.yaml: cannot be read"),
        (("profile", "--pin", "batch=3"), "batch"),
        (("profile", "--no-such-option"), "--no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(installed: Installed, words: tuple[str, ...], says: str) -> None:
    code, output = installed.run(*words)
    lines = [line for line in output.splitlines() if " · loading " not in line]
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


def wait_for_trials(
    installed: Installed, process: subprocess.Popen[str], name: str, least: int
) -> dict[int, float | None]:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, "it ended before it could be interrupted"
        if len(done := installed.finished_trials(name)) >= least:
            return done
        time.sleep(0.1)
    raise AssertionError(f"fewer than {least} trials in 300 s")


@pytest.mark.slow
@pytest.mark.beside
def test_a_run_that_was_killed_goes_on(installed: Installed) -> None:
    words = ("profile", "--cpu", "--slo", EASY, "--budget", "20s", "--out", "killed.yaml")
    process = installed.start(*words, log="killed.txt")
    try:
        before = wait_for_trials(installed, process, "killed", 8)  # the calibration, and a few that were simulated
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (installed.folder / "killed.yaml").exists(), "a profile is written at the end, whole"

    code, output = installed.run(*words)
    assert code == 0, output
    assert installed.profile("killed").status == "complete"
    after = installed.finished_trials("killed")
    assert {number: after.get(number) for number in before} == before, "what was measured is not measured again"
    assert len(after) > len(before)
    assert not list(installed.folder.glob(".*.tmp"))
