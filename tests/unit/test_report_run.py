"""The page of a run under a controller: what it says is what the log and the records say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from autotune import control
from autotune.cli.main import run as cli
from autotune.control.decision_log import describe, read_decisions
from autotune.report.run import compose, html, read_run, service
from autotune.report.run.service import binned
from autotune.report.run.story import SLOsFrom
from autotune.report.run.turning import knobs
from autotune.report.wording import percent
from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord, percentile
from runtime.serving.record_log import RecordLog
from runtime.slo import SLO, attainment
from tests.unit.control_world import SimulatedEngine, h200, poisson
from tests.unit.paced import paced

TARGET = SLO(ttft_ms=300, tpot_ms=30)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The log and the records of a run past capacity that turns requests away."""
    folder = tmp_path_factory.mktemp("run")
    log, records = folder / "run.jsonl", folder / "requests.jsonl"
    engine = SimulatedEngine(h200)
    with RecordLog(records) as kept:
        engine.subscribe(kept)
        engine.play(poisson(5, 3, 500, 50, seed=1))  # before anybody controls it
        with control(engine, slo=TARGET, log=log, admission=True):
            engine.play(poisson(35, 10, 1500, 150, seed=2, start=engine.now))
    return log, records


def test_it_says_what_the_records_say(files: tuple[Path, Path]) -> None:
    log, records = files
    run = read_run(log, records)
    made = compose(run)
    found = {section.key: section for section in made.sections}
    assert all(section.absent is None for section in made.sections)
    of = attainment(run.records, TARGET)
    assert 0.2 < of.share < 0.9 and run.slo == TARGET and min(r.arrival for r in run.records) >= run.start
    assert f"of {of.offered} requests within {TARGET}" in found["service"].title
    away = sum(r.reason is FinishReason.REJECTED for r in run.records)
    assert away > 20 and str(away) in found["rejected"].plots[0].summary
    assert sum(int(row[1]) for row in found["rejected"].tables[0].rows) == away
    assert {plot.title for plot in found["latency"].plots} == {"TTFT", "TPOT"}
    decisions = list(read_decisions(log))
    assert len(found["decisions"].tables[0].rows) == len(decisions)
    said = found["decisions"].tables[0].rows[0][-1]  # that of the attachment
    assert "slos (default " in said and not set("{}'") & set(said), "no Python in it"
    turned = {name for d in decisions for name, _, _ in d.changes}
    assert {plot.key for plot in found["knobs"].plots} == {f"knob-{name}" for name in turned} != set()
    for plot in found["knobs"].plots:
        assert plot.views[0].data[0]["y"][-1] == decisions[-1].new[plot.title], "the line ends at the knob's last value"
    assert sum(len(some) for _, some in binned(run)) == len(run.records)


def test_the_last_request_is_no_stretch_of_its_own(files: tuple[Path, Path]) -> None:
    run = read_run(*files)
    record = run.records[0]

    def lasting(seconds: int) -> list[tuple[float, list[RequestRecord]]]:
        """Ten requests a second."""
        times = [seconds * i / (10 * seconds) for i in range(10 * seconds + 1)]
        return list(binned(replace(run, records=tuple(record._replace(arrival=run.start + at) for at in times))))

    for seconds in (120, 610):
        stretches = lasting(seconds)
        assert len(stretches) == 60 and len(stretches[-1][1]) > 5 and stretches[-1][0] < seconds
    assert len(lasting(30)) == 31, "of a second each"


def test_it_says_who_was_relegated(files: tuple[Path, Path], tmp_path: Path) -> None:
    log, records = files
    changed = tmp_path / "relegated.jsonl"
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    changed.write_text("".join(json.dumps(line | {"relegated": line["reason"] == "length"}) + "\n" for line in lines))
    run = read_run(log, changed)
    (found,) = (section for section in compose(run).sections if section.key == "rejected")
    late = [r for r in run.records if r.reason is FinishReason.LENGTH]
    met = sum(TARGET.met(r) for r in late)
    assert met > 0 and f"{len(late)} were relegated" in found.lead and f"{met} of them met theirs" in found.lead
    (plain,) = (section for section in compose(read_run(log, records)).sections if section.key == "rejected")
    assert plain.lead == ""


def test_of_requests_that_were_all_cancelled_none_is_judged(files: tuple[Path, Path]) -> None:
    run = read_run(*files)
    made = compose(replace(run, records=tuple(r._replace(reason=FinishReason.CANCELLED) for r in run.records)))
    found = {section.key: section for section in made.sections}
    assert found["service"].absent == "Every request on record was cancelled by its client."
    assert found["rejected"].title == "Nobody was rejected" and '<section id="service"' in html(made)


def test_what_was_rejected_is_a_share_of_the_requests_that_attainment_is_of(files: tuple[Path, Path]) -> None:
    run = read_run(*files)
    some = replace(
        run,
        records=tuple(
            r if r.reason is FinishReason.REJECTED or i % 2 else r._replace(reason=FinishReason.CANCELLED)
            for i, r in enumerate(run.records)
        ),
    )
    made = {section.key: section for section in compose(some).sections}
    offered = some.judged(some.records).offered
    away = sum(r.reason is FinishReason.REJECTED for r in some.records)
    assert 0 < away < offered < len(some.records)
    assert f" of {offered} requests" in made["service"].title
    assert made["rejected"].title == f"{percent(away / offered)} were rejected"
    assert made["rejected"].plots[0].summary == f"{away} of {offered} requests were rejected."
    assert sum(int(row[1]) for row in made["rejected"].tables[0].rows) == away
    assert all(row[2] == percent(int(row[1]) / offered) for row in made["rejected"].tables[0].rows)


def test_the_page_is_whole_and_escapes_its_input(files: tuple[Path, Path], tmp_path: Path) -> None:
    log, records = files
    evil = tmp_path / "evil.jsonl"
    text = log.read_text(encoding="utf-8").replace("predictive controller", "<script>alert(1)</script>")
    evil.write_text(text, encoding="utf-8")
    page = html(compose(read_run(evil, records)))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    marked_up = page.partition('<script type="application/json"')[0]
    assert "<section" in marked_up
    assert not re.search(r'(src|href)="(?!#|data:)', marked_up), "nothing is loaded from anywhere"
    for key in ("service", "knobs", "regimes", "latency", "rejected", "decisions"):
        assert f'<section id="{key}"' in page
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert {"attainment", "rejected", "over-ttft", "over-tpot"} <= set(plots)


def test_what_the_controller_turned_and_what_its_operator_did_are_told_apart(files: tuple[Path, Path]) -> None:
    run = read_run(files[0])
    turned = [d for d in run.decisions if d.action == "set" and d.changes]
    by_hand = turned[0]._replace(action="pause", old=turned[0].old, new=turned[0].old | {"token_budget": 777.0})
    attached = run.decisions[0]
    assert knobs(replace(run, decisions=(attached, by_hand))).title == (
        "The controller changed no knob; its operator by hand token_budget once"
    )
    both = knobs(replace(run, decisions=(*run.decisions, by_hand))).title
    assert both == f"{knobs(run).title}; its operator by hand token_budget once"


def test_knobs_that_were_restored_were_not_turned(files: tuple[Path, Path]) -> None:
    run = read_run(files[0])
    turned = next(d for d in run.decisions if d.action == "set" and d.changes)
    back = turned._replace(action="kill", old=turned.new, new=turned.old)
    assert knobs(replace(run, decisions=(run.decisions[0], back))).title == (
        "The controller changed no knob; the knobs from before it were restored"
    )


def test_after_a_reboot_an_earlier_run_is_not_counted(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The clock of the machine begins anew, and both files go on."""
    log, records = files
    both = tmp_path / "both.jsonl"
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for name in ("arrival", "finished"):
            line[name] += 50_000.0
    before = "".join(json.dumps(line) + "\n" for line in lines)
    both.write_text(before + records.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_run(log, both).records == read_run(log, records).records


@pytest.mark.parametrize("named", [True, False], ids=["the log names its boot", "an older log"])
def test_a_boot_whose_times_never_fall_back_is_not_counted(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """The machine ran for less long before than it does now: only the name of the boot tells."""
    log, records = files
    monkeypatch.setattr("runtime.serving.record_log.boot", lambda: "0000aaaa")
    both, run = tmp_path / "both.jsonl", read_run(log, records)
    with RecordLog(both) as earlier:
        for record in run.records[:3]:
            earlier.on_request(record._replace(id=f"earlier-{record.id}", finished=run.records[0].finished))
    monkeypatch.setattr("runtime.serving.record_log.boot", lambda: "0000bbbb")
    with RecordLog(both) as later:
        for record in run.records:
            later.on_request(record)
    if named:
        first, _, rest = log.read_text(encoding="utf-8").partition("\n")
        attached = json.loads(first)
        attached["evidence"]["boot"] = "0000bbbb"
        log = tmp_path / "named.jsonl"
        log.write_text(f"{json.dumps(attached)}\n{rest}", encoding="utf-8")
    assert read_run(log, both).records == run.records


def test_a_run_without_a_request_since_the_boot_has_none_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("autotune.control.loop"), "boot", lambda: "0000bbbb")
    monkeypatch.setattr("runtime.serving.record_log.boot", lambda: "0000aaaa")
    log, records = tmp_path / "run.jsonl", tmp_path / "requests.jsonl"
    with paced() as engine, control(engine, slo=TARGET, log=log):
        now = engine.clock.now() + 100.0
        with RecordLog(records) as kept:
            kept.on_request(
                RequestRecord("a", now, now, now, (now,), 3, 1, 0, 0, FinishReason.STOP, "default", "", 0, 0, 0)
            )
    run = read_run(log, records)
    assert run.decisions[0].evidence["boot"] == "0000bbbb" and run.records == ()
    assert run.unrecorded == "requests.jsonl holds no request that came while the controller was attached."


def test_a_log_that_does_not_state_the_slo(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first lines are gone, as where logs are rotated."""
    log, records = files
    beheaded = tmp_path / "beheaded.jsonl"
    beheaded.write_text(log.read_text(encoding="utf-8").partition("\n")[2], encoding="utf-8")
    made = compose(read_run(beheaded, records))
    found = {section.key: section.absent for section in made.sections}
    assert found["service"] == found["latency"] == "The log does not state the SLO of this run."
    assert found["rejected"] is None and made.head.who == "the beginning of the log is missing"
    assert cli(["report", str(beheaded), "--records", str(records), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("wall", [1.7e12, 1e20])
def test_a_time_that_no_calendar_has(files: tuple[Path, Path], wall: float) -> None:
    run = read_run(files[0])
    assert replace(run, decisions=(run.decisions[0]._replace(wall=wall),)).day == ""


def test_a_log_with_a_long_first_line_is_drawn(files: tuple[Path, Path], tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    text = files[0].read_text(encoding="utf-8").replace("predictive controller", "x" * 100_000, 1)
    long.write_text(text, encoding="utf-8")
    assert cli(["report", str(long), "--out", str(tmp_path / "page.html")]) == 0


def test_without_records_it_says_what_is_lacking(files: tuple[Path, Path]) -> None:
    made = compose(read_run(files[0]))
    absent = {section.key for section in made.sections if section.absent}
    assert absent == {"service", "latency", "rejected"}
    assert all("Without --records" in section.absent for section in made.sections if section.absent)
    assert any("Without --records" in text for text in made.run.lacking)
    assert "The controller changed" in made.head.title


def test_the_last_run_of_a_log_that_holds_several(files: tuple[Path, Path], tmp_path: Path) -> None:
    log, records = files
    both = tmp_path / "both.jsonl"
    both.write_text(log.read_text(encoding="utf-8") * 2, encoding="utf-8")
    run = read_run(both, records)
    assert len(run.decisions) == len(read_run(log).decisions)
    assert "earlier runs" in run.lacking[0]


def test_requests_that_came_after_the_controller_was_detached_are_not_of_its_run(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    log, records = files
    run = read_run(log, records)
    last = max(run.records, key=lambda r: r.arrival)
    kept = tmp_path / "requests.jsonl"
    kept.write_text(records.read_text(encoding="utf-8"), encoding="utf-8")
    with RecordLog(kept) as more:
        for late in (0.0, 0.5):  # it serves on, and nobody controls it
            at = run.decisions[-1].at + late
            more.on_request(last._replace(id=f"late-{late}", arrival=at, finished=at + 9.0))
    whole = read_run(log, kept)
    assert [r.id for r in whole.records if r.id.startswith("late")] == ["late-0.0"]
    undone = tmp_path / "undone.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    undone.write_text("".join(line for line in lines if '"action":"detach"' not in line), encoding="utf-8")
    assert len(read_run(undone, kept).records) == len(whole.records) + 1, "without an end all that came since"


def test_each_class_has_its_own_latencies_and_the_records_are_gone_through_once(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_run(*files)
    names = [f"class {i}" for i in range(9)]
    records = tuple(r._replace(request_class=names[i % 9]) for i, r in enumerate(whole.records))
    half = whole.start + (whole.end - whole.start) / 2
    periods = (
        SLOsFrom(whole.start, dict.fromkeys([*names, "default"], TARGET)),
        SLOsFrom(half, dict.fromkeys(names[:5], SLO(tpot_ms=40)) | {"default": TARGET}),
    )
    run = replace(whole, records=records, slo_periods=periods)
    gone_through = []
    monkeypatch.setattr(service, "binned", lambda run: gone_through.append(run) or binned(run))
    made = service.latencies(run)
    assert len(gone_through) == 1
    assert {p.title for p in made.plots} == {
        f"{metric} of class {name}" for name in (*names, "default") for metric in ("TTFT", "TPOT")
    }
    for plot in made.plots:
        metric, name = plot.title.split(" of class ")
        stretches = [[r for r in some if r.completed and run.class_of(r) == name] for _, some in binned(run)]
        values = [[1e3 * v for r in some if (v := getattr(r, metric.lower())) is not None] for some in stretches]
        assert plot.views[0].data[1]["y"] == [percentile(some, 99) for some in values if some]
    table = service.attainment(run).tables[0]
    assert [(row[0], row[2], int(row[3])) for row in table.rows] == [
        (name, str(slo), len(some))
        for name in run.classes
        for slo, early in ((run.slo_of(name, whole.start), True), (run.slo_of(name, half), False))
        if (some := [r for r in records if run.class_of(r) == name and (r.arrival < half) == early])
    ]


def test_of_a_long_log_the_page_shows_the_latest_decisions_and_draws_what_can_be_told_apart(
    files: tuple[Path, Path],
) -> None:
    """A browser opens no page of tens of MB. The plots keep each extreme, and each step of more than a moment."""
    run = read_run(files[0])
    attached, turned = run.decisions[0], next(d for d in run.decisions if d.action == "set" and d.changes)
    values = [512.0 + i % 7 for i in range(20_001)]
    values[4321], values[15_000] = 64.0, 8192.0
    many = [
        turned._replace(
            at=attached.at + i + 1, old=attached.new | {"token_budget": a}, new=attached.new | {"token_budget": b}
        )
        for i, (a, b) in enumerate(pairwise(values))
    ]
    last = many[-1]._replace(at=many[-1].at + 50_000, old=many[-1].new, new=attached.new | {"token_budget": 1024.0})
    long = replace(run, decisions=(attached, *many, last))
    made = {section.key: section for section in compose(long).sections}
    table = made["decisions"].tables[0]
    assert len(table.rows) == 2000 and table.rows[-1][2:4] == list(describe(last))
    assert table.title.startswith("the latest 2000 of 20002 decisions; the other 18002 are left out here")
    assert made["decisions"].title == "20001 set and 1 attach"
    (plot,) = made["knobs"].plots
    drawn, dots = plot.views[0].data
    assert "20001 changes" in plot.summary and 500 < len(dots["x"]) <= 2000 and len(drawn["x"]) <= 4002
    assert {64.0, 8192.0, 1024.0} < set(dots["y"]) and drawn["y"][-1] == 1024.0
    assert (drawn["x"][-4], drawn["y"][-4]) == (20_000.0, values[-1]), "nothing moves before the last change"
    assert "the least and the greatest of each stretch" in made["knobs"].lead
    assert len(html(compose(long))) < len(html(compose(replace(long, decisions=(attached, last))))) + 3_000_000


def test_from_the_command_line(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, records = files
    monkeypatch.chdir(tmp_path)
    assert cli(["report", str(log), "--records", str(records), "--out", "run.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "run.html" and told["requests"] == len(read_run(log, records).records)
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli(["report", str(log), "--out", "run.html"]) == 0
    assert "report  run.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("no.jsonl", None, "--records: no.jsonl cannot be read"),
        ("odd.jsonl", "hello\n", "--records: odd.jsonl is no file of records"),
        (
            "five.jsonl",
            "5\n",
            r"--records: five.jsonl is no file of records \(line 1 is no record of a request\); autotune",
        ),
        ("deep.jsonl", "[" * 100_000 + "\n", "--records: deep.jsonl is no file of records"),
        ("less.jsonl", '{"id": "a"}\n', "--records: less.jsonl is no file of records"),
    ],
)
def test_records_that_are_none(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        read_run(files[0], Path(name))


def test_slos_without_that_of_other_classes_are_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    log = tmp_path / "less.jsonl"
    log.write_text(files[0].read_text(encoding="utf-8").replace('"default":"ttft', '"chat":"ttft'), encoding="utf-8")
    with pytest.raises(InputError, match=r"the SLOs of the attach at .* s: there is none of default"):
        read_run(log, files[1])


def test_records_go_with_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["report", "cpu-2core-tiny", "--records", str(tmp_path / "r.jsonl")]) == 2
    assert "it goes with a decision log" in capsys.readouterr().err
