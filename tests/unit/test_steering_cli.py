"""``autotune watch``, ``pause``, ``resume`` and ``set`` against a live controller, as a user calls them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import autotune.cli.watch as cli_watch
from autotune import control
from autotune.cli.main import run
from autotune.cli.set_knobs import parse_settings
from autotune.cli.watch import _Lines, _look
from autotune.control.loop import Control
from autotune.control.remote import socket_folder
from autotune.report.tables import latency
from runtime.errors import InputError
from runtime.knobs import KNOBS
from runtime.request import SamplingParams
from runtime.slo import SLO
from tests.tiers import slow_but_for
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson

SLO_ = SLO(ttft_ms=500, tpot_ms=30)
WATCH = [sys.executable, "-m", "autotune.cli.main", "watch"]


@pytest.fixture
def engine() -> SimulatedEngine:
    return SimulatedEngine(h200)


@pytest.fixture
def attached(engine: SimulatedEngine, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    with control(engine, slo=SLO_, steer=True) as made:
        engine.play(poisson(15, 5, 1000, 200, seed=1))
        yield made


def test_set_pause_resume_kill(engine: SimulatedEngine, attached: Control, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["set", "max_batch_size=32", "max_wait_ms=0.5"]) == 0
    assert (engine.knobs.max_batch_size, engine.knobs.max_wait_ms) == (32, 0.5)
    assert capsys.readouterr().out == f"process {os.getpid()}: {attached.status()}\n"
    assert attached.status().paused
    assert run(["resume", str(os.getpid()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paused"] is False and not attached.status().paused
    assert run(["pause", str(attached.steer())]) == 0
    assert attached.status().paused and capsys.readouterr().out.rstrip().endswith("· paused")
    assert run(["pause", "--kill"]) == 0
    assert engine.knobs == VLLM and attached.status().ended
    assert "detached" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["watch", "--once"], ["pause", "/a/socket"], ["set", "token_budget=512"]])
def test_without_unix_sockets_it_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    assert run(words) == 2
    said = "error: a controller in another process is reached by a Unix socket, which this system does not have\n"
    assert capsys.readouterr().err == said


def test_what_an_operator_does_while_the_engine_is_idle_stands_at_its_time(
    engine: SimulatedEngine, attached: Control
) -> None:
    last = attached.latest(1)[0].at
    idle_since = engine.clock.now()
    engine.wait(7)
    assert run(["pause"]) == 0
    engine.wait(5)
    assert run(["set", "token_budget=512"]) == 0
    times = [decision.at for decision in attached.latest(2)]
    assert times == pytest.approx([idle_since + 7, idle_since + 12], abs=1e-5) and times[0] > last + 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["set", "max_batch_size=9999"], "max_batch_size is 9999; it must be .* 1024 sequences (the engine's ceiling)"),
        (["set", "token_budget=0"], "token_budget is 0; it must be a whole number between 1 and 1048576 tokens"),
        (["set", "token_budget=1.5"], "token_budget is 1.5; it must be a whole number"),
        (["set", "token_budget=many"], "token_budget is 'many'; it must be a whole number between 1 and"),
        (["set", "token_budget=1_000"], "token_budget is '1_000'; it must be a whole number between 1 and"),
        (["set", "token_budget=1", "token_budget=2"], "token_budget is given twice"),
        (["set", "budget=1"], "'budget=1' sets no knob; write KNOB=VALUE, with a knob of max_batch_size, "),
        (["set", "token_budget"], "'token_budget' sets no knob"),
        (["set"], "missing argument"),
        (["pause", "999999999"], "process 999999999 cannot be controlled: .* holds no socket of it; one opens"),
        (["watch", "no/such.sock", "--once"], "no/such.sock: cannot be controlled: No such file"),
        (["watch", "no/such.sock"], "no/such.sock: cannot be controlled: No such file"),
        (["watch", "--every", "0"], "--every is 0; it must be a number from 0.1 to 3600"),
        (["watch", "--every", "inf"], "--every is inf; it must be a number from 0.1 to 3600"),
        (["watch", "--every", "1e300"], "--every is 1e300; it must be a number from 0.1 to 3600"),
        (["watch", "--every", "nan"], "--every is nan; it must be a number from 0.1 to 3600"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(
    attached: Control, engine: SimulatedEngine, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    before = engine.knobs
    assert run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), error, re.IGNORECASE), error
    assert engine.knobs == before and not attached.status().paused


def test_every_knob_can_be_set() -> None:
    assert parse_settings([f"{spec.name}=3" for spec in KNOBS]) == dict.fromkeys((s.name for s in KNOBS), 3)
    for spec in KNOBS:
        with pytest.raises(InputError, match=spec.name):
            parse_settings([f"{spec.name}=-1"])


def test_none_or_several_to_choose_from(attached: Control, capsys: pytest.CaptureFixture[str]) -> None:
    with control(SimulatedEngine(h200), slo=SLO_, steer=True) as second:
        for verb in (["watch"], ["watch", "--once"], ["pause"], ["resume"], ["set", "chunk_size=9"]):
            assert run(verb) == 2
            error = capsys.readouterr().err
            assert "2 engines can be controlled" in error and str(attached.steer()) in error
            assert str(second.steer()) in error
        assert run(["watch", str(second.steer()), "--once"]) == 0
    attached.close()
    assert run(["watch"]) == 2
    assert (
        f"no process can be controlled: {socket_folder()} holds no socket; one opens its socket with autotune serve --slo"
        in capsys.readouterr().err
    )


def test_once(attached: Control, engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "--once"]) == 0
    shown = capsys.readouterr().out
    assert f"process         {os.getpid()}, predictive controller" in shown
    assert re.search(r"attainment +\d+\.\d% of the last \d+ \(target 99%\)", shown)
    for spec in KNOBS:
        assert f"{engine.knobs.as_dict()[spec.name]:.10g} {spec.unit}" in shown
    assert "→" in shown and "demand" in shown
    words = {word for d in list(attached.decisions)[-8:] for word in d.cause.split()}
    assert "…" not in shown and words <= set(shown.split()), "folded, and not cut as in the live view"
    status = attached.status().as_dict()["classes"]["default"]
    for name, target in status["targets_ms"].items():
        assert f"p50 {latency(status['latencies_ms'][name]['p50'])}  p99 " in shown and f"target {target:g} ms" in shown
    assert "rejected" not in shown
    assert run(["watch", "--once", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["status"]["knobs"] == engine.knobs.as_dict()
    assert data["decisions"] == [json.loads(d.as_json()) for d in list(attached.decisions)[-8:]]


def test_markup_in_a_cause_is_shown_as_it_is(
    attached: Control, engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    attached._actuator.regime = "[red]"
    attached._actuator.log("hold", "[/bold] [link=x]")
    assert run(["watch", "--once"]) == 0
    assert "[/bold] [link=x] [[red]]" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["chat[eu]", "[/x]", "[bold]"])
def test_markup_in_the_name_of_a_class_is_shown_as_it_is(
    attached: Control, engine: SimulatedEngine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    engine.set_slo(SLO_, request_class=name)
    engine.play(poisson(15, 1, 1000, 200, seed=2, start=engine.now))  # the controller hears of it
    engine.submit([1] * 8, SamplingParams(max_tokens=4), request_class=name)
    engine.run()
    assert run(["watch", "--once"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^{re.escape(name)} +\d+\.\d% of 1 within", shown, re.MULTILINE), shown
    assert re.search(rf"^{re.escape(name)} ttft +p50", shown, re.MULTILINE), shown


def test_looks_lose_no_decision(attached: Control, capsys: pytest.CaptureFixture[str]) -> None:
    """Between two looks there were more than are shown at first, and then more than the controller has in memory."""
    path, view = attached.steer(), _Lines(as_json=False)
    look = _look(path)
    assert look.decisions == [*attached.decisions][-8:] and look.missed == 0
    for count in (20, 0, 1030):
        for number in range(count):
            attached._actuator.log("note", f"this is number {number}.")
        look = _look(path, look)
        view.drawn(look)()
        shown = capsys.readouterr().out
        seen = [int(n) for n in re.findall(r"this is number (\d+)\.", shown)]
        assert seen == list(range(max(0, count - 1024), count))
        assert look.missed == max(0, count - 1024)
        assert ("6 decisions are missing here" in shown) == (count == 1030)
    _Lines(as_json=True).drawn(look)()
    line = json.loads(capsys.readouterr().out)
    assert line["missed"] == 6 and len(line["decisions"]) == 1024


def test_a_closed_engine_is_said(
    attached: Control, engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.close()
    for verb in (["pause"], ["resume"], ["set", "max_batch_size=4"]):
        assert run(verb) == 2
        assert capsys.readouterr().err == "error: the engine is closed\n"
    assert run(["watch", "--once"]) == 0
    assert "closed: its knobs no longer move" in capsys.readouterr().out
    assert run(["watch", "--once", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)["status"]
    assert status["closed"] and status["line"].endswith(" · the engine is closed")
    assert run(["pause", "--kill"]) == 0, "which ends the controller all the same"
    assert "detached" in capsys.readouterr().out


STATUS = {
    "pid": 1, "line": "x", "controller": "p", "attainment": None, "offered": 0, "regime": "", "slo": "ttft=1ms@99%",
    "paused": False, "observe_only": False, "ended": False, "knobs": {}, "classes": {},
}  # fmt: skip
ANOTHER = "speaks another version; use the autotune it was started with"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"{}", ANOTHER),
        (json.dumps({"status": STATUS, "decisions": []}).encode(), ANOTHER),
        (json.dumps({"status": STATUS | {"classes": 5}, "decisions": [], "total": 0}).encode(), ANOTHER),
        (b'{"status": {}, "decisions": [{"cause": 1}], "total": 1}', ANOTHER),
        (b'{"status": 5, "decisions": 5, "total": "many"}', ANOTHER),
        (b"5", "what answers there is no controller"),
        (b"\xff\xfe", "what answers there is no controller"),
        (b"[" * 100_000, "what answers there is no controller"),
    ],
    ids=["nothing", "earlier", "classes", "decisions", "numbers", "number", "bytes", "nested"],
)
def test_replies_that_nobody_understands_are_one_line_and_2(
    short_path: Path, capsys: pytest.CaptureFixture[str], reply: bytes, says: str
) -> None:
    with answering(short_path / "a.sock", reply) as path:
        verbs = [["watch", path, "--once"]]
        if b'"pid"' not in reply:  # else it is all that these need
            verbs += [["watch", path], ["watch", path, "--once", "--json"], ["pause", path]]
        for verb in verbs:
            assert run(verb) == 2
            output = capsys.readouterr()
            assert output.out == "" and output.err == f"error: {path}: {says}\n"


@contextmanager
def answering(path: Path, reply: bytes) -> Iterator[str]:
    """A socket that answers every line with ``reply``."""

    class Client(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for _ in self.rfile:
                self.wfile.write(reply + b"\n")

    with socketserver.ThreadingUnixStreamServer(str(path), Client) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield str(path)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("as_json", [False, True])
def test_its_end_is_said_where_it_is_no_json(
    attached: Control, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    asked, real = [], cli_watch.ask

    def ask(path: Path, do: str, **fields: Any) -> dict[str, Any]:
        if len(asked) == 2:
            attached.close()
        asked.append(do)
        return real(path, do, **fields)

    monkeypatch.setattr(cli_watch, "ask", ask)
    assert run(["watch", "--every", "0.1", *(["--json"] if as_json else [])]) == 0
    output = capsys.readouterr()
    ended = f"{attached.steer()}: it has ended, or its controller has been detached\n"
    if as_json:
        assert output.err == ended and json.loads(output.out)["missed"] == 0
    else:
        assert output.out.endswith(ended) and output.err == ""


def test_watching_ends_with_whoever_reads_it(attached: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="utf-8") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        assert run(["watch", "--every", "3600"]) == 0


def watching(*words: str, terminal: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WATCH, "--every", "0.1", *words],
        stdout=subprocess.PIPE if terminal is None else terminal, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("as_json", slow_but_for((False,), (False, True)), ids=["lines", "json"])
def test_watching_ends_cleanly_with_ctrl_c(attached: Control, as_json: bool) -> None:
    process = watching(*(["--json"] if as_json else []))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(12)]
    attached.pause()
    while "paused" not in (seen := process.stdout.readline()) or (as_json and not json.loads(seen)["status"]["paused"]):
        assert seen, "it ended by itself"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert as_json or any("→" in line for line in lines)
    assert not attached.status().ended


@pytest.mark.slow
def test_watching_ends_with_the_controller(attached: Control) -> None:
    process = watching()
    assert process.stdout is not None
    process.stdout.readline()
    attached.close()
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert out.rstrip().endswith("it has ended, or its controller has been detached")


@pytest.mark.slow
def test_on_a_terminal_it_is_one_picture(attached: Control) -> None:
    ours, theirs = pty.openpty()
    process = watching(terminal=theirs)
    os.close(theirs)
    seen = b""
    stop = threading.Timer(60, process.kill)
    stop.start()
    try:
        while seen.count(b"chunk_size") < 3:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # all of it has been read, and nobody writes any more
            while more := os.read(ours, 65536):  # a terminal that nobody reads holds up who writes to it
                seen += more
        assert process.wait(30) == 0
    finally:
        stop.cancel()
        process.kill()
        process.communicate()
        os.close(ours)
    assert b"\x1b[" in seen and b"predictive controller" in seen  # drawn over, not below


@pytest.mark.parametrize("verb", ["watch", "pause", "resume", "set", "explain"])
def test_help_has_two_examples_and_the_exit_codes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(rf"autotune {verb}\b", text.partition("Examples:")[2])) == 2
    assert "Exit codes: 0" in text and "2 " in text.partition("Exit codes:")[2]
