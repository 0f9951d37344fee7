"""``autotune explain``: a decision log as a person reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import control, simulate
from autotune.cli.main import run
from autotune.control.decision_log import Decision, read_decisions
from autotune.control.explain import summarize, timeline
from autotune.control.tally import ClassTally, losses
from autotune.profile import save_profile
from autotune.report.run.story import read_run
from autotune.workload import Arrival
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord
from runtime.serving.record_log import RecordLog
from runtime.slo import SLO, RequestClass
from tests.building import request_record
from tests.fakes import Records
from tests.sample_profile import sample_profile
from tests.unit.control_world import VLLM, Formula, SimulatedEngine, h200, poisson

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


def test_a_note_does_not_end_a_pause() -> None:
    """The SLO changes, or the profile no longer fits: the operator has still paused it."""
    noted = [
        decision(0.0, "attach", ""),
        decision(1.0, "pause", "demand-limited"),
        decision(2.0, "note", "demand-limited"),
        decision(9.0, "resume", "demand-limited"),
        decision(10.0, "detach", "demand-limited"),
    ]
    assert summarize(noted).seconds == {"learning": 1.0, "paused": 8.0, "demand-limited": 1.0}


def test_time_that_jumps_back_counts_for_nothing() -> None:
    found = summarize([decision(5, "attach", ""), decision(3, "set", "a"), decision(4, "hold", "b")])
    assert found.seconds == {"learning": 0.0, "a": 1.0}


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_wall_clock_that_is_set_meanwhile_counts_for_nothing(step: float) -> None:
    """As by NTP: the engine's clock goes on. Times of day are shown as they were logged."""
    run = [
        decision(at, action, regime, wall=1.7e9 + at + (step if at > 30 else 0))
        for at, action, regime in (
            (0, "attach", ""), (10, "hold", "a"), (60, "hold", "b"), (100, "hold", "a"), (110, "detach", "a")
        )
    ]  # fmt: skip
    assert summarize(run).seconds == {"learning": 10.0, "a": 60.0, "b": 40.0}
    assert any("a and b by turns for 90.0 s" in line for line in timeline(run, fold=True))


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
        ('{"id": "cmpl-1", "arrival": 0.5}\n', "line 1 is not a decision; is it a decision log?"),
        (RUN[0].as_json().replace('"at":10.0', '"at":"x"') + "\n", "line 1: at is 'x'; it must be a finite number"),
        (RUN[0].as_json().replace('"at":10.0', '"at":NaN') + "\n", "line 1: at is nan; it must be a finite number"),
        (
            RUN[0].as_json().replace('"evidence":{}', '"evidence":3') + "\n",
            "line 1: evidence is 3; it must be an object",
        ),
        (RUN[0].as_json().replace('"max_batch_size":64', '"max_batch_size":0') + "\n", "max_batch_size is 0; it must"),
        (re.sub('"old":{[^}]*}', '"old":3', RUN[0].as_json()) + "\n", "line 1: old is 3; it must be an object"),
        (re.sub('"new":{[^}]*}', '"new":[1]', RUN[0].as_json()) + "\n", "line 1: new is [1]; it must be an object"),
        ("[" * 9000 + "\n", "line 1 is not JSON"),
        (RUN[0].as_json().replace('"at":10.0', f'"at":1{"0" * 400}') + "\n", "line 1: at is 1000"),
        (RUN[0].as_json().replace('"at":10.0', '"at":-1.7e308') + "\n", "line 1: at is -1.7e+308; it must be a"),
        (
            RUN[0].as_json().replace('"evidence":{}', '"evidence":{"x":NaN}') + "\n",
            "line 1: evidence is no JSON: Out of",
        ),
        (
            RUN[0].as_json().replace('"evidence":{}', '"evidence":{"x":1e999}') + "\n",
            "line 1: evidence is no JSON: Out",
        ),
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


def test_a_profile_is_told_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, embed = tmp_path / "my profile.yaml", Path(__file__).parent / "data" / "callable-profile-version-1.yaml"
    save_profile(sample_profile(), mine)
    for log, prints in (
        (str(mine), f"`autotune show '{mine}'` prints it, `autotune report '{mine}'` draws it"),
        ("cpu-2core-tiny", "`autotune show cpu-2core-tiny` prints it, `autotune report cpu-2core-tiny` draws it"),
        (str(embed), f"`autotune show {embed}` prints it"),
    ):
        assert run(["explain", log]) == 2
        assert capsys.readouterr().err == f"error: {log}: is a profile, not a decision log; {prints}\n"


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


# -- where goodput went ---------------------------------------------------------------------------------------------------


def ended(number: int, name: str = "default", *, ttft: float = 0.1, **options: Any) -> RequestRecord:
    return request_record([number + ttft, number + ttft + 0.01], arrival=float(number))._replace(
        id=f"{name}-{number}", request_class=name, **options
    )


def tally(records: list[RequestRecord], slo: SLO, weight: float = 1.0) -> ClassTally:
    made = ClassTally(weight=weight)
    for record in records:
        made.add(record, slo)
    return made


REJECTED = {"reason": FinishReason.REJECTED, "token_times": [], "cause": "slo"}


def test_every_request_that_did_not_meet_its_slo_is_in_one_place() -> None:
    slo = SLO(ttft_ms=200, tpot_ms=20)
    records = [
        ended(0), ended(1), ended(2, ttft=0.3), ended(3, **REJECTED), ended(4, **(REJECTED | {"cause": "queue_timeout"})),
        ended(5, reason=FinishReason.TIMEOUT), ended(6, reason=FinishReason.CANCELLED),
        ended(7, ttft=0.5, relegated=True), ended(8, relegated=True),
    ]  # fmt: skip
    found = tally(records, slo)
    assert (found.offered, found.met, found.cancelled, found.late) == (8, 3, 1, 2)
    assert found.rejected == {"slo": 1, "queue_timeout": 1} and found.unfinished == {"timeout": 1}
    assert found.missed == {"ttft": 2} and (found.relegated, found.relegated_met) == (2, 1)
    assert found.offered - found.met == found.rejected.total() + found.unfinished.total() + found.late
    assert ClassTally.of(json.loads(json.dumps(found.as_dict()))) == found
    doubled = found + found
    assert (
        doubled.offered == 16 and doubled.rejected == {"slo": 2, "queue_timeout": 2} and doubled.missed == {"ttft": 4}
    )


def test_what_each_run_lost_counts_by_the_weight_it_had_there() -> None:
    slo = SLO(ttft_ms=200)
    cheap, dear = (tally([*map(ended, range(met)), *(ended(n, ttft=0.5) for n in range(met, 10))], slo, weight)
                   for met, weight in ((0, 1.0), (8, 5.0)))  # fmt: skip
    assert (cheap + dear).lost == (dear + cheap).lost == (cheap + dear + ClassTally(weight=5.0)).lost == 20.0
    assert (dear + dear).lost == 20.0 and (dear + dear).weight == 5.0
    assert (
        list(losses({"chat": cheap + dear}))[1]
        == "chat      20 lost at the weights of the runs; late 12 (missed ttft 12)"
    )


def test_lines_say_what_was_lost_that_which_weighs_the_most_first() -> None:
    slo = SLO(ttft_ms=200)
    chat = tally([*map(ended, range(9)), ended(9, **REJECTED)], slo)
    batch = tally([ended(n, ttft=0.5, relegated=n > 1) for n in range(4)], slo, 0.2)
    assert list(losses({"batch": batch, "chat": chat, "idle": ClassTally()})) == [
        "requests  9 of 14 met their SLO (64.3%)",
        "chat      9 of 10 met (90.0%); 1 lost at weight 1; rejected 1 (slo 1)",
        "batch     0 of 4 met (0.0%); 0.8 lost at weight 0.2; late 4 (missed ttft 4); relegated 2, of which 0 met their SLO "
        "all the same",
    ]
    assert list(losses({"default": tally([ended(0), ended(1, **REJECTED)], slo)})) == [
        "requests  1 of 2 met their SLO (50.0%)",
        "default   rejected 1 (slo 1)",
    ]
    assert (
        next(iter(losses({"default": ClassTally(offered=4000, met=3999)})))
        == "requests  3999 of 4000 met their SLO (99.98%)"
    ), "one was not"
    assert list(losses({})) == []


def test_a_missed_target_is_not_shown_to_be_met() -> None:
    """296 of 299 are 98.997%."""
    ended = {name: ClassTally(offered=299, met=296).as_dict() for name in ("chat", "default")}
    for targets, whole, chat in (
        ((99, 99), "98.997%", "98.997%"),
        ((99, 95), "99.0%", "98.997%"),
        ((95, 95), "99.0%", "99.0%"),
    ):
        slos = {name: f"ttft=1s@{share}%" for name, share in zip(("chat", "default"), targets, strict=True)}
        log = [
            decision(0, "attach", "")._replace(
                evidence={"slo": "ttft=1s@50%", "slos": {n: "ttft=1s@50%" for n in slos}}
            ),
            decision(1, "note", "")._replace(evidence={"slos": slos}),
            decision(2, "detach", "")._replace(evidence={"outcomes": ended}),
        ]
        lines = "\n".join(summarize(log).lines())
        assert f"592 of 598 met their SLO ({whole})" in lines and f"chat      296 of 299 met ({chat})" in lines
    old = [decision(0, "attach", "")._replace(evidence={"slo": "ttft=1s@99%"}), log[-1]]
    assert summarize(old).targets == {"default": 0.99} and summarize(RUN).targets == {}
    with pytest.raises(InputError, match='the SLOs of the attach at 0 s: "fast" is not a target'):
        summarize([decision(0, "attach", "")._replace(evidence={"slos": {"default": "fast"}})])


def overloaded(path: Path) -> tuple[simulate.SimulatedEngine, dict[str, list[RequestRecord]]]:
    """Twice what the machine serves: chats that cannot be met are rejected, batch requests wait."""
    slos = [RequestClass("chat", SLO(ttft_ms=500)), RequestClass("batch", SLO(ttft_ms=1000), 0.2)]
    engine = simulate.SimulatedEngine(Formula(h200), kv_tokens=760_000, knobs=VLLM, classes=slos, prefix_cache=False)
    heard = Records()
    engine.subscribe(heard)
    with control(engine, slo=SLO(ttft_ms=500), log=path, admission=True):
        for number, (due, prompt, output) in enumerate(poisson(120, 6, 1000, 50, seed=1)):
            engine.run_until(due)
            name = "batch" if number % 4 == 0 else "chat"
            engine.offer(Arrival(due, prompt, output, ((number, prompt),), name), f"{number}", due=due, shared=False)
        engine.run()
    return engine, {name: [r for r in heard.requests if r.request_class == name] for name in ("chat", "batch")}


def test_a_simulated_run_says_where_goodput_went_in_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    engine, seen = overloaded(path)
    assert all(d.wall is None and 0 <= d.at <= engine.clock.now() + 1e-6 for d in read_decisions(path)), "no wall clock"
    assert run(["explain", str(path), "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    for name, records in seen.items():
        told = outcomes[name]
        assert told["offered"] == len(records)
        assert told["met"] == sum(engine.slos[name].met(r) for r in records)
        assert sum(told["rejected"].values()) == sum(r.reason is FinishReason.REJECTED for r in records)
        assert told["relegated"] == sum(r.relegated for r in records)
    assert outcomes["chat"]["rejected"] and not outcomes["chat"]["relegated"]
    assert outcomes["batch"]["relegated"] and not outcomes["batch"]["rejected"] and outcomes["batch"]["weight"] == 0.2
    assert run(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "chat      " in text and "lost at weight 0.2" in text and "relegated" in text
    assert f"{' ' * 4}0.000 s  attach" in text


def test_the_records_of_a_run_without_an_end_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = tmp_path / "run.jsonl", tmp_path / "requests.jsonl"
    _, seen = overloaded(path)
    assert run(["explain", str(path), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["outcomes"]
    with RecordLog(kept) as log:
        for record in sorted((r for records in seen.values() for r in records), key=lambda r: r.finished):
            log.on_request(record)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"action":"detach"' not in line))
    assert run(["explain", str(path)]) == 0
    assert "requests  not known of a run that has no end in this log: --records FILE" in capsys.readouterr().out
    assert run(["explain", str(path), "--records", str(kept), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == whole


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """A log of a run with two requests that met the SLO, and of one without an end; three records of that, one late."""
    log, kept = tmp_path / "run.jsonl", tmp_path / "requests.jsonl"
    counted = {"default": tally([ended(n) for n in range(2)], SLO(ttft_ms=500)).as_dict()}
    stated = {"slos": {"default": "ttft=500ms@99%"}}
    runs = [
        decision(0.0, "attach", "")._replace(evidence=stated),
        decision(50.0, "detach", "")._replace(evidence={"outcomes": counted}),
        decision(60.0, "attach", "")._replace(evidence=stated),
    ]
    write(log, runs)
    with RecordLog(kept) as records:
        for at, ttft in ((1.0, 0.1), (2.0, 0.1), (61.0, 0.1), (62.0, 0.1), (63.0, 0.9)):
            records.on_request(request_record([at + ttft, at + ttft + 0.1], arrival=at, scheduled=at))
    return log, kept


def test_records_are_counted_with_the_runs_that_have_ended(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = two_runs
    assert run(["explain", str(log), "--records", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "requests  4 of 5 met their SLO" in shown and "not known" not in shown and "records   " not in shown
    ended_too = [*read_decisions(log), decision(70.0, "detach", "")]
    assert run(["explain", write(log, ended_too), "--records", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "requests  2 of 2 met their SLO" in shown and "the last run has ended" in shown


def test_records_that_are_of_no_use_are_said(
    two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = two_runs
    assert run(["explain", str(log), "--records", "/dev/null"]) == 0
    shown = capsys.readouterr().out
    assert "requests  2 of 2 met their SLO" in shown, "of the run that the log tells of"
    assert "records   null holds no request that came while the controller was attached" in shown
    beheaded = write(tmp_path / "beheaded.jsonl", [decision(60.0, "hold", "learning")])
    assert run(["explain", beheaded, "--records", str(kept), "--json"]) == 0
    (lacking,) = json.loads(capsys.readouterr().out)["lacking"]
    assert lacking.startswith("the log does not state the SLO of its last run: the 3 requests in ")


def test_weights_that_cannot_be_read_are_one_line(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    log, kept = two_runs
    text = log.read_text()
    log.write_text(text.replace('"evidence":{"slos"', '"evidence":{"weights":3,"slos"'))
    assert run(["explain", str(log), "--records", str(kept)]) == 2
    assert capsys.readouterr().err == f"error: {log}: the weights of the attach are 3; they must be numbers by class\n"
    for weight in (f"1{'0' * 400}", "-1", "0"):
        log.write_text(text.replace('"evidence":{"slos"', f'"evidence":{{"weights":{{"chat":{weight}}},"slos"'))
        assert run(["explain", str(log), "--records", str(kept)]) == 2
        assert "; they must be numbers by class\n" in capsys.readouterr().err


def test_flips_that_change_nothing_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flips = [decision(10.0 + i, "hold", ("demand-limited", "compute-limited")[i % 2]) for i in range(7)]
    path = write(tmp_path / "a.jsonl", [RUN[0], *flips, decision(20.0, "set", "compute-limited", START, SMALLER)])
    assert run(["explain", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("    10.000 s  hold × 7      ")
    assert " ".join(f"{lines[1][38:]} {lines[2]}".split()) == (
        "demand-limited and compute-limited by turns for 6.0 s, which changed no knob; at last: why hold [demand-limited]"
    )
    assert "why set" in lines[3]
    assert run(["explain", path, "--all"]) == 0
    assert capsys.readouterr().out.count("why hold") == 7
    assert run(["explain", path, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["decisions"]) == 9, "scripts are given every one"
    assert run(["explain", path, "--all", "--json"]) == 2
    assert capsys.readouterr().err.startswith("error: --all is given with --json, which has every decision as it is")


def test_two_holds_are_no_flips() -> None:
    assert len(list(timeline(RUN, fold=True))) == len(list(timeline(RUN)))


def test_an_observation_that_changes_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", write(tmp_path / "a.jsonl", [decision(1.0, "observe", "r")])]) == 0
    assert capsys.readouterr().out.startswith("     1.000 s  observe                    why observe [r]\n")


def test_text_that_cannot_be_encoded_is_escaped(tmp_path: Path) -> None:
    log = write(tmp_path / "a.jsonl", [decision(1.0, "hold", "r")._replace(cause="half a \ud800 pair")])
    said = subprocess.run([sys.executable, "-m", "autotune", "explain", log], capture_output=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, b"") and b"half a \\ud800 pair [r]" in said.stdout


def counts(**changed: object) -> str:
    return json.dumps({"chat": ClassTally(offered=3, met=2).as_dict() | changed})


@pytest.mark.parametrize(
    "outcomes",
    [
        "3", '{"chat":3}', '{"chat":{"weight":1}}', counts(offered=-5), counts(weight=10**400), counts(late={}),
        counts(weight=-1), counts(missed={"ttft": -1}), counts(met=10**400),
    ],
)  # fmt: skip
def test_outcomes_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcomes: str
) -> None:
    path = tmp_path / "bad.jsonl"
    line = decision(1.0, "detach", "").as_json()
    path.write_text(line.replace('"evidence":{}', f'"evidence":{{"outcomes":{outcomes}}}') + "\n")
    assert run(["explain", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: {path}: ") and printed.err.count("\n") == 1


def test_what_a_controller_of_ones_own_calls_slo_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only attaching and a change state SLOs; all other evidence is the controller's own."""
    own = {"slo": 50.0, "slos": [1, 2], "since": "long ago"}
    log = [
        decision(0, "attach", "")._replace(evidence={"slo": "ttft=1s@90%"}),
        decision(1, "hold", "steady")._replace(evidence=own),
        decision(2, "set", "steady")._replace(evidence=own),
    ]
    assert summarize(log).targets == {"default": 0.9}
    path = tmp_path / "run.jsonl"
    write(path, log)
    assert run(["explain", str(path)]) == 0
    assert [period.slos["default"].attainment for period in read_run(path).slo_periods] == [0.9]
