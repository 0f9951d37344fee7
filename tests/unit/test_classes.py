"""Request classes from the question to the report: each is judged by its own SLO, and counts by its weight."""

from __future__ import annotations

import io
import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.bench import PairedComparison, Result, fixed, measure, turns
from autotune.bench.table import show as show_bench
from autotune.cli.main import run as typed
from autotune.measure.score import CDF_AT, ClassScore, Latency
from autotune.profile import Profile, load_profile, save_profile
from autotune.profiling.assemble import judge, sidecar
from autotune.profiling.findings import Findings
from autotune.profiling.objective import Objective, worst_ratio
from autotune.profiling.points import point
from autotune.profiling.simulator import PAIRED
from autotune.report.evidence import Evidence, gather, worst_of
from autotune.report.evidence import targets as bounds_of
from autotune.report.headline import headline
from autotune.report.page import compose, html
from autotune.report.panels import capacity, latency, pareto
from autotune.report.panels.classes import sections
from autotune.report.profile_table import show
from autotune.report.section import Section
from autotune.report.tables import class_rows, class_table
from autotune.report.wording import number
from autotune.simulate.scenario import Scenario
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from runtime.slo import SLO, RequestClass, attained
from tests.unit.profiled_machine import KeepingReporter, machine, question, session
from tests.unit.profiles import LARGE, SMALL, profile, run
from tests.unit.report.reporting import Page
from tests.unit.simulate_command import QUICK, flat, refused

CHAT = RequestClass("chat", SLO(ttft_ms=300, tpot_ms=18, attainment=0.9))
BATCH = RequestClass("batch", SLO(e2e_ms=20_000), 0.2)
CLASSES = (CHAT, BATCH)
MIX = "chat=azure-conv:length=1/8@0.75+batch=poisson:prompt=200,output=40@0.25"
OBJECTIVE = Objective(CHAT.slo, classes=CLASSES)


def fared(one: RequestClass, met: int, offered: int, p99: float) -> ClassScore:
    return ClassScore(
        slo=str(one.slo), weight=one.weight, offered=offered, met=met, attainment=met / offered, goodput=met / 4,
        violations={}, throughput=10.0, ttft_ms=Latency(p50=1, p99=p99), tpot_ms=Latency(p50=1, p99=9.0),
        e2e_ms=Latency(p50=1, p99=10 * p99),
    )  # fmt: skip


def two(knobs: Knobs, chat: int, batch: int, p99: float = 150.0, seed: int = 0) -> Any:
    """Of thirty of each so many met their SLO."""
    classes = {"chat": fared(CHAT, chat, 30, p99), "batch": fared(BATCH, batch, 30, 2 * p99)}
    weighted = (chat + 0.2 * batch) / 4
    blocks = [(9.0, 4 * weighted / 4)] * 4
    return run(knobs, chat + batch, offered=60, classes=classes, goodput=weighted, blocks=blocks, seed=seed)


def test_a_point_pools_classes_and_weighs_them() -> None:
    made = point([two(SMALL, 30, 10, seed=1), two(SMALL, 20, 20, p99=170.0, seed=2)])
    chat, batch = made.classes["chat"], made.classes["batch"]
    assert (chat.met, chat.offered, batch.met, batch.offered) == (50, 60, 30, 60)
    assert made.attainment == pytest.approx(80 / 120, abs=1e-4)
    assert made.weighted_attainment == pytest.approx((50 + 0.2 * 30) / (60 + 0.2 * 60))
    assert made.goodput.mean == pytest.approx((50 + 0.2 * 30) / 8) and chat.ttft_p99_ms == 160.0
    again = point([two(SMALL, 30, 10, seed=1), two(SMALL, 20, 10, seed=1)])
    assert (again.classes["chat"].met, again.classes["chat"].offered) == (25, 30), "the same requests count once"
    assert "classes" in made.model_dump(mode="json") and "classes" not in point([run(SMALL)]).model_dump(mode="json")


def test_the_better_setting_serves_more_by_weight_not_by_number() -> None:
    """SMALL meets 30 chats and 10 batch requests, LARGE 20 and 30: fewer requests, more goodput."""
    small, large = point([two(SMALL, 30, 10)]), point([two(LARGE, 20, 30)])
    assert small.attainment < large.attainment and OBJECTIVE.order(small) > OBJECTIVE.order(large)
    assert OBJECTIVE.choose([small, large])["balanced"].knobs == SMALL
    assert Objective(CHAT.slo).order(point([run(SMALL, 40, offered=60)])) < Objective(CHAT.slo).order(
        point([run(LARGE, 50, offered=60)])
    )


def test_every_class_must_have_its_own_attainment() -> None:
    assert OBJECTIVE.attained(point([two(SMALL, 27, 30)])), "90% of chat, 100% of batch"
    for chat, batch in ((26, 30), (30, 29)):
        seen = point([two(SMALL, chat, batch)])
        assert not OBJECTIVE.attained(seen) and not attained(seen, CHAT.slo, CLASSES)
    parts = point([two(SMALL, 30, 30)]).classes
    nothing = {
        name: part.model_copy(update={"offered": 0, "met": 0, "attainment": 0.0}) for name, part in parts.items()
    }
    assert not attained(point([two(SMALL, 30, 30)]).model_copy(update={"classes": nothing}), CHAT.slo, CLASSES)
    assert not OBJECTIVE.refuted(point([two(SMALL, 26, 30)])), "one miss too many of 30 may be bad luck"
    assert OBJECTIVE.refuted(point([two(SMALL, 30, 26)])), "four misses of 30 where 1% are allowed are not"
    assert OBJECTIVE.shares == "90% of chat and 99% of batch"


def test_a_class_is_judged_by_what_was_counted_not_by_what_was_rounded() -> None:
    """296 of 299 batch requests are 98.997%, and were stored as 0.99."""
    for met, offered, enough in ((299, 302, True), (296, 299, False)):
        classes = {"chat": fared(CHAT, 30, 30, 150.0), "batch": fared(BATCH, met, offered, 150.0)}
        made = point([run(SMALL, 30 + met, offered=30 + offered, classes=classes)])
        rounded = {
            name: c.model_copy(update={"attainment": round(c.attainment, 4)}) for name, c in made.classes.items()
        }
        for seen in (made, made.model_copy(update={"classes": rounded})):
            assert OBJECTIVE.attained(seen) is attained(seen, CHAT.slo, CLASSES) is enough
            (row,) = [r for r in class_rows([("one", seen)], CHAT.slo, CLASSES) if r.name == "batch"]
            assert row.missed is not enough
        drawn = class_table([("one", seen)], CHAT.slo, CLASSES)
        console = Console(width=200, file=io.StringIO())
        console.print(drawn)
        assert isinstance(console.file, io.StringIO)
        assert f"batch {'99.0%' if enough else '98.997%'} 99% {offered}" in flat(console.file.getvalue())


def test_latency_is_the_worst_of_all_classes_in_units_of_their_targets() -> None:
    """Chat: TTFT 150 of 300 ms, TPOT 9 of 18; batch: E2E 3 of 20 s."""
    assert OBJECTIVE.latency(point([two(SMALL, 30, 30)])) == pytest.approx(0.5)
    assert OBJECTIVE.latency(point([two(SMALL, 30, 30, p99=1500.0)])) == pytest.approx(5.0)


def test_a_latency_that_no_request_has_misses_no_target() -> None:
    """Answers of one token have no TPOT, and a class of which none came has nothing: settings differ by the rest."""

    def latency(p99: float, without: str | None = None, **changes: Any) -> float:
        made = point([two(SMALL, 30, 30, p99=p99)])
        chat = made.classes["chat"].model_copy(update={f"{without}_p99_ms": None} if without else {})
        batch = made.classes["batch"].model_copy(update=changes)
        return OBJECTIVE.latency(made.model_copy(update={"classes": {"chat": chat, "batch": batch}}))

    nothing = dict.fromkeys(("ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms"))
    assert (latency(150.0, "tpot"), latency(240.0, "tpot")) == (0.5, 0.8)
    assert latency(240.0, offered=0, met=0, attainment=0.0, **nothing) == 0.8
    assert latency(240.0, **nothing) == inf, "30 came, and none finished"
    slo = SLO(ttft_ms=100, tpot_ms=10)
    one_token, none = (point([run(SMALL)]).model_copy(update=update) for update in ({"tpot_p99_ms": None}, nothing))
    targets = {"ttft_p99_ms": 100.0, "tpot_p99_ms": 10.0}
    for seen in (one_token, none):
        assert Objective(slo).latency(seen) == worst_ratio(seen, targets)
        drawn = worst_of(seen, bounds_of(slo))
        assert drawn == (None if seen is none else worst_ratio(seen, targets))
    assert Objective(slo).latency(one_token) == one_token.ttft_p99_ms / 100 and Objective(slo).latency(none) == inf  # type: ignore[operator]


def test_weighted_goodput_is_not_set_against_an_unweighted_offer(made: Profile) -> None:
    chosen = point([two(SMALL, 30, 30)])
    assert OBJECTIVE.said(chosen) == "best 9.0 req/s within the SLO, each counted by the weight of its class"
    meaning = headline(Evidence(made, "two.yaml")).meaning[0]
    assert "requests a second within the SLO, each counted by the weight of its class" in meaning
    assert "offered" not in meaning


def test_a_p99_is_held_against_the_targets_of_its_class(made: Profile) -> None:
    """Chat has a TTFT and a TPOT target, batch an E2E target alone."""
    evidence = Evidence(made, "two.yaml")
    seen = evidence.recommended.point.classes
    figures = {figure.name: figure for figure in headline(evidence).figures if "p99" in figure.name}
    assert [*figures] == ["TTFT p99 of chat", "TPOT p99 of chat", "E2E p99 of batch"]
    assert figures["TTFT p99 of chat"].value == number(seen["chat"].ttft_p99_ms)
    assert figures["E2E p99 of batch"].value == number(seen["batch"].e2e_p99_ms)
    assert figures["E2E p99 of batch"].beside == "target 20,000 ms, met"


def test_a_run_in_which_a_class_missed_its_target_is_counted(made: Profile) -> None:
    chosen = made.settings["balanced"]
    runs = [two(chosen.knobs, 30, 30, p99=p99, seed=seed) for seed, p99 in enumerate((150.0, 150.0, 330.0))]
    pooled = point(runs)
    settings = {"balanced": chosen.model_copy(update={"point": pooled})}
    evidence = Evidence(made.model_copy(update={"settings": settings}), "two.yaml", runs=tuple(runs))
    figures = {figure.name: figure.beside for figure in headline(evidence).figures}
    assert figures["TTFT p99 of chat"] == "target 300 ms, missed in 1 of 3 runs"
    assert figures["TPOT p99 of chat"] == "target 18 ms, met"


def test_latencies_of_all_classes_are_drawn_without_a_target(made: Profile) -> None:
    section = pareto.section(Evidence(made, "two.yaml"))
    assert section.plots and "shaded region" not in section.lead and "of all classes together" in section.lead
    for view in section.plots[0].views:
        assert "shapes" not in view.layout and "within target" not in str(view.layout)
    at = made.settings["balanced"].point
    distributed = Latency(p50=1, p99=9, cdf=tuple(float(q) for q in CDF_AT))
    of_one = run(at.knobs, stage=at.stage, rate=at.rate, ttft_ms=distributed)
    shown = latency.section(Evidence(made, "two.yaml", runs=(of_one,)))
    assert shown.plots and not any(view.layout.get("shapes") for plot in shown.plots for view in plot.views)
    assert shown.title == latency.TOPIC and "each class has its own" in shown.lead
    carried = capacity.section(Evidence(made, "two.yaml"))
    for view in carried.plots[0].views if carried.plots else ():
        assert not view.layout.get("shapes") and not view.labels
    assert carried.absent or "90% of chat and 99% of batch" in carried.lead


def test_the_spelling_of_a_class_reads_back() -> None:
    for one in (*CLASSES, RequestClass("x.y-z", SLO(itl_ms=12.5, attainment=0.999), 1e-3)):
        assert RequestClass.parse(str(one)) == one
    assert str(BATCH) == "batch:e2e=20000ms@99%*0.2"
    assert RequestClass.parse(" chat :ttft=1s").name == "chat"
    with pytest.raises(ValueError, match='class chat: weight is "1_0"; it must be a number above 0'):
        RequestClass.parse("chat:ttft=1s*1_0")


# -- a whole profiling run --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """In virtual time, without an SLO for requests of other classes."""
    requested = question(workload=parse_workload(MIX), slo=None, rate=30.0, classes=CLASSES)
    return session(tmp_path_factory.mktemp("classes") / "a.journal", requested)[0]


@pytest.fixture(scope="module")
def made(found: Findings) -> Profile:
    made = profile(found, question(workload=parse_workload(MIX), classes=CLASSES))
    pool = made.engine.kv_pool.model_copy(update={"blocks": 3750})  # that of the machine
    return made.model_copy(
        update={
            "workload": made.workload.model_copy(update={"spec": MIX}),
            "engine": made.engine.model_copy(update={"kv_pool": pool}),
        }
    )


def test_a_run_judges_simulated_and_measured_requests_by_class(found: Findings) -> None:
    assert found.setup is not None and found.setup.classes == CLASSES
    assert found.setup.slo == CHAT.slo and found.setup.slo_from == "that of class chat"
    for run_ in (*found.simulated, *found.runs, *found.paired):
        assert set(run_.score.classes) == {"chat", "batch"} and run_.score.classes["batch"].weight == 0.2
        chat, batch = run_.score.classes["chat"], run_.score.classes["batch"]
        assert chat.offered + batch.offered == run_.score.offered
        assert run_.score.goodput == pytest.approx(chat.goodput + 0.2 * batch.goodput)
    met, verdict = judge(found, found.settings()["balanced"].point)
    assert "90% of chat and 99% of batch" in verdict or not met


def test_the_profile_holds_its_classes_and_reads_back(made: Profile, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    save_profile(made, path)
    assert "- batch:e2e=20000ms@99%*0.2" in path.read_text()
    back = load_profile(path)
    assert back == made and back.classes == CLASSES
    assert back.settings["balanced"].point.classes["batch"].weight == 0.2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("- batch:e2e=20000*0.2", 'classes.1: batch: "e2e=20000" has no unit'),
        ("- batch:e2e=20s*no", 'classes.1: batch: weight is "no"; it must be a number above 0, as *0.2'),
        ("- 3", "classes.1 is 3; write chat:ttft=300ms,tpot=30ms@99%, or batch:e2e=60s*0.2"),
        ("- chat:e2e=20s", "classes: chat is given twice"),
    ],
)
def test_a_class_that_cannot_be_read_is_one_line(made: Profile, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "two.yaml"
    save_profile(made, path)
    path.write_text(path.read_text().replace("- batch:e2e=20000ms@99%*0.2", line, 1))
    with pytest.raises(ValueError) as caught:
        load_profile(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_tables_and_pages_show_attainment_by_class(made: Profile, tmp_path: Path) -> None:
    console = Console(width=200, file=io.StringIO())
    show(made, console)
    assert isinstance(console.file, io.StringIO)
    text = flat(console.file.getvalue())
    assert "each counted by the weight of its class" in text
    seen = made.settings["balanced"].point.classes
    assert f"chat {seen['chat'].attainment:.1%} 90% {seen['chat'].offered} 1 " in text
    assert f"batch {seen['batch'].attainment:.1%} 99% {seen['batch'].offered} 0.2 " in text
    (section,) = [s for s in compose(gather(made, tmp_path / "two.yaml")).sections if s.key == "classes"]
    assert [row[1] for row in section.tables[0].rows][:2] == ["chat", "batch"]


def test_a_class_without_a_request_neither_meets_nor_misses_its_slo(made: Profile) -> None:
    chosen = made.settings["balanced"]
    none = chosen.point.classes["batch"].model_copy(update={"offered": 0, "met": 0, "attainment": 0.0})
    point = chosen.point.model_copy(update={"classes": {**chosen.point.classes, "batch": none}})
    settings = {**made.settings, "balanced": chosen.model_copy(update={"point": point})}
    (section,) = sections(Evidence(made.model_copy(update={"settings": settings}), "two.yaml"))
    assert section.title == "No request of class batch came" and section.tables[0].rows[1][4] == "–"


def test_a_workload_without_the_profile_s_classes_is_simulated_without_them(
    made: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.yaml"
    save_profile(made, path)
    for workload, classes in (
        ("azure-code", []),
        ("batch=poisson:prompt=200,output=40", [str(one) for one in CLASSES]),
        (MIX, [str(one) for one in CLASSES]),
    ):
        typed(["simulate", str(path), "--rate", "0.5", "--workload", workload, *QUICK, "--json"])
        assert json.loads(capsys.readouterr().out)["classes"] == classes


def test_a_scenario_of_the_profile_has_its_classes_and_others_may_be_given(made: Profile) -> None:
    scenario = Scenario.of(made)
    score = scenario.measure(made.knobs, 10.0, 1, requests=200)
    assert scenario.classes == CLASSES and set(score.classes) == {"chat", "batch"}
    other = Scenario.of(made, classes=[RequestClass("batch", SLO(e2e_ms=1), 3.0)]).measure(
        made.knobs, 10.0, 1, requests=200
    )
    assert other.classes["batch"].met == 0 and other.classes["batch"].weight == 3.0
    assert other.classes["default"].offered == score.classes["chat"].offered, (
        "those of chat go by the SLO of all others"
    )


@pytest.mark.slow
def test_simulate_and_capacity_go_by_classes(made: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.yaml"
    save_profile(made, path)
    assert typed(["simulate", str(path), "--rate", "5", *QUICK, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["classes"] == [str(one) for one in CLASSES]
    assert {*reported["settings"][0]["classes"]} == {"chat", "batch"}
    assert typed(["simulate", str(path), "--rate", "5", "--class", "batch:e2e=1ms", *QUICK]) == 1, (
        "batch misses its SLO"
    )
    assert "class batch:e2e=1ms@99%" in flat(capsys.readouterr().out)
    assert typed(["capacity", str(path), *QUICK]) == 0
    assert "highest rate at which 90% of chat and 99% of batch of 100 requests" in flat(capsys.readouterr().out)
    assert typed(["capacity", str(path), "--class", "batch:e2e=1ms", *QUICK]) == 1
    capsys.readouterr()
    assert "--class bulk: the workload has no request of that class; its classes are" in refused(
        capsys, ["simulate", str(path), "--class", "bulk:e2e=1s"]
    )


@pytest.mark.parametrize("verb", ["profile", "bench"])
def test_classes_that_make_no_sense_are_refused_before_anything_is_loaded(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--class", "chat"], "--class is 'chat'; it must be NAME:SLO or NAME:SLO*WEIGHT, as chat:"),
        (["--class", "chat:ttft=1"], '--class chat: "ttft=1" has no unit'),
        (
            ["--class", "chat:ttft=1s"],
            "--class chat: the workload has no request of that class; its classes are default",
        ),
        (["--workload", "chat=azure-conv@0.8"], '--workload: workload "chat=azure-conv@0.8": the shares add up to 0.8'),
    ):
        assert refused(capsys, [verb, *arguments]).startswith(message)


# -- the bench --------------------------------------------------------------------------------------------------------


def test_a_bench_weighs_requests_and_tells_classes_apart() -> None:
    tight = RequestClass("batch", SLO(e2e_ms=1), 0.25)
    one, other = fixed(Knobs(64, 0, 512, 512)), fixed(Knobs(2, 0, 16, 16))
    results = [
        r
        for r in measure(
            machine(), turns([one, other], 1, 3), parse_workload(MIX).at_rate(20), CHAT.slo, vocab_size=256,
            duration=8.0, classes=[CHAT, tight],
        )
        if isinstance(r, Result)
    ]  # fmt: skip
    comparison = PairedComparison(results, 8.0)
    summary = comparison.summary(one)
    (met, chats), (none, batch) = summary.classes["chat"], summary.classes["batch"]
    assert none == 0 < met <= chats and chats + batch == summary.offered
    assert summary.weighted_attainment.value == pytest.approx(met / (chats + 0.25 * batch))
    assert summary.attainment.value == pytest.approx(met / summary.offered)
    assert summary.attainment.low <= summary.attainment.value <= summary.attainment.high
    shown = summary.as_dict()
    assert shown["attainment"]["value"] == pytest.approx(results[0].score.attainment, abs=1e-4)
    assert shown["weighted_attainment"]["value"] == pytest.approx(results[0].score.weighted_attainment, abs=1e-4)
    assert summary.goodput.value == pytest.approx(met / 8.0) == pytest.approx(results[0].score.goodput)
    assert summary.as_dict()["classes"]["batch"] == {"met": 0, "offered": batch}
    console = Console(width=250, file=io.StringIO())
    show_bench(comparison, CHAT.slo, console, baseline=other, classes=[CHAT, tight, RequestClass("chat[eu]", CHAT.slo)])
    assert isinstance(console.file, io.StringIO)
    text = flat(console.file.getvalue())
    assert (
        "weighted" in text.partition("chat")[0]
        and "chat, target 90%" in text
        and "chat[eu], target 90%" in text
        and f"0.0% of {batch}" in text
        and "by the weight of its class" in text
    )


# -- without an SLO ---------------------------------------------------------------------------------------------------


def test_without_an_slo_the_lowest_mean_e2e_is_the_better() -> None:
    objective = Objective(CHAT.slo, name="mean-e2e", alone_ms=500.0)
    quick = point([run(SMALL, 20, e2e_mean_ms=800.0)])
    many = point([run(LARGE, 40, e2e_mean_ms=900.0, throughput=300.0)])
    assert quick.e2e_mean_ms == 800.0 and objective.worth(quick) == pytest.approx(500 / 1300)
    assert objective.order(quick) > objective.order(many) and objective.value(quick) > objective.value(many)
    assert Objective(CHAT.slo).order(quick) < Objective(CHAT.slo).order(many), "by goodput the other"
    chosen = objective.choose([quick, many])
    assert chosen["balanced"].knobs == SMALL and chosen["balanced"].why.startswith("lowest mean E2E")
    assert chosen["throughput"].knobs == LARGE
    assert objective.worth(point([run(SMALL)])) == 0.0, "of an earlier version, which took no mean"
    worth = objective.worth(quick)
    assert objective.regret(1 - objective.worth(many) / worth, worth) == pytest.approx(900 / 800 - 1)


def test_an_objective_says_how_far_settings_are_apart() -> None:
    quick, many = point([run(SMALL, 20, e2e_mean_ms=800.0)]), point([run(LARGE, 40, e2e_mean_ms=900.0)])
    unknown = point([run(SMALL, 0)])
    by_goodput, by_mean = Objective(CHAT.slo), Objective(CHAT.slo, name="mean-e2e", alone_ms=500.0)
    assert (by_goodput.figure(quick), by_goodput.figure(many)) == (5.0, 10.0)
    assert (by_mean.figure(quick), by_mean.figure(unknown)) == (800.0, None)
    assert by_goodput.share(quick, many) == 0.5 and by_goodput.loss(quick, many) == 0.5
    assert by_goodput.loss(many, quick) == -1.0 and by_goodput.loss(unknown, many) == 1.0
    assert by_mean.share(many, quick) == pytest.approx(8 / 9) and by_mean.loss(many, quick) == pytest.approx(1 / 8)
    assert by_mean.loss(quick, many) == pytest.approx(-1 / 9) and by_mean.loss(unknown, many) == inf
    assert by_mean.value(quick) > by_mean.value(many) > by_mean.value(unknown) == 0.0
    assert by_goodput.interval(many) == many.goodput and by_mean.interval(many) is None
    assert by_goodput.said(many, "items/s") == "best 10.0 of 10.0 items/s within the SLO"
    assert by_goodput.said(run(LARGE, 40).score, offered=False) == "best 10.0 req/s within the SLO"
    assert by_mean.said(quick, offered=False) == "best mean E2E 800 ms"
    assert by_mean.said(unknown) == "best mean E2E unknown"


@pytest.fixture(scope="module")
def lowest_mean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, KeepingReporter, Profile]:
    """A run for the lowest mean E2E: what it found, what it told meanwhile, and the profile."""
    requested = question(slo=None, rate=30.0, objective="mean-e2e")
    found, reported = session(tmp_path_factory.mktemp("mean") / "a.journal", requested)
    return found, reported, profile(found, requested)


@pytest.mark.slow
def test_a_run_for_the_lowest_mean_e2e(lowest_mean: tuple[Findings, KeepingReporter, Profile], tmp_path: Path) -> None:
    """Chosen is what is expected to have the lowest mean, measured and simulated, and no worse than vLLM's defaults."""
    found, reported, made = lowest_mean
    told_of = [note for _, note in reported.done[1:]] + reported.progressed
    assert len(told_of) > 12 and all("mean E2E" in note for note in told_of if note.startswith("best"))
    assert any(note.startswith("best mean E2E ") for note in reported.progressed)
    assert not any("within the SLO" in note for note in told_of)
    front = [p.e2e_mean_ms or inf for p in made.simulated if p.label != PAIRED]
    assert front == sorted(front) and len(set(front)) > 2, "the lowest first: of a long one the others are left out"
    assert made.objective == "mean-e2e" and made.gain is None and made.slo_met
    chosen, measured = made.settings["balanced"].point, [p for p in made.points if p.stage == "validation"]
    (base,) = (p for p in measured if p.knobs == found.baseline)
    assert chosen.e2e_mean_ms is not None and base.e2e_mean_ms is not None and len(measured) > 1
    assert chosen.e2e_mean_ms <= 1.02 * base.e2e_mean_ms, "measured alike: simulation decides"
    assert chosen.knobs == max(found.expected, key=lambda knobs: found.expected[knobs])
    made = made.model_copy(update={"baseline": base})
    assert f"a mean E2E of {chosen.e2e_mean_ms:.4g} ms" in made.verdict and "no SLO was aimed at" in made.verdict
    path = tmp_path / "mean.yaml"
    save_profile(made, path)
    assert load_profile(path) == made
    console = Console(width=200, file=io.StringIO())
    show(made, console)
    assert isinstance(console.file, io.StringIO)
    text = flat(console.file.getvalue())
    assert "E2E mean" in text and ("mean E2E" in text or "No setting beats" in text) and "shown beside it" in text


def said_by(one: Section) -> str:
    """All the words of a section but those of its tables."""
    words = [one.title, one.topic, one.lead, one.absent or "", *one.notes]
    for plot in one.plots:
        words += [plot.title, plot.summary]
        for view in plot.views:
            words += [view.layout[where]["title"]["text"] for where in ("xaxis", "yaxis")]
            words += [label.text for label in view.labels]
            words += [text for trace in view.data for text in trace.get("text", ())]
    return "\n".join(words)


@pytest.mark.slow
@pytest.mark.parametrize("with_model", [True, False])
def test_the_page_of_a_run_for_the_lowest_mean_e2e(
    lowest_mean: tuple[Findings, KeepingReporter, Profile],
    with_model: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ranks settings by their mean E2E, and speaks of that; goodput is a column of its tables, and no more."""
    monkeypatch.setattr("autotune.simulate.sensitivity.REQUESTS", 100)
    found, _, made = lowest_mean
    base = next(p for p in made.points if p.stage == "validation" and p.knobs == found.baseline)
    made = made.model_copy(update={"baseline": base} | ({} if with_model else {"cost_model": None}))
    (tmp_path / made.points_file).write_text(sidecar(found), encoding="utf-8")
    evidence = gather(made, tmp_path / "mean.yaml")
    report = compose(evidence)
    by_key = {one.key: one for one in report.sections}
    head, chosen = report.headline, made.settings["balanced"].point
    mean = f"mean E2E {number(chosen.e2e_mean_ms or 0)} ms"
    assert head.title.startswith(mean) and by_key["pareto"].title == f"Best: {head.title}"
    assert "has a " + mean.replace("E2E", "E2E of") in head.meaning[0] and "no SLO was aimed at" in head.meaning[1]
    assert (head.figures[0].name, head.figures[0].unit) == ("mean E2E", "ms")
    assert head.figures[0].value == number(chosen.e2e_mean_ms or 0)
    for words in (head.title, head.status, *head.meaning, head.sure, *(said_by(one) for one in report.sections)):
        assert "oodput" not in words and "req/s within the SLO" not in words and "requests a second" not in words, words
    for key in ("pareto", "history", "sensitivity"):
        view = by_key[key].plots[0].views[0]
        assert view.layout["yaxis"]["title"]["text"] == "mean E2E (ms)" and view.layout["yaxis"]["type"] == "log"
    assert by_key["paired"].plots[0].title.startswith("Mean E2E") and "Simulated mean E2E" in by_key["paired"].title

    means = [run_.score.e2e_mean_ms for run_ in found.simulated]
    line = by_key["history"].plots[0].views[0].data[0]["y"]
    assert line == [min(m for m in means[: n + 1] if m is not None) for n in range(len(means))]
    assert "lowest mean E2E found so far" in by_key["history"].lead
    assert f"Lowest mean E2E over {len(means)} trials, simulated: {number(line[-1])} ms." in said_by(by_key["history"])
    sensitivity = said_by(by_key["sensitivity"])
    if with_model:
        assert "longer" in sensitivity or "No knob makes the mean E2E 1% longer" in sensitivity
    else:
        assert "only the lower edge" in sensitivity and "within 5% of the best from" in sensitivity

    for shown in (head.purposes, *by_key["points"].tables):
        assert "mean E2E (ms)" in shown.columns and "goodput (req/s)" in shown.columns
        assert {len(row) for row in shown.rows} == {len(shown.columns)}
    for shown in by_key["points"].tables:
        column = [float(row[shown.columns.index("mean E2E (ms)")].replace(",", "")) for row in shown.rows]
        assert column == sorted(column) and len(set(column)) > 1, "the lowest first"
    page = " ".join(Page(html(report)).words)
    assert "Mean E2E: from arrival to the last token" in page and "Goodput: requests a second" in page


def test_the_objective_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--objective", "speed"], "--objective is speed; it must be goodput or mean-e2e"),
        (
            ["--objective", "mean-e2e"],
            "--objective mean-e2e compares settings at a load you name: add --rate, in requests/s",
        ),
        (
            ["--objective", "mean-e2e", "--rate", "5", "--slo", "ttft=1s"],
            "--slo is given; --objective mean-e2e is for those without an SLO: drop one of them",
        ),
    ):
        assert refused(capsys, ["profile", *arguments]) == message
