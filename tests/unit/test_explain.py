"""``autotune explain``: a decision log as a person reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import control
from autotune.cli.main import run
from autotune.control.decision_log import Decision, read_decisions
from autotune.control.explain import summarize, timeline
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.unit.control_world import SimulatedEngine, h200, poisson

START = Knobs(64, 0, 2048, 2048)
SMALLER = START.with_(token_budget=512)


def decision(at: float, action: str, regime: str, old: Knobs = START, new: Knobs = START, **more: object) -> Decision:
    return Decision(at, action, regime, old.as_dict(), new.as_dict(), 1, f"why {action}", {}, **more)  # type: ignore[arg-type]


RUN = [
    decision(10.0, "attach", ""),
    decision(12.0, "set", "compute-limited", START, SMALLER),
    decision(18.0, "observe", "compute-limited", SMALLER, SMALLER.with_(chunk_size=512)),
    decision(19.0, "hold", "demand-limited", SMALLER, SMALLER),
    decision(20.0, "pause", "demand-limited", SMALLER, SMALLER.with_(max_batch_size=8, max_wait_ms=2.5)),
    decision(25.0, "resume", "demand-limited", SMALLER, SMALLER),
    decision(26.0, "kill", "demand-limited", SMALLER, START),
    decision(26.0, "detach", "demand-limited"),
    decision(90.0, "attach", ""),
    decision(91.0, "set", "", START, SMALLER),
]


def write(path: Path, decisions: list[Decision]) -> str:
    path.write_text("".join(d.as_json() + "\n" for d in decisions), encoding="utf-8")
    return str(path)


def test_the_timeline_line_by_line() -> None:
    assert list(timeline(RUN)) == [
        "    10.000 s  attach                     why attach",
        "    12.000 s  token_budget 2048 → 512    why set [compute-limited]",
        "    18.000 s  (would set) chunk        2048 → 512  why observe [compute-limited]",
        "    19.000 s  hold                       why hold [demand-limited]",
        "    20.000 s  pause                      why pause [demand-limited]",
        "              max_batch    64 → 8",
        "              wait_ms      0 → 2.5",
        "    25.000 s  resume                     why resume [demand-limited]",
        "    26.000 s  kill                       why kill [demand-limited]",
        "              token_budget 512 → 2048",
        "    26.000 s  detach                     why detach [demand-limited]",
        "    90.000 s  attach                     why attach",
        "    91.000 s  token_budget 2048 → 512    why set",
    ]


def test_a_long_reason_is_folded_beside_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "predicted 48 ms for 13 decodes and 1593 prompt tokens (a ceiling); 64 sequences: at most 16 have run at once"
    long = decision(1.0, "set", "demand-limited", START, SMALLER.with_(max_batch_size=8))._replace(cause=why)
    assert run(["explain", write(tmp_path / "a.jsonl", [long])]) == 0
    first, second, *_ = lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert first.startswith("     1.000 s  max_batch    64 → 8        predicted 48 ms")
    assert second.startswith("              token_budget 2048 → 512  ") and second.endswith("[demand-limited]")


@pytest.fixture
def in_greenwich() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_wall_time_is_the_readers_and_a_new_day_is_said(in_greenwich: None) -> None:
    lines = list(timeline([decision(1, "hold", "r", wall=w) for w in (86399.9994, 86400.21)]))
    assert lines[0::2] == ["1970-01-01", "1970-01-02"]
    assert [line[:18] for line in lines[1::2]] == ["23:59:59.999  hold", "00:00:00.210  hold"]
    assert next(timeline([decision(1, "hold", "r", wall=1e300)])).startswith("     1.000 s")


def test_one_knob_alone() -> None:
    lines = list(timeline(RUN, knobs=["max_wait_ms"]))
    assert len(lines) == 2 and lines[1].endswith("wait_ms      0 → 2.5")


def test_the_summary_counts_changes_and_time() -> None:
    found = summarize(RUN)
    assert found.changes == {
        "token_budget": (3, 2048, 512),
        "max_batch_size": (1, 64, 8),
        "max_wait_ms": (1, 0, 2.5),
    }
    assert found.would_change == 1
    assert found.seconds == {"learning": 3.0, "compute-limited": 7.0, "demand-limited": 2.0, "paused": 5.0}
    assert list(found.lines()) == [
        "changes   token_budget 3 (2048 → 512), max_batch 1 (64 → 8), wait_ms 1 (0 → 2.5)",
        "would     have changed knobs 1 times",
        "regimes   learning 3.0 s (18%), compute-limited 7.0 s (41%), demand-limited 2.0 s (12%), paused 5.0 s (29%)",
    ]
    assert list(summarize(RUN, knobs=["chunk_size"]).changes) == []
    assert list(summarize(RUN[:1]).lines()) == ["changes   none"]


def test_time_that_jumps_back_counts_for_nothing() -> None:
    found = summarize([decision(5, "attach", ""), decision(3, "set", "a"), decision(4, "hold", "b")])
    assert found.seconds == {"learning": 0.0, "a": 1.0}


def test_a_real_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, path = SimulatedEngine(h200), tmp_path / "run.jsonl"
    with control(engine, slo=SLO(ttft_ms=500, tpot_ms=30), log=path) as attached:
        engine.play(poisson(15, 10, 1000, 200, seed=1))
    changes = sum(len(d.changes) for d in attached.decisions)  # with the last one, made as it left
    assert run(["explain", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.count("→") - told.partition("changes ")[2].count("→") == changes > 0
    assert "decodes and" in told and "changes   max_batch" in told and "regimes   learning" in told
    assert run(["explain", str(path), "--json", "--knob", "chunk_size"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [*data["changes"]] == ["chunk_size"] and data["changes"]["chunk_size"]["count"] == len(data["decisions"])
    assert sum(data["regime_seconds"].values()) > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense\n", "line 1 is not JSON; is it a decision log?"),
        (RUN[0].as_json() + "\n[]\n", "line 2 is not a decision"),
        (RUN[0].as_json().replace('"at":10.0', '"at":"x"') + "\n", "line 1: at is 'x'; it must be a finite number"),
        (RUN[0].as_json().replace('"at":10.0', '"at":NaN') + "\n", "line 1: at is nan; it must be a finite number"),
        (
            RUN[0].as_json().replace('"evidence":{}', '"evidence":3') + "\n",
            "line 1: evidence is 3; it must be an object",
        ),
        (RUN[0].as_json().replace('"max_batch_size":64', '"max_batch_size":0') + "\n", "max_batch_size is 0; it must"),
        ("[" * 9000 + "\n", "line 1 is not JSON"),
    ],
)
def test_a_bad_log_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert run(["explain", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"error: {path}: line") and says in printed.err


def test_what_is_no_log_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    log = write(tmp_path / "run.jsonl", RUN)
    for words, says in (
        ([str(tmp_path / "none")], "cannot be read: No such file"),
        ([str(tmp_path)], "cannot be read: Is a directory"),
        ([str(tmp_path / "binary")], "cannot be read: "),
        ([log, "--knob", "batch"], "--knob is batch; it must be one of max_batch_size, max_wait_ms"),
    ):
        assert run(["explain", *words]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_an_empty_log_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", write(tmp_path / "run.jsonl", [])]) == 0
    assert "holds no decision" in capsys.readouterr().out


OLD = Path(__file__).parent / "data" / "decisions-before-0.2.jsonl"
"""Written by the version before this one: an SLO that changes twice, a pause, a machine that stalls."""


def test_a_log_of_the_version_before_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By explain, and by the report; what was said then is shown as it was."""
    decisions = list(read_decisions(OLD))
    assert len(decisions) == 28 and "trim" in decisions[1].evidence
    found = summarize(decisions)
    assert found.changes["token_budget"] == (19, 2048, 64) and found.seconds.keys() > {"paused", "infeasible"}
    assert run(["explain", str(OLD)]) == 0
    shown = capsys.readouterr().out
    assert "promised from now on: default ttft=3000ms,tpot=4ms@99%" in shown and "token_budget 19 (2048 → 64)" in shown
    assert run(["report", str(OLD), "--out", str(tmp_path / "page.html")]) == 0
    assert "tpot=4ms" in (tmp_path / "page.html").read_text(encoding="utf-8")
