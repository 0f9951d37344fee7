"""The decision log's file: written beside the engine, never in its way."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

from autotune import control
from autotune.control import decision_log
from autotune.control.decision_log import Decision, DecisionLog, read_decisions
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.shared import json_lines
from runtime.slo import SLO
from tests.tiers import slow_but_for
from tests.unit.control_world import SimulatedEngine, h200, poisson
from tests.unit.paced import paced
from tests.waiting import until

KNOBS = Knobs().as_dict()


def decision(number: int, note: str = "") -> Decision:
    return Decision(float(number), "note", "learning", KNOBS, KNOBS, 0, note or f"number {number}", {"n": number})


def test_a_log_is_appended_to_a_log_and_to_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "run.jsonl", tmp_path / "mine.yaml"
    for number in range(2):
        log = DecisionLog(path)
        log.add(decision(number))
        log.join()
    assert [d.at for d in read_decisions(path)] == [0.0, 1.0]
    other.write_text("knobs: {}\n")
    with pytest.raises(InputError, match="exists and is no decision log; name another file"):
        DecisionLog(other)
    assert other.read_text() == "knobs: {}\n"


def test_a_log_that_another_controller_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_LOCK_TIMEOUT_S", 0.0)
    path = tmp_path / "run.jsonl"
    first = DecisionLog(path)
    first.add(decision(1))
    with pytest.raises(InputError, match=f"has not been closed writes its decisions to {path}; name another file"):
        DecisionLog(path)
    first.join()
    second = DecisionLog(path)
    second.add(decision(2))
    second.join()
    assert [d.at for d in read_decisions(path)] == [1.0, 2.0]
    for log in [DecisionLog("/dev/null") for _ in range(2)]:
        log.join()


def test_a_log_whose_engine_is_closed_gives_its_file_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with paced() as engine:
        control(engine, slo="ttft=1s", log=path)
    with paced() as engine, control(engine, slo="ttft=1s", log=path):
        pass
    assert [d.action for d in read_decisions(path)].count("attach") == 2


@pytest.mark.parametrize("closed", [True, False])
def test_a_log_does_not_keep_an_engine_that_nobody_has(tmp_path: Path, closed: bool) -> None:
    path, engine = tmp_path / "run.jsonl", SimulatedEngine(h200)
    control(engine, slo="ttft=1s", log=path)
    if closed:
        engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    DecisionLog(path).join()  # it gave its file up
    assert [d.action for d in read_decisions(path)] == ["attach"]


def test_a_log_that_has_ended_is_kept_by_nobody(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "run.jsonl")
    log.close()
    ended = weakref.ref(log)
    del log

    def freed() -> bool:
        gc.collect()
        return ended() is None

    until(freed)


def test_a_process_that_was_forked_meanwhile_holds_no_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = DecisionLog(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which does nothing but wait
        child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        log.join()
        DecisionLog(path).join()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_decision_that_is_no_json_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, deep = tmp_path / "run.jsonl", [0]
    for _ in range(100_000):
        deep = [deep]  # type: ignore[list-item]
    unwritable: list[dict[Any, Any]] = [{1: 2, "a": 3}, {"a": float("nan")}, {"a": object()}, {"a": deep}]
    log = DecisionLog(path)
    log.add(decision(0))
    for number, evidence in enumerate(unwritable, 1):
        log.add(decision(number)._replace(evidence=evidence))
    log.add(decision(9))
    log.join()
    assert [d.at for d in read_decisions(path)] == [0.0, 9.0]
    assert log.dropped == 4 and caplog.text.count("is not in the decision log, for it is no JSON") == 4
    assert "too slowly" not in caplog.text


def test_who_is_detached_at_once_gives_way_to_who_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = DecisionLog(path)
    for number in range(200):
        log.add(decision(number))
    log.close()
    DecisionLog(path).join()
    assert len(list(read_decisions(path))) == 200


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("opened", [False, True], ids=["nobody opened it", "it is full"])
def test_an_engine_goes_on_beside_a_pipe_that_nobody_reads(
    pipe: Path, opened: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decision_log, "_JOIN_TIMEOUT_S", 0.1)
    ends = []
    if opened:
        ends = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)]
        with pytest.raises(BlockingIOError):
            while True:
                os.write(ends[1], bytes(65536))
    engine = SimulatedEngine(h200)
    served = threading.Thread(target=lambda: _serve(engine, pipe), daemon=True)
    served.start()
    served.join(60)
    assert not served.is_alive(), "it waits for somebody to read its log"
    assert all(record.completed for record in engine.records) and len(engine.records) > 50
    assert "decisions are not in the decision log: it was written too slowly" in caplog.text
    for end in ends:
        os.close(end)


def _serve(engine: SimulatedEngine, log: Path) -> None:
    with control(engine, slo=SLO(ttft_ms=500, tpot_ms=30), log=log):
        engine.play(poisson(15, 6, 1000, 200, seed=1))


def test_what_a_full_queue_cannot_take_is_counted_and_reported(pipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = DecisionLog(pipe, queue_size=8)
    with caplog.at_level(logging.WARNING):
        log.add(decision(0, "x" * 80_000))  # more than a pipe holds: the writer cannot write it to its end,
        until(log._queue.empty)  # and so takes no other
        for number in range(1, 40):
            log.add(decision(number))
    assert log.dropped == 40 - 1 - 8 and len(log.recent) == 40, "in memory are all of them"
    assert caplog.text.count("decisions are dropped") == 1
    read = bytearray()
    until(lambda: _drain(reader, read) and b"number 8" in read)
    log.add(decision(40))
    for number in range(41, 60):  # it has room again, and none again: one line in the program's log tells of both
        log.add(decision(number))
    assert caplog.text.count("decisions are dropped") == 1
    log.close()
    log.join()
    until(lambda: _drain(reader, read) and b"number 40" in read)
    _drain(reader, read)
    os.close(reader)
    found = [json.loads(line) for line in read.decode().splitlines()]
    missing = [d["evidence"]["dropped"] for d in found if "missing here" in d["cause"]]
    assert missing[0] == 40 - 1 - 8 and found[9]["evidence"] == {"dropped": missing[0]}
    assert len(found) == 60 - log.dropped + len(missing)
    assert f"{log.dropped} decisions are not in the decision log" in caplog.text


def _drain(reader: int, read: bytearray) -> bool:
    try:
        while chunk := os.read(reader, 65536):
            read += chunk
    except BlockingIOError:
        pass
    return True


def test_all_is_written_when_it_is_closed(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log.jsonl")
    for number in range(3000):
        log.add(decision(number))
    log.join()
    assert [d.evidence["n"] for d in read_decisions(tmp_path / "log.jsonl")] == list(range(3000))
    log.add(decision(-1))
    log.join()
    assert len(list(read_decisions(tmp_path / "log.jsonl"))) == 3000, "it is closed"


_PROGRAM = """
import sys, time
from autotune.control.decision_log import DecisionLog
from tests.unit.test_decision_log import decision

log = DecisionLog(sys.argv[1])
for number in range(3000):
    log.add(decision(number))
print("added", flush=True)
if sys.argv[2] == "interrupted":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", slow_but_for(("interrupted",), ("interrupted", "ended")))
def test_all_is_written_when_the_program_ends_without_closing_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "added\n"
        if how == "interrupted":
            program.send_signal(signal.SIGINT)
        program.wait(60)
    assert len(list(read_decisions(path))) == 3000


def test_a_line_that_was_cut_off_is_left_out_and_what_follows_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = decision(0).as_json() + "\n"
    path.write_text(whole + decision(1).as_json()[:40])
    assert [d.at for d in read_decisions(path)] == [0.0]
    for number in (2, 3):
        log = DecisionLog(path)
        log.add(decision(number))
        log.join()
    assert [d.at for d in read_decisions(path)] == [0.0, 2.0, 3.0]
