"""Each request is judged by the SLO of its class: in the status, in `autotune watch`, and on the page of a run."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from autotune import control, simulate
from autotune.cli.main import run as cli
from autotune.cli.watch import _table
from autotune.control.attainment import AttainmentTracker
from autotune.control.decision_log import read_decisions
from autotune.control.loop import Control
from autotune.control.status import ClassStatus, Status
from autotune.engines.callable import CallableEngine
from autotune.report.run import compose, html, read_run
from autotune.report.run.story import Run
from autotune.report.tables import latency
from autotune.workload import Arrival
from runtime import Batcher
from runtime.clock import VirtualClock
from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord
from runtime.request import SamplingParams
from runtime.serving.metrics import ServingMetrics
from runtime.serving.record_log import RecordLog
from runtime.slo import SLO, Attainment, RequestClass, SLOHistory, attainment
from tests.building import request_record
from tests.engines import bench
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


def test_the_status_of_an_idle_engine_has_the_slo_that_it_was_given() -> None:
    made = engine()
    with control(made) as it:
        made.serve(mixed(5))
        made.run()
        made.set_slo(TIGHT)
        assert it.slo == TIGHT
        now = it.status()
        assert now.slo == now.classes["default"].slo == TIGHT and now.classes["default"].slo_changed
        assert now.classes[ODD].slo == BATCH and not now.classes[ODD].slo_changed
        made.serve(mixed(5), label="later")
        made.run()
    assert [d.cause for d in it.decisions if d.action == "note"] == [f"the SLO is now {ODD} {BATCH}, default {TIGHT}"]
    made.set_slo(BATCH)
    assert it.slo == it.status().slo == TIGHT  # of a controller that has been detached
    with control(made) as it:
        made.set_slo(CHAT)  # nobody asks before it is detached
    assert it.slo == it.status().slo == CHAT


def test_the_page_judges_by_class_and_by_time(files: tuple[Path, Path, list[RequestRecord], float]) -> None:
    log, requests, records, changed = files
    run = read_run(log, requests)
    before, after = ([r for r in records if (r.arrival < changed) == first] for first in (True, False))
    (met, of), (met_after, of_after) = (
        share(before, {"default": CHAT, ODD: BATCH}),
        share(after, {"default": TIGHT, ODD: BATCH}),
    )
    late = [p.at for p in run.slo_periods][1]
    assert late == changed, "not when a step found it"
    found = run.judged(run.records)
    assert (found.met, found.offered) == (met + met_after, of + of_after)
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


def test_live_and_afterwards_a_request_is_judged_by_the_slo_of_when_it_came(
    files: tuple[Path, Path, list[RequestRecord], float],
) -> None:
    log, requests, records, _ = files
    run = read_run(log, requests)
    told = next(d.evidence["outcomes"] for d in run.decisions if "outcomes" in d.evidence)
    assert sum(one["met"] for one in told.values()) == run.judged(records).met
    assert sum(one["offered"] for one in told.values()) == run.judged(records).offered


def test_a_target_that_changes_while_requests_run_is_not_theirs(tmp_path: Path) -> None:
    made, kept, log = engine(), Records(), tmp_path / "run.jsonl"
    made.subscribe(kept)
    with control(made, slo="e2e=100s", log=log) as attached:
        for _ in range(20):
            made.submit([1] * 100, SamplingParams(max_tokens=200))
            made.wait(0.02)
        made.set_slo(SLO(e2e_ms=1))
        changed = made.clock.now()
        assert not kept.requests
        made.submit([1] * 100, SamplingParams(max_tokens=1))
        made.run()
        assert (attached.status().attainment.met, attached.status().attainment.offered) == (20, 21)
    run = read_run(log)
    assert run.judged(kept.requests).met == 20 and run.slo_periods[-1].at == changed


def fares(attached: Control, metrics: ServingMetrics) -> tuple[tuple[int, int], ...]:
    """(met, offered) as the controller tells and as the metrics do."""
    seen, text = attached.status().attainment, generate_latest(metrics.registry).decode()
    told = [
        re.search(rf'^autotune_slo_{n}_total{{class="default"}} (\S+)$', text, re.MULTILINE) for n in ("met", "offered")
    ]
    met, offered = (int(float(one[1])) for one in told if one is not None)
    return (seen.met, seen.offered), (met, offered)


def stated_since(log: Path) -> float:
    return float([d.evidence["since"] for d in read_decisions(log) if "since" in d.evidence][-1])


def test_who_is_in_the_first_step_of_an_idle_engine_is_judged_by_the_slo_of_when_it_came(tmp_path: Path) -> None:
    with bench(slo="e2e=100s") as b:
        metrics, log = ServingMetrics(b.engine), tmp_path / "run.jsonl"
        with control(b.engine, slo="e2e=100s", log=log, interval_s=1e-9) as attached:
            b.engine.generate([[1]], max_tokens=2)
            b.executor.hold()
            streams = [b.engine.submit([i], max_tokens=1) for i in range(5)]
            b.held()
            before = b.engine.clock.now()
            b.engine.set_slo(SLO(e2e_ms=1e-6))
            after = b.engine.clock.now()
            b.executor.go()
            for stream in streams:
                stream.result()
            b.engine.generate([[1]], max_tokens=1)
            b.engine.view()  # after a step its records are told
            assert fares(attached, metrics) == ((6, 7), (6, 7))
        assert before <= stated_since(log) <= after


class Told(Records):
    """Counts who has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Semaphore(0)

    def on_request(self, record: RequestRecord) -> None:
        self.ended.release()


def test_who_is_in_a_long_call_is_judged_by_the_slo_of_when_it_came(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def held(items: list[int]) -> list[int]:
        begun.set()
        assert go.wait(60)
        return items

    log = tmp_path / "run.jsonl"
    with Batcher(held, max_batch_size=8, slo="e2e=100s") as batcher:
        metrics = ServingMetrics(batcher)
        with control(batcher, slo="e2e=100s", log=log, interval_s=1e-9) as attached:
            told = Told()
            batcher.subscribe(told)  # hears of each after those above
            handles = [batcher.submit(i) for i in range(5)]
            assert begun.wait(60)
            before = batcher.clock.now()
            batcher.set_slo(SLO(e2e_ms=100_001))
            batcher.set_slo(SLO(e2e_ms=1e-6, attainment=0.5))
            after = batcher.clock.now()
            go.set()
            assert all(told.ended.acquire(timeout=60) for _ in handles)
            assert fares(attached, metrics) == ((5, 5), (5, 5))
            assert "100.0% of the last 5, each by the SLO of when it came" in str(attached.status())
        assert before <= stated_since(log) <= after


def test_every_face_of_a_batcher_knows_when_its_slo_changed() -> None:
    with Batcher(list, slo="e2e=1s") as batcher:
        face = CallableEngine(batcher, [1])
        batcher.set_slo("e2e=2s")
        face.set_slo("e2e=3s")
        for one in (batcher, face):
            assert [slos["default"].e2e_ms for _, slos in one.slo_history.periods] == [1000, 2000, 3000]


class Foreign:
    """An engine that keeps no SLOs over time."""

    def __init__(self) -> None:
        self.slos, self.weights, self.clock = {"default": CHAT}, dict[str, float](), VirtualClock(5.0)


def test_the_slos_of_an_engine_that_does_not_keep_them_count_from_the_look_that_finds_them() -> None:
    engine = Foreign()
    seen = AttainmentTracker(engine, CHAT)  # type: ignore[arg-type]
    seen.look()
    engine.slos = {"default": TIGHT}
    engine.clock.advance_to(9.0)
    seen.look()
    assert seen.changed() and seen.slos == {"default": TIGHT} and seen.as_evidence()["since"] == 9.0
    for arrival in (6.0, 9.0):
        seen.add(request_record([arrival + 0.1], arrival=arrival))
    assert (seen.attainment().met, seen.attainment().offered) == (1, 2)


def test_every_change_between_two_looks_counts() -> None:
    made = engine()
    seen = AttainmentTracker(made, CHAT)
    made.set_slo(TIGHT)
    seen.look()
    assert "since" not in seen.as_evidence(), "what there was before it looked is nothing to it"
    for slo in (CHAT, TIGHT, CHAT):
        made.clock.advance_to(made.clock.now() + 10)
        made.set_slo(slo)
    for arrival in (5.0, 15.0, 25.0, 35.0):
        seen.add(request_record([arrival + 0.1, arrival + 0.11], arrival=arrival))
    assert (seen.attainment().met, seen.attainment().offered) == (2, 4) and seen.as_evidence()["since"] == 30.0


def test_slos_set_from_many_threads_and_within_a_change_are_all_kept() -> None:
    clock, slos = VirtualClock(), {"default": CHAT}
    history = SLOHistory(dict(slos))

    class Interrupted(VirtualClock):
        """Another change comes while the time of one is taken, as in a signal handler."""

        def now(self) -> float:
            if slos["default"] is not BATCH:
                slos["default"] = BATCH
                history.follow(slos, clock)
            return super().now()

    slos["default"] = TIGHT
    history.follow(slos, Interrupted())
    assert history.latest == slos == {"default": BATCH}
    made = engine()

    def put(name: str) -> None:
        for n in range(1, 50):
            made.set_slo(SLO(e2e_ms=n), request_class=name)

    threads = [threading.Thread(target=put, args=(f"c{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.slo_history.latest == made.slos


def test_an_slo_from_no_time_is_said(tmp_path: Path) -> None:
    log, found = tmp_path / "run.jsonl", {"slos": {"default": str(CHAT)}, "since": "now"}
    with control(engine(), log=log) as attached:
        attached._actuator.log("note", "", found)
    with pytest.raises(InputError, match="the SLOs of the note at 0 s: since is 'now'; it must be a number"):
        read_run(log)


def test_all_figures_of_a_status_are_of_the_same_requests() -> None:
    """Of the last 1,024, whatever of them completed: old latencies say nothing of what comes now."""
    seen = AttainmentTracker(engine(), CHAT)
    seen.look()
    assert seen.changed() and set(seen.slos) == {"default", ODD}
    for at in range(1000):
        seen.add(request_record([at + 2.0, at + 2.1], arrival=at))
    for at in range(5000, 6024):
        served = at % 43 == 0
        times = [at + 0.05, at + 0.07] if served else []
        seen.add(
            request_record(
                times,
                arrival=at,
                reason=FinishReason.LENGTH if served else FinishReason.REJECTED,
                request_class=ODD if at % 2 else "default",
            )
        )
    whole, classes = seen.attainment(), seen.by_class()
    assert (whole.met, whole.offered) == (24, 1024) and seen.rejections() == {"rejected": 1000}
    assert {name: one.attainment.offered for name, one in classes.items()} == {"default": 512, ODD: 512}
    assert sum(one.attainment.met for one in classes.values()) == 24
    for one in classes.values():
        assert one.latencies_ms["ttft"] == pytest.approx((50, 50)) and one.latencies_ms["tpot"] == pytest.approx(
            (20, 20)
        )
    for at in range(7000, 8024):  # each of one token
        seen.add(request_record([at + 0.05], arrival=at))
    assert set(seen.by_class()["default"].latencies_ms) == {"ttft", "e2e"}
    assert seen.by_class()[ODD].latencies_ms == {} and not seen.by_class()[ODD].attainment.offered


def shown(status: Status) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(_table({"pid": 1, "controller": "p", **status.as_dict()}, []))
    assert isinstance(console.file, io.StringIO)
    return re.sub(" +$", "", console.file.getvalue(), flags=re.MULTILINE)


def test_watch_says_where_there_is_no_latency_and_whose_target_it_is() -> None:
    def status(**slos: SLO) -> Status:
        found = Attainment(3, 4, 0, {})
        classes = {name: ClassStatus(slo, found, {"ttft": (50.0, 60.0)}) for name, slo in slos.items()}
        return Status(VLLM, "r", found, slos["default"], False, False, False, classes)

    alone = shown(status(default=CHAT))
    assert "75.0% of the last 4 (target 99%)" in alone and "p50 50 ms  p99 60 ms  target 300 ms" in alone
    assert re.search(r"tpot +–  target 30 ms", alone) and "e2e" not in alone
    several = shown(status(default=CHAT, late=SLO(ttft_ms=900, attainment=0.9)))
    assert re.search(r"attainment +75.0% of the last 4$", several, re.MULTILINE)
    assert f"75.0% of 4 within {CHAT}" in several and "within ttft=900ms@90%" in several


def test_an_attainment_by_former_slos_is_not_set_beside_the_new_target_alone() -> None:
    found = Attainment(3, 4, 0, {})

    def status(**changed: bool) -> Status:
        classes = {name: ClassStatus(CHAT, found, {}, is_so) for name, is_so in changed.items()}
        return Status(VLLM, "r", found, CHAT, False, False, False, classes)

    judged = ", each by the SLO of when it came"
    assert f"75.0% of the last 4 (target 99%){judged}" in shown(status(default=True))
    assert f"75.0% of the last 4{judged} · regime" in str(status(default=True)) and judged not in str(
        status(default=False)
    )
    several = shown(status(default=False, late=True))
    assert f"75.0% of 4 within {CHAT}" in several and f"75.0% of 4{judged}; now {CHAT}" in several
    assert [one["slo_changed"] for one in status(default=False, late=True).as_dict()["classes"].values()] == [
        False,
        True,
    ]


def test_a_target_of_the_same_latencies_is_no_other_slo() -> None:
    made = engine()
    seen = AttainmentTracker(made, CHAT)
    for slo, changed in ((CHAT, False), (SLO(ttft_ms=300, tpot_ms=30, attainment=0.5), False), (TIGHT, True)):
        made.set_slo(slo)
        seen.look()
        seen.changed()
        if not changed:
            seen.add(request_record([1.1], arrival=1.0 + made.clock.now()))
        assert seen.by_class()["default"].slo_changed is changed


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
