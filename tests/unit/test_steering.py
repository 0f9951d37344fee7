"""The steering socket: what it answers, who may reach it, and what it survives."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import control
from autotune.cli.connection import ask
from autotune.control import remote
from autotune.control.loop import Control
from autotune.control.remote import LONGEST_LINE, MOST_CLIENTS, MOST_DECISIONS
from runtime.errors import AutotuneError, InputError
from runtime.slo import SLO
from tests.engines import bench
from tests.unit.control_world import VLLM, SimulatedEngine, poisson

SLO_ = SLO(ttft_ms=500, tpot_ms=30)


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def send(steered: Control) -> Ask:
    return functools.partial(ask, steered.steer())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs is dropped soon."""
    monkeypatch.setattr(remote._Client, "timeout", 0.1)


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


def test_only_its_owner_may_reach_it(steered: Control, socket_home: Path) -> None:
    path = steered.steer()
    assert path == socket_home / f"autotune-{os.getpid()}.sock" == steered.steer()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(socket_home.stat().st_mode) == 0o700
    assert [p.name for p in socket_home.iterdir()] == [path.name]


def test_status_and_decisions(steered_engine: SimulatedEngine, steered: Control, send: Ask) -> None:
    steered_engine.play(poisson(15, 5, 1000, 200, seed=1))
    status = send("status")["status"]
    assert status["pid"] == os.getpid() and status["controller"] == "predictive"
    assert status["knobs"] == steered_engine.knobs.as_dict() and status["line"] == str(steered.status())
    assert status["offered"] == len(steered_engine.records) and status["attainment"] > 0.5
    known = [json.loads(d.as_json()) for d in steered.decisions]
    assert send("decisions", last=3) == {"decisions": known[-3:], "total": len(known)}
    assert send("decisions", since=2) == {"decisions": known[2:], "total": len(known)}
    assert send("decisions", since=len(known)) == {"decisions": [], "total": len(known)}
    assert send("decisions", since=len(known) + 1)["decisions"] == known, "it was another controller that had so many"
    for number in range(MOST_DECISIONS):
        steered._actuator.log("note", f"{number}")
    late = send("decisions", since=len(known) - 1)
    assert late["total"] == len(known) + MOST_DECISIONS and len(late["decisions"]) == MOST_DECISIONS


def test_pause_set_resume_and_kill(steered_engine: SimulatedEngine, steered: Control, send: Ask) -> None:
    assert send("pause")["status"]["paused"]
    assert not send("resume")["status"]["paused"]
    status = send("set", knobs={"max_batch_size": 32, "token_budget": 512})["status"]
    assert status["paused"] and steered_engine.knobs == VLLM.with_(max_batch_size=32, token_budget=512)
    assert send("kill")["status"]["ended"]
    assert steered_engine.knobs == VLLM and not steered_engine.listeners
    with pytest.raises(ConnectionError, match="cannot be controlled: No such file"):
        send("status")
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
        (b'{"do":"decisions","since":-1}', "since is -1; it must be a whole number of at least 0"),
        (b'{"do":"decisions","since":true}', "since is True; it must be"),
        (b'{"do":"decisions","since":0,"last":1}', "last and since are both given"),
        (b'{"do":"decisions","knobs":0}', "'knobs' is not a field of decisions; last and since are"),
        (b"x" * (LONGEST_LINE + 1), f"longer than {LONGEST_LINE} bytes"),
        (b"\n \n" + b"x" * 9 * LONGEST_LINE, f"longer than {LONGEST_LINE} bytes"),
    ],
    ids=lambda value: value[:24].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_bad_requests_are_answered_with_what_is_wrong(
    steered_engine: SimulatedEngine, steered: Control, line: bytes, says: str
) -> None:
    replies = raw(steered.steer(), line + b"\n")
    assert [*replies[0]] == ["error"]
    with pytest.raises(InputError, match=says):
        raise InputError(replies[0]["error"])
    assert steered_engine.knobs == VLLM and not steered.status().paused
    assert raw(steered.steer(), b'{"do":"status"}\n')[0]["status"]["controller"] == "predictive"


def test_many_requests_in_one_go_are_answered_in_order(steered: Control) -> None:
    sent = b"".join(b'{"do":"decisions","last":%d}\n{"do":"status"}\n' % n for n in range(1, 40))
    replies = raw(steered.steer(), sent + b'{"do":"stat')
    assert [next(iter(reply)) for reply in replies] == ["decisions", "status"] * 39


def test_clients_that_hang_or_flood_hold_nobody_up(
    steered: Control, steered_engine: SimulatedEngine, send: Ask, quick: None
) -> None:
    steered_engine.play(poisson(15, 3, 1000, 200, seed=1))
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
        assert send("status")["status"]["offered"] == len(steered_engine.records)
    for client in [*hanging, flood]:
        client.close()


def test_some_clients_are_served_at_once_and_the_others_wait(
    steered: Control, send: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote._Client, "timeout", 0.5)
    idle = [socket.socket(socket.AF_UNIX) for _ in range(4 * MOST_CLIENTS)]
    for client in idle:
        client.connect(str(steered.steer()))
    served: list[dict[str, Any]] = []
    last, most = threading.Thread(target=lambda: served.append(send("status"))), 0
    last.start()
    while last.is_alive():
        most = max(most, sum("process_request_thread" in thread.name for thread in threading.enumerate()))
        last.join(0.01)
    for client in idle:
        client.close()
    assert served and MOST_CLIENTS // 2 < most < 2 * MOST_CLIENTS


def test_who_does_not_read_its_replies_is_dropped(steered: Control, quick: None) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(steered.steer()))
        deaf.settimeout(30)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while True:
                deaf.send(b'{"do":"status"}\n' * 100)


def test_a_flood_leaves_a_live_engine_its_speed(socket_home: Path) -> None:
    with bench(max_queue=64) as world, control(world.engine, slo=SLO_, steer=True) as attached:
        with socket.socket(socket.AF_UNIX) as flood:
            flood.connect(str(attached.steer()))
            flood.sendall(b'{"do":"status"}\n{"do":"decisions","last":1024}\nnonsense\n' * 300)
            done = world.engine.generate([[1, 2, 3]] * 8, max_tokens=40)
        assert all(len(completion.token_ids) == 40 for completion in done)
        assert ask(attached.steer(), "set", knobs={"max_batch_size": 3})["status"]["knobs"]["max_batch_size"] == 3
        assert world.engine.knobs.max_batch_size == 3
        assert len(world.engine.generate([[1]] * 4, max_tokens=4)) == 4


@pytest.mark.slow
def test_operators_and_the_engine_at_once(socket_home: Path) -> None:
    """Every face of a control from several threads while the engine decides: nothing locks up and no reply is lost."""
    with bench(max_queue=64) as world, control(world.engine, slo=SLO_, steer=True, interval_s=0.001) as attached:
        failures: list[BaseException] = []

        def operate(number: int) -> None:
            try:
                for i in range(20):
                    ask(attached.steer(), "set", knobs={"max_batch_size": 1 + (number + i) % 30})
                    ask(attached.steer(), "resume")
                    ask(attached.steer(), "decisions", last=50)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=operate, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            world.engine.generate([[1, 2, 3]] * 8, max_tokens=20)
        assert failures == [] and not attached.status().ended


def test_closed_with_the_control_and_reply_before_it_goes(steered_engine: SimulatedEngine, socket_home: Path) -> None:
    with control(steered_engine, slo=SLO_, steer=True) as attached:
        path = attached.steer()
        before = [t for t in threading.enumerate() if t.name.startswith("steering")]
        assert len(before) == 1
    assert not path.exists() and not before[0].is_alive()
    with pytest.raises(ConnectionError, match="cannot be controlled: No such file"):
        ask(path, "status")
    with pytest.raises(AutotuneError, match="detached"):
        control_that_has_ended(steered_engine).steer()
    assert list(socket_home.iterdir()) == []


def test_whoever_is_connected_at_the_end_hears_of_it(
    steered_engine: SimulatedEngine, socket_home: Path, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    """The silent, one in the middle of a request, those just accepted, and those that wait for their turn."""
    for sent in (b"", b'{"do":"sta', b'{"do":"status"}\n'):
        clients = []
        with control(steered_engine, slo=SLO_, steer=True) as attached:
            for _ in range(MOST_CLIENTS + 4):
                client = socket.socket(socket.AF_UNIX)
                client.settimeout(30)
                client.connect(str(attached.steer()))
                client.sendall(sent)
                clients.append(client)
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
            client.close()
    assert caplog.records == []


def control_that_has_ended(engine: SimulatedEngine) -> Control:
    with control(engine, slo=SLO_) as attached:
        pass
    return attached
