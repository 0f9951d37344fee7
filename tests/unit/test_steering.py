"""The steering socket: what it answers, who may reach it, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.attach import control
from autotune.attached import Control
from autotune.steerable import Steering, choose, socket_folder, steerable
from autotune.steering import LONGEST_LINE, MOST_CLIENTS
from runtime.errors import AutotuneError, InputError
from runtime.slo import SLO
from tests.engines import bench
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson

SLO_ = SLO(ttft_ms=500, tpot_ms=30)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sockets lie during a test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path / "autotune"


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(h200)


@pytest.fixture
def steered(engine: SimulatedEngine, folder: Path) -> Iterator[Control]:
    with control(engine, slo=SLO_, steer=True) as attached:
        yield attached


@pytest.fixture
def steering(steered: Control) -> Iterator[Steering]:
    with Steering(steered.steer()) as connection:
        yield connection


def raw(path: Path, sent: bytes) -> list[dict[str, Any]]:
    """Every reply to ``sent``, after which nothing more is sent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while more := connection.recv(65536):
            received += more
    return [json.loads(line) for line in received.splitlines()]


def test_only_its_owner_may_reach_it(steered: Control, folder: Path) -> None:
    path = steered.steer()
    assert path == folder / f"autotune-{os.getpid()}.sock" == steered.steer()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_status_and_decisions(engine: SimulatedEngine, steered: Control, steering: Steering) -> None:
    engine.play(poisson(15, 5, 1000, 200, seed=1))
    status = steering.ask("status")["status"]
    assert status["pid"] == os.getpid() and status["controller"] == "predictive"
    assert status["knobs"] == engine.knobs.as_dict() and status["line"] == str(steered.status())
    assert status["offered"] == len(engine.records) and status["in_slo"] > 0.5
    decisions = steering.ask("decisions", last=3)["decisions"]
    assert decisions == [json.loads(d.as_json()) for d in list(steered.decisions)[-3:]]


def test_pause_set_resume_and_kill(engine: SimulatedEngine, steered: Control, steering: Steering) -> None:
    assert steering.ask("pause")["status"]["paused"]
    assert not steering.ask("resume")["status"]["paused"]
    status = steering.ask("set", knobs={"max_batch_size": 32, "token_budget": 512})["status"]
    assert status["paused"] and engine.knobs == VLLM.with_(max_batch_size=32, token_budget=512)
    assert steering.ask("kill")["status"]["ended"]
    assert engine.knobs == VLLM and not engine.listeners
    with pytest.raises(ConnectionError, match="ended"):
        steering.ask("status")
    steered.close()
    assert not steered.steer().exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense", "not a JSON object"),
        (b"\xff\xfe\x00", "not a JSON object"),
        (b"[" * 9000, "not a JSON object"),
        (b"9" * 9000, "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"{}", "do is None; it must be one of status, pause, resume, kill, set, decisions"),
        (b'{"do":["status"]}', "do is \\['status'\\]; it must be one of"),
        (b'{"do":"status","last":3}', "'last' is not a field of status"),
        (b'{"do":"set","last":3}', "'last' is not a field of set; knobs is"),
        (b'{"do":"set"}', "knobs is None; it must be an object"),
        (b'{"do":"set","knobs":{"batch":3}}', "batch is not a knob; the knobs are max_batch_size, max_wait_ms"),
        (b'{"do":"set","knobs":{"self":3}}', "self is not a knob"),
        (b'{"do":"set","knobs":{"token_budget":9000}}', "token_budget is 9000; .*between 1 and 8192 tokens .*ceiling"),
        (b'{"do":"set","knobs":{"token_budget":NaN}}', "token_budget is nan; it must be a whole number between 1 and"),
        (b'{"do":"set","knobs":{"token_budget":1e999}}', "token_budget is inf; it must be"),
        (b'{"do":"set","knobs":{"token_budget":' + b"9" * 500 + b"}}", "token_budget is 9{1,40}\\.\\.\\.; it must be"),
        (b'{"do":"set","knobs":{"token_budget":"8"}}', "token_budget is '8'; it must be"),
        (b'{"do":"decisions","last":0}', "last is 0; it must be a whole number between 1 and 1024"),
        (b'{"do":"decisions","last":true}', "last is True; it must be"),
        (b"x" * (LONGEST_LINE + 1), f"longer than {LONGEST_LINE} bytes"),
        (b"\n \n" + b"x" * 9 * LONGEST_LINE, f"longer than {LONGEST_LINE} bytes"),
    ],
    ids=lambda value: value[:24].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_bad_requests_are_answered_with_what_is_wrong(
    engine: SimulatedEngine, steered: Control, line: bytes, says: str
) -> None:
    replies = raw(steered.steer(), line + b"\n")
    assert [*replies[0]] == ["error"]
    with pytest.raises(InputError, match=says):
        raise InputError(replies[0]["error"])
    assert engine.knobs == VLLM and not steered.status().paused
    assert raw(steered.steer(), b'{"do":"status"}\n')[0]["status"]["controller"] == "predictive"


def test_many_requests_in_one_go_are_answered_in_order(steered: Control) -> None:
    sent = b"".join(b'{"do":"decisions","last":%d}\n{"do":"status"}\n' % n for n in range(1, 40))
    replies = raw(steered.steer(), sent + b'{"do":"stat')
    assert [next(iter(reply)) for reply in replies] == ["decisions", "status"] * 39


def test_clients_that_hang_or_flood_hold_nobody_up(steered: Control, engine: SimulatedEngine) -> None:
    engine.play(poisson(15, 3, 1000, 200, seed=1))
    hanging = []
    for _ in range(3 * MOST_CLIENTS):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(steered.steer()))
        client.sendall(b'{"do":"sta')  # and never the rest
        hanging.append(client)
    flood = socket.socket(socket.AF_UNIX)
    flood.connect(str(steered.steer()))
    flood.setblocking(False)
    with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
        while True:  # asks and never reads
            flood.send(b'{"do":"decisions","last":1024}\n' * 100)
    for _ in range(3):
        with Steering(steered.steer()) as connection:
            assert connection.ask("status")["status"]["offered"] == len(engine.records)
    for client in [*hanging, flood]:
        client.close()


def test_a_flood_leaves_a_live_engine_its_pace(folder: Path) -> None:
    with bench(max_queue=64) as world, control(world.engine, slo=SLO_, steer=True) as attached:
        with socket.socket(socket.AF_UNIX) as flood:
            flood.connect(str(attached.steer()))
            flood.sendall(b'{"do":"status"}\n{"do":"decisions","last":1024}\nnonsense\n' * 300)
            done = world.engine.generate([[1, 2, 3]] * 8, max_tokens=40)
        assert all(len(completion.token_ids) == 40 for completion in done)
        with Steering(attached.steer()) as connection:
            assert connection.ask("set", knobs={"max_batch_size": 3})["status"]["knobs"]["max_batch_size"] == 3
        assert world.engine.knobs.max_batch_size == 3
        assert len(world.engine.generate([[1]] * 4, max_tokens=4)) == 4


def test_operators_and_the_engine_at_once(folder: Path) -> None:
    """Every face of a control from several threads while the engine decides: nothing locks up and no reply is lost."""
    with bench(max_queue=64) as world, control(world.engine, slo=SLO_, steer=True, interval_s=0.001) as attached:
        failures: list[BaseException] = []

        def operate(number: int) -> None:
            try:
                with Steering(attached.steer()) as connection:
                    for i in range(20):
                        connection.ask("set", knobs={"max_batch_size": 1 + (number + i) % 30})
                        connection.ask("resume")
                        connection.ask("decisions", last=50)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=operate, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            world.engine.generate([[1, 2, 3]] * 8, max_tokens=20)
        assert failures == [] and not attached.status().ended


def test_closed_with_the_control_and_reply_before_it_goes(engine: SimulatedEngine, folder: Path) -> None:
    with control(engine, slo=SLO_, steer=True) as attached:
        path = attached.steer()
        before = [t for t in threading.enumerate() if t.name.startswith("steering")]
        assert len(before) == 1
    assert not path.exists() and not before[0].is_alive()
    with pytest.raises(InputError, match="cannot be steered: No such file"):
        Steering(path)
    with pytest.raises(AutotuneError, match="detached"):
        control_that_has_ended(engine).steer()
    assert list(folder.iterdir()) == []


def control_that_has_ended(engine: SimulatedEngine) -> Control:
    with control(engine, slo=SLO_) as attached:
        pass
    return attached


def test_a_path_of_ones_own(engine: SimulatedEngine, short_path: Path) -> None:
    path = short_path / "mine.sock"
    with control(engine, slo=SLO_, steer=path) as attached:
        assert attached.steer() == path and stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InputError, match=r"mine.sock is in use by another controller"):
            control(SimulatedEngine(h200), slo=SLO_, steer=path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as left behind by a process that was killed
    with control(engine, slo=SLO_, steer=str(path)), Steering(path) as connection:
        assert connection.ask("status")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "no" / "such.sock", "cannot be made: No such file"),
        (lambda p: p / ("x" * 120), "too long for a socket"),
        (lambda p: (p / "file").write_text("") or p / "file", "exists and is not a socket"),
    ],
)
def test_a_path_that_cannot_be_is_said_and_leaves_no_lease(short_path: Path, make: Any, says: str) -> None:
    engine = SimulatedEngine(h200)
    with pytest.raises(InputError, match=says):
        control(engine, slo=SLO_, steer=make(short_path))
    engine.acquire("someone").release()
    assert not engine.listeners


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(InputError, match="must be a directory of yours with mode 0700"):
        socket_folder()
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(InputError, match="must be a directory of yours"):
        control(SimulatedEngine(h200), slo=SLO_, steer=True)


def test_without_a_runtime_directory_it_is_a_private_one_in_the_temporary(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    assert socket_folder(create=True) == short_path / f"autotune-{os.getuid()}"
    assert stat.S_IMODE(socket_folder().stat().st_mode) == 0o700


SERVER = """
import sys, time
from autotune.attach import control
from tests.unit.control_world import SimulatedEngine, h200
attached = control(SimulatedEngine(h200), slo="tpot=30ms", steer=True)
print(attached.steer(), flush=True)
time.sleep(float(sys.argv[1]))
"""


def other_process(seconds: float) -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", SERVER, str(seconds)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_finds_processes_and_forgets_dead_ones(steered: Control, folder: Path) -> None:
    process, path = other_process(60)
    try:
        assert path.name == f"autotune-{process.pid}.sock"
        assert {(p.pid, p.path) for p in steerable()} == {(os.getpid(), steered.steer()), (process.pid, path)}
        with pytest.raises(InputError, match=r"2 engines can be steered; name one .*" + str(process.pid)):
            choose(None)
        assert choose(str(process.pid)) == path
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        assert path.exists()  # it had no chance to clear it away
        assert choose(None) == steered.steer()
        assert not path.exists()
        with pytest.raises(InputError, match=rf"process {process.pid} cannot be steered"):
            choose(str(process.pid))
    finally:
        process.kill()
        process.communicate(timeout=30)
    (folder / f"autotune-{process.pid}.sock~").touch()  # killed between making it and listening
    (folder / "autotune-x.sock").touch()  # not ours to judge
    assert len(steerable()) == 1
    assert sorted(p.name for p in folder.iterdir()) == sorted([steered.steer().name, "autotune-x.sock"])


def test_a_process_that_ends_without_closing_clears_its_socket(folder: Path) -> None:
    process, path = other_process(0)
    process.communicate(timeout=30)
    assert process.returncode == 0 and not path.exists()


def test_two_controls_in_one_process_have_two_sockets(steered: Control, folder: Path) -> None:
    with control(SimulatedEngine(h200), slo=SLO_, steer=True) as second:
        assert second.steer() == folder / f"autotune-{os.getpid()}-2.sock"
        with pytest.raises(InputError, match="2 engines can be steered"):
            choose(str(os.getpid()))


def test_one_that_does_not_answer_is_given_up_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.steerable._PATIENCE_S", 0.2)
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(folder / "mute.sock"))
        mute.listen()
        with Steering(folder / "mute.sock") as connection:
            began = time.monotonic()
            with pytest.raises(ConnectionError, match=r"not answered for 0.2 s"):
                connection.ask("status")
            assert time.monotonic() - began < 20
