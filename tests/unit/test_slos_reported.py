"""Each request is judged by the SLO of its class: in the status, in `autotune watch`, and on the page of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from autotune import control, simulate
from autotune.cli.main import run as cli
from autotune.control.decision_log import read_decisions
from autotune.report.run import compose, html, read_run
from autotune.report.run.story import Run
from autotune.report.tables import latency
from autotune.workload import Arrival
from runtime.errors import InputError
from runtime.records import RequestRecord
from runtime.serving.record_log import RecordLog
from runtime.slo import SLO, RequestClass, attainment
from tests.fakes import Records
from tests.unit.control_world import VLLM, Formula, h200, poisson

CHAT, BATCH, TIGHT = SLO(ttft_ms=300, tpot_ms=30), SLO(ttft_ms=10_000, tpot_ms=200), SLO(ttft_ms=20, tpot_ms=30)
ODD = 'batch "<b>'


def engine() -> simulate.SimulatedEngine:
    classes = [RequestClass(ODD, BATCH)]
    return simulate.SimulatedEngine(
        Formula(h200), kv_tokens=760_000, knobs=VLLM, slo=CHAT, classes=classes, prefix_cache=False
    )


def mixed(seconds: float) -> list[Arrival]:
    both = {"default": poisson(4, seconds, 800, 100, seed=1), ODD: poisson(1, seconds, 14_000, 300, seed=2)}
    made = [Arrival(t, p, o, ((i, p),), name) for name, load in both.items() for i, (t, p, o) in enumerate(load)]
    return sorted(made, key=lambda arrival: arrival.time)


def share(records: Iterable[RequestRecord], slos: dict[str, SLO]) -> tuple[int, int]:
    found = attainment(records, slos)
    return found.met, found.offered


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[RequestRecord], float]:
    """The log, the records and when the SLO of chats was tightened."""
    folder = tmp_path_factory.mktemp("run")
    log, requests, kept, made = folder / "run.jsonl", folder / "requests.jsonl", Records(), engine()
    made.subscribe(kept)
    with RecordLog(requests) as written:
        made.subscribe(written)
        with control(made, log=log, admission=True):
            made.serve(mixed(30))
            made.run()
            made.wait(1.0)
            made.set_slo(TIGHT)
            changed = made.clock.now()
            made.serve(mixed(20), label="later")
            made.run()
    return log, requests, kept.requests, changed


def test_the_log_has_every_slo_and_when_it_changed(files: tuple[Path, Path, list[RequestRecord], float]) -> None:
    log, _, _, changed = files
    told = [(d.at, d.evidence["slos"]) for d in read_decisions(log) if "slos" in d.evidence]
    assert [slos for _, slos in told] == [
        {ODD: str(BATCH), "default": str(CHAT)}, {ODD: str(BATCH), "default": str(TIGHT)}
    ]  # fmt: skip
    assert changed <= told[1][0] < changed + 1
    (note,) = [d for d in read_decisions(log) if d.action == "note"]
    assert note.cause == f"the SLO is now {ODD} {BATCH}, default {TIGHT}"


def test_the_page_judges_by_class_and_by_time(files: tuple[Path, Path, list[RequestRecord], float]) -> None:
    log, requests, records, changed = files
    run = read_run(log, requests)
    before, after = ([r for r in records if (r.arrival < changed) == first] for first in (True, False))
    (met, of), (met_after, of_after) = (
        share(before, {"default": CHAT, ODD: BATCH}),
        share(after, {"default": TIGHT, ODD: BATCH}),
    )
    late = [p.at for p in run.slo_periods][1]
    between = [r for r in after if r.arrival < late]  # came before the controller had looked
    found = run.judged(run.records)
    assert found.offered == of + of_after and abs(found.met - met - met_after) <= len(between)
    assert found.share > attainment(records, TIGHT).share + 0.05, "the tightest for all would be wrong"
    made = {section.key: section for section in compose(run).sections}
    table = made["service"].tables[0]
    assert [(row[0], row[2]) for row in table.rows] == [
        (ODD, str(BATCH)), (ODD, str(BATCH)), ("default", str(CHAT)), ("default", str(TIGHT))
    ]  # fmt: skip
    assert sum(int(row[3]) for row in table.rows) == found.offered
    kept = share([r for r in before if r.request_class == ODD], {"default": CHAT, ODD: BATCH})
    assert int(table.rows[0][3]) == kept[1] and table.rows[0][4].startswith(f"{100 * kept[0] / kept[1]:.0f}")
    assert {plot.title for plot in made["latency"].plots} == {
        f"TTFT of class {ODD}", f"TPOT of class {ODD}", "TTFT of class default", "TPOT of class default"
    }  # fmt: skip
    (plot,) = [p for p in made["latency"].plots if p.title == "TTFT of class default"]
    assert set(plot.views[0].data[2]["y"]) == {300, 20}, "the target's line has a step"
    page = html(compose(run))
    assert "<b>" not in page.partition('<script type="application/json"')[0].replace('<p class="eyebrow"><b>', "")


def test_an_older_log_has_one_slo(files: tuple[Path, Path, list[RequestRecord], float], tmp_path: Path) -> None:
    run = read_run(files[0], files[1])
    decisions = [d._replace(evidence={k: v for k, v in d.evidence.items() if k != "slos"}) for d in run.decisions]
    old = tmp_path / "old.jsonl"
    old.write_text("".join(d.as_json() + "\n" for d in decisions))
    again: Run = read_run(old, files[1])
    assert again.slo == CHAT and again.classes == ["default"] and "ttft=300ms" in compose(again).sections[0].title
    old.write_text(decisions[0]._replace(evidence={"slos": {"default": "fast"}}).as_json() + "\n")
    with pytest.raises(InputError, match='the SLOs of the attach at 0 s: "fast" is not a target'):
        read_run(old)


@pytest.mark.usefixtures("socket_home")
def test_the_status_and_watch_tell_each_class_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    made, kept = engine(), Records()
    made.subscribe(kept)
    with control(made, steer=True) as attached:
        made.serve(mixed(20))
        made.run()
        status = attached.status().as_dict()
        assert set(status["classes"]) == {"default", ODD}
        for name, slo in (("default", CHAT), (ODD, BATCH)):
            mine = [r for r in kept.requests if r.request_class == name]
            fared, (met, offered) = status["classes"][name], share(mine, {"default": slo})
            assert (fared["attainment"], fared["offered"], fared["slo"]) == (met / offered, offered, str(slo))
            late = max(1e3 * r.ttft for r in mine if r.ttft is not None)
            assert fared["latencies_ms"]["ttft"]["p99"] == pytest.approx(late, rel=0.5)
            assert fared["targets_ms"] == {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms}
        assert status["offered"] == sum(fared["offered"] for fared in status["classes"].values())
        assert cli(["watch", "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, slo in (("default", CHAT), (ODD, BATCH)):
        fared = status["classes"][name]
        assert f"{name} {fared['attainment']:.1%} of {fared['offered']} within {slo}" in shown
        assert f"{name} ttft p50 {latency(fared['latencies_ms']['ttft']['p50'])} p99" in shown
