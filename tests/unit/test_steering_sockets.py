"""Where steering sockets lie: paths of one's own, folders, other processes, dead ones."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune import control
from autotune.cli import connection
from autotune.cli.connection import ask, choose
from autotune.control.loop import Control
from autotune.control.remote import socket_folder, steerable
from runtime.errors import InputError
from runtime.slo import SLO
from tests.unit.control_world import SimulatedEngine, h200

SLO_ = SLO(ttft_ms=500, tpot_ms=30)
ROOT = Path(__file__).parents[2]


def test_a_path_of_ones_own(steered_engine: SimulatedEngine, short_path: Path) -> None:
    path = short_path / "mine.sock"
    with control(steered_engine, slo=SLO_, steer=path) as attached:
        assert attached.steer() == path and stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InputError, match=r"mine.sock is in use by another controller"):
            control(SimulatedEngine(h200), slo=SLO_, steer=path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as left behind by a process that was killed
    with control(steered_engine, slo=SLO_, steer=str(path)):
        assert ask(path, "status")


def test_a_socket_of_another_that_came_to_its_path_is_left_alone(
    steered_engine: SimulatedEngine, short_path: Path
) -> None:
    path = short_path / "mine.sock"
    with control(steered_engine, slo=SLO_, steer=path) as first:
        path.unlink()  # as what clears a temporary directory does
        with control(SimulatedEngine(h200), slo=SLO_, steer=path):
            first.close()
            assert ask(path, "status")
        assert not path.exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "no" / "such.sock", "cannot be made: No such file"),
        (lambda p: p / ("x" * 120), "too long for a socket"),
        (lambda p: (p / "file").write_text("") or p / "file", "exists and is not a socket"),
    ],
)
def test_a_path_that_cannot_be_is_said_and_leaves_no_lease(
    steered_engine: SimulatedEngine, short_path: Path, make: Any, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        control(steered_engine, slo=SLO_, steer=make(short_path))
    steered_engine.acquire("someone").release()
    assert not steered_engine.listeners


def test_files_beside_it_are_left_alone(steered_engine: SimulatedEngine, short_path: Path) -> None:
    path = short_path / "mine.sock"
    kept, other = short_path / "mine.sock~", short_path / "other.sock~"
    kept.write_text("what an editor keeps")
    with socket.socket(socket.AF_UNIX) as of_another_program:
        of_another_program.bind(str(other))
        with control(steered_engine, slo=SLO_, steer=path):
            assert {file.name for file in short_path.iterdir()} == {path.name, kept.name, other.name}
        with control(steered_engine, slo=SLO_, steer=short_path / "other.sock"):
            pass
        assert {file.name for file in short_path.iterdir()} == {kept.name, other.name}
    assert kept.read_text() == "what an editor keeps"


def test_the_longest_path(steered_engine: SimulatedEngine, short_path: Path) -> None:
    """Its socket is bound under another name first, which must fit, too."""
    folder = short_path / ("x" * (97 - len(str(short_path))))
    folder.mkdir()
    with control(steered_engine, slo=SLO_, steer=folder / "s") as attached:
        assert len(str(attached.steer())) == 100 and ask(attached.steer(), "status")


def test_a_folder_that_others_can_write_to_is_refused(socket_home: Path) -> None:
    socket_home.mkdir()
    socket_home.chmod(0o755)
    with pytest.raises(InputError, match="must be a directory of yours with mode 0700"):
        socket_folder()
    socket_home.rmdir()
    socket_home.symlink_to(socket_home.parent)
    with pytest.raises(InputError, match="must be a directory of yours"):
        control(SimulatedEngine(h200), slo=SLO_, steer=True)


def test_without_a_runtime_directory_it_is_a_private_one_in_the_temporary(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    assert socket_folder() == short_path / f"autotune-{os.getuid()}"
    assert stat.S_IMODE(socket_folder().stat().st_mode) == 0o700


def test_without_any_folder_to_write_to_it_says_so(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert socket_folder() == short_path / "autotune", "a runtime directory is enough"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    with pytest.raises(InputError, match="steer: there is no folder for a socket: No usable temporary directory"):
        socket_folder()


SERVER = """
import sys, time
from autotune import control
from tests.unit.control_world import SimulatedEngine, h200
attached = control(SimulatedEngine(h200), slo="tpot=30ms", steer=True)
print(attached.steer(), flush=True)
time.sleep(float(sys.argv[1]))
"""


def other_process(seconds: float, program: str = SERVER) -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", program, str(seconds)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_finds_processes_and_forgets_dead_ones(steered: Control, socket_home: Path) -> None:
    process, path = other_process(60)
    try:
        assert path.name == f"autotune-{process.pid}.sock"
        assert steerable() == {steered.steer(): os.getpid(), path: process.pid}
        with pytest.raises(InputError, match=r"2 engines can be controlled; name one .*" + str(process.pid)):
            choose(None)
        assert choose(str(process.pid)) == path
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        assert path.exists()  # it had no chance to clear it away
        assert choose(None) == steered.steer()
        assert not path.exists()
        with pytest.raises(InputError, match=rf"process {process.pid} cannot be controlled"):
            choose(str(process.pid))
    finally:
        process.kill()
        process.communicate(timeout=30)
    (socket_home / "autotune-x.sock").touch()  # not ours to judge
    assert len(steerable()) == 1
    assert sorted(p.name for p in socket_home.iterdir()) == sorted([steered.steer().name, "autotune-x.sock"])


def test_a_process_that_ends_without_closing_clears_its_socket(socket_home: Path) -> None:
    process, path = other_process(0)
    process.communicate(timeout=30)
    assert process.returncode == 0 and not path.exists()


def test_a_forked_child_leaves_its_parents_socket_alone(socket_home: Path) -> None:
    forks = "import os, sys\nif not os.fork():\n    sys.exit()\nprint(os.wait()[1], flush=True)\n"
    before, waits = SERVER.rsplit("time.sleep", 1)
    process, path = other_process(60, f"{before}{forks}time.sleep{waits}")
    try:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        assert ask(path, "status")["status"]["pid"] == process.pid
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_two_controls_in_one_process_have_two_sockets(steered: Control, socket_home: Path) -> None:
    with control(SimulatedEngine(h200), slo=SLO_, steer=True) as second:
        assert second.steer() == socket_home / f"autotune-{os.getpid()}-2.sock"
        with pytest.raises(InputError, match="2 engines can be controlled"):
            choose(str(os.getpid()))


def test_one_that_does_not_answer_is_given_up_on(socket_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.2)
    socket_home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_home / "mute.sock"))
        mute.listen()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=r"mute.sock: it has not answered for 0.2 s"):
            ask(socket_home / "mute.sock", "status")
        assert time.monotonic() - began < 20
