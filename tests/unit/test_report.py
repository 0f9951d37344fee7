"""The report: what it gathers and says, and that the page is whole, well-formed and safe. tests/integration renders it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.cli.main import run
from autotune.cost_model import CostModel
from autotune.profile import Capacity, Profile, Spread, load_profile, save_profile
from autotune.profiling import table
from autotune.report import Evidence, Report, compose, gather, html
from autotune.report.figure import round_ticks
from autotune.report.headline import headline
from autotune.report.panels import capacity, pareto, sensitivity, steps, twins
from autotune.report.panels.steps import regions
from autotune.report.section import Section
from autotune.report.standing import standing
from autotune.report.sweep import Sweep, around, sweep
from autotune.report.wording import defaults, names, number, off
from runtime.knobs import KNOBS, Knobs
from tests.report_profile import report_profile
from tests.sample_profile import sample_point, sample_profile

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "img", "br", "hr", "input"}
SECTIONS = ["pareto", "sensitivity", "capacity", "latency", "twins", "steps", "history", "provenance", "points"]
TRIALS = 24


class Page(HTMLParser):
    """Every element with its attributes; fails on one that is closed wrongly. ``scripts``: text by what is written in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    def all(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(attribute)) is not None]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Fewer requests a simulated setting than for people; nothing here depends on how sharp the picture is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.report.sweep.REQUESTS", 100)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_profile(tmp_path_factory.mktemp("report"), trials=TRIALS, window_s=12.0)


@pytest.fixture(scope="module")
def evidence(path: Path) -> Evidence:
    return gather(load_profile(path), path)


@pytest.fixture(scope="module")
def report(evidence: Evidence) -> Report:
    return compose(evidence)


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return html(report)


@pytest.fixture
def folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in path.parent.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(made: Report, key: str) -> Section:
    return next(s for s in made.sections if s.key == key)


def changed(evidence: Evidence, **changes: Any) -> Profile:
    profile = evidence.profile
    return Profile(**{name: getattr(profile, name) for name in Profile.model_fields} | changes)


# -- what it gathers ----------------------------------------------------------------------------------------------------


def test_the_sidecar_is_read_in_whole(evidence: Evidence) -> None:
    assert len(evidence.trials("simulation")) == TRIALS
    assert [t.number for t in evidence.trials("simulation")] == list(range(TRIALS))
    assert len(evidence.steps) == 36 and len(evidence.failures) == 2 and evidence.lacking == ()
    chosen = evidence.recommended.point
    assert [r.score.seed for r in evidence.runs_of(chosen)] == list(chosen.seeds) == [1, 2, 3]
    pairs = evidence.twins()
    assert {p.knobs for p, _ in pairs} == {p.knobs for p in evidence.compared}
    assert all(a.stage == "validation" and b.stage == "simulation" and a.knobs == b.knobs for a, b in pairs)


def test_without_the_sidecar_it_says_so_and_goes_on(evidence: Evidence, tmp_path: Path) -> None:
    bare = gather(evidence.profile, tmp_path / "example.yaml")
    assert bare.runs == bare.steps == () and "example.points.jsonl" in bare.lacking[0]
    made = compose(bare)
    assert section(made, "latency").absent and section(made, "history").absent
    steps = section(made, "steps")
    assert steps.tables and not steps.plots and steps.notes, "the errors by region are in the profile itself"
    assert section(made, "pareto").plots and section(made, "sensitivity").plots and section(made, "twins").plots
    Page(html(made))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"kind": "step", "region": \nnot json\n[1]\n3\n', "4 lines of example.points.jsonl could not be read"),
        (b"\xff\xfe\x00", "cannot be read: it is not text"),
        (b"", None),
    ],
)
def test_a_broken_sidecar_is_said(evidence: Evidence, tmp_path: Path, content: bytes, says: str | None) -> None:
    (tmp_path / "example.points.jsonl").write_bytes(content)
    found = gather(evidence.profile, tmp_path / "example.yaml")
    assert found.runs == ()
    assert found.lacking == () if says is None else says in found.lacking[0]


def test_the_runs_of_another_profile_are_left_alone(path: Path, tmp_path: Path) -> None:
    shutil.copy(path.with_name("example.points.jsonl"), tmp_path)
    other = sample_profile(points_file="example.points.jsonl")
    found = gather(other, tmp_path / "example.yaml")
    assert found.runs == () and "another profile" in found.lacking[0]


def test_settings_have_names(evidence: Evidence) -> None:
    called = names(evidence)
    assert set(called) >= {p.knobs for p in evidence.compared}
    assert "balanced" in called[evidence.recommended.knobs]
    assert set(defaults(evidence).values()) == {"vLLM and TensorRT-LLM defaults", "SGLang (small GPU) defaults"}
    assert all(re.search(r"balanced|interactive|throughput|defaults|trial \d+", name) for name in called.values())


# -- what it says -------------------------------------------------------------------------------------------------------


def test_every_section_has_a_finding_and_its_plots(report: Report, evidence: Evidence) -> None:
    assert [s.key for s in report.sections] == SECTIONS
    assert all(s.absent is None and s.title for s in report.sections)
    assert {s.key: len(s.plots) for s in report.sections} == {
        "pareto": 1, "sensitivity": 4, "capacity": 1, "latency": 3, "twins": 4, "steps": 1, "history": 1, "provenance": 0,
        "points": 0,
    }  # fmt: skip
    goodput = number(evidence.recommended.point.goodput.mean)
    assert report.headline.title.startswith(f"{goodput} req/s in SLO")
    assert section(report, "pareto").title.startswith(f"Best: {goodput} req/s")
    assert [(k.name, k.unit) for k in report.headline.knobs] == [(s.name, s.unit) for s in KNOBS]
    failed = section(report, "history").tables[0].rows
    assert [row[0] for row in failed] == ["2"] and "out of memory" in failed[0][1]


def test_plots_show_the_figures_of_the_profile(report: Report, evidence: Evidence) -> None:
    views = section(report, "pareto").plots[0].views
    assert [v.name for v in views] == ["Worst of all", "TTFT", "TPOT"]
    ttft = next(v for v in views if v.name == "TTFT")
    measured = next(t for t in ttft.data if "error_y" in t)
    assert sorted(measured["x"]) == sorted(p.ttft_p99_ms for p in evidence.compared if p.ttft_p99_ms is not None)
    assert sorted(measured["y"]) == sorted(p.goodput.mean for p in evidence.compared)
    assert ttft.layout["shapes"][0]["x1"] == evidence.profile.slo.ttft_ms, "the region ends at the target"
    steps = section(report, "steps").plots[0].views[0].data
    assert sum(len(t["x"]) for t in steps) == len(evidence.steps)
    curve = section(report, "latency").plots[0].views[0].data
    assert {len(t["x"]) for t in curve} == {23, 46}, "a curve at the stored percentiles, and the band around it"
    twin = section(report, "twins").plots[0].views[0].data
    assert sorted(twin[2]["x"]) == sorted(b.goodput.mean for _, b in evidence.twins())


def test_a_knob_is_turned_alone_around_the_choice(evidence: Evidence) -> None:
    chosen = evidence.recommended
    shares: list[float] = []
    found = sweep(evidence.profile, chosen.knobs, chosen.point.rate, advance=shares.append)
    assert found is not None and found.complete and shares == sorted(shares) and shares[-1] == 1
    assert set(found.by_knob) == {s.name for s in KNOBS}
    here = chosen.knobs.as_dict()
    at_choice = set()
    for name, values in found.by_knob.items():
        assert [v for v, _ in values] == sorted({v for v, _ in values})
        for value, score in values:
            assert score.setting == {**here, name: value}
            if value == here[name]:
                at_choice.add(score.goodput)
    assert len(at_choice) == 1, "all knobs meet at the choice"


def test_values_around_a_knob_stay_below_its_ceiling() -> None:
    specs = {s.name: s for s in KNOBS}
    knobs = Knobs(max_batch_size=3, max_wait_ms=0, token_budget=1000, chunk_size=64)
    assert around(specs["token_budget"], knobs, 1500)[-1] == 1500
    assert {500.0, 1000.0} <= set(around(specs["token_budget"], knobs, 1500))
    assert around(specs["max_batch_size"], knobs, 1024)[0] == 1
    assert around(specs["max_wait_ms"], knobs, 5) == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("base", "says", "clear"),
    [
        ((5.0, 4.9, 5.1), "2.3× the vLLM defaults", True),
        ((11.0, 10.0, 12.0), "6% more than with the vLLM defaults", False),
        ((11.7, 11.0, 12.4), "as many as with the vLLM defaults", False),
        ((0.0, 0.0, 0.0), "none with the vLLM defaults", True),
    ],
)
def test_no_difference_is_claimed_that_was_not_measured(
    base: tuple[float, float, float], says: str, clear: bool
) -> None:
    plain = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)
    spread = Spread(mean=base[0], low=base[1], high=base[2], runs=(base[0],))
    point = sample_point(plain, "baseline").model_copy(update={"goodput": spread})
    found = standing(Evidence(sample_profile().model_copy(update={"baseline": point}), "p.yaml"))
    assert says in found.short and found.clear is clear
    assert ("within what repeated runs spread" in found.sentence) == ("more" in says)


def test_regions_are_computed_when_no_model_says_them(evidence: Evidence) -> None:
    found = {r.region: r for r in regions(list(evidence.steps))}
    assert set(found) == {"decode", "prefill", "mixed"} and found["mixed"].points == 9
    step = evidence.steps[0]
    assert regions([step])[0].median == pytest.approx(abs((step.predicted or 0) / step.seconds - 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1234, "0.123"), (11.24, "11.2"), (388.4, "388"), (1904.2, "1,904"), (0.5, "0.5"), (40, "40.0")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("bounds", [(0.9, 1.1), (3, 5), (10, 60000), (0.001, 1e9), (670, 1570), (1, 8192)])
def test_ticks_are_round_few_and_inside(bounds: tuple[float, float]) -> None:
    ticks = round_ticks(*bounds)
    assert 2 <= len(ticks) <= 7 and ticks == sorted(set(ticks))
    assert all(bounds[0] <= t <= bounds[1] for t in ticks)


def test_trials_at_another_rate_are_shown_as_such(evidence: Evidence) -> None:
    """The rate settings are compared at may be found only after the search."""
    moved = tuple(
        r.model_copy(update={"score": r.score.model_copy(update={"rate": 30.0, "offered_rate": 30.0})})
        if r.trial >= 0
        else r
        for r in evidence.runs
    )
    found = replace(evidence, runs=moved)
    assert len(found.trials("simulation")) == TRIALS
    assert all(t.offered_rate < 25 for t in found.finalists)
    made = pareto.section(found)
    assert any("grey dots met 30.0 req/s" in note for note in made.notes)
    assert not any("30.0 req/s" in note for note in pareto.section(evidence).notes)


def test_a_twin_is_the_simulation_of_the_same_requests(evidence: Evidence) -> None:
    profile = evidence.profile
    other = profile.simulated[0].model_copy(update={"seeds": (77,), "label": "search"})
    assert all(set(a.seeds) == set(b.seeds) for a, b in evidence.twins())
    mixed = replace(evidence, profile=profile.model_copy(update={"simulated": (other, *profile.simulated)}))
    assert mixed.twins() == evidence.twins()


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_in_both_schemes(text: str) -> None:
    """4.5 : 1 for words, 3 : 1 for marks (WCAG 2, AA)."""
    style = text[text.index("<style>") : text.index("</style>")]
    dark = style.index("prefers-color-scheme: dark")
    for block in (style[:dark], style[dark:]):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for name in colours.keys() - {"bg", "card", "line", "grid"}:
            least = 3.0 if name == "faint" or name[0] == "c" else 4.5
            for ground in ("bg", "card"):
                high, low = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
                contrast = (high + 0.05) / (low + 0.05)
                assert contrast >= least, f"{name} on {ground}: {contrast:.2f}"


def slower(evidence: Evidence, speed: float) -> Profile:
    """The profile with a cost model that is ``speed`` times as fast in everything."""
    facts = evidence.profile.cost_model
    assert facts is not None
    return changed(
        evidence, cost_model=CostModel.from_facts(facts).scaled(compute=speed, bandwidth=speed, overhead=speed).facts
    )


def test_a_simulation_that_keeps_nothing_says_nothing_of_knobs(evidence: Evidence) -> None:
    found = replace(evidence, profile=slower(evidence, 0.1))
    swept = sweep(found.profile, found.recommended.knobs, found.recommended.point.rate)
    assert swept is not None and {s.goodput for values in swept.by_knob.values() for _, s in values} == {0.0}
    made = sensitivity.section(found, swept)
    assert made.title.startswith("At this rate the simulation keeps nothing in SLO") and made.plots
    for plot in made.plots:
        assert max(y for view in plot.views for trace in view.data for y in trace["y"]) > 0, "a plot that is flat at 0"
    bare = replace(found, runs=())
    bare = replace(bare, profile=bare.profile.model_copy(update={"simulated": ()}))
    assert (without := sensitivity.section(bare, swept)).absent is not None and "keeps nothing" in without.absent
    here = found.recommended.knobs.as_dict()
    elsewhere = {
        name: [(v, s if s.setting == here else s.model_copy(update={"goodput": 5.0})) for v, s in values]
        for name, values in swept.by_knob.items()
    }
    at_choice = sensitivity.section(found, Sweep(elsewhere, 100, True))
    assert "keeps nothing in SLO at the choice itself" in at_choice.title


def test_knobs_are_turned_at_the_speed_the_machine_served_at(evidence: Evidence) -> None:
    slow, facts, chosen = slower(evidence, 0.1), evidence.profile.simulation, evidence.recommended
    assert facts is not None
    served = slow.model_copy(update={"simulation": facts.model_copy(update={"speed": 10.0})})
    found = [sweep(profile, chosen.knobs, chosen.point.rate) for profile in (served, evidence.profile)]
    corrected, fitted = ([s.goodput for values in each.by_knob.values() for _, s in values] for each in found if each)
    assert max(corrected) > 0 and corrected == pytest.approx(fitted, rel=0.05)


def test_titles_warn_of_figures_that_are_far_off(evidence: Evidence) -> None:
    assert (
        off("Modelled step times", 0.021, 0.08)
        == "Modelled step times are typically off by 2.1% (median), at worst by 8.0%"
    )
    warned = off("Simulated goodput figures", 0.9, 2.8)
    assert (
        warned == "Simulated goodput figures are not to be relied on: typically off by 90% (median), at worst by 280%"
    )
    far = tuple(
        p.model_copy(update={"goodput": Spread(mean=0.1 * p.goodput.mean, low=0, high=1, runs=(0.1,))})
        for p in evidence.profile.simulated
    )
    made = twins.section(replace(evidence, profile=evidence.profile.model_copy(update={"simulated": far})))
    assert "not to be relied on: typically off by 9" in made.title and "within" not in made.title
    wrong = replace(
        evidence,
        profile=changed(evidence, cost_model=None),
        steps=tuple(
            s.model_copy(update={"predicted": (1.4 if n else 3.8) * s.seconds}) for n, s in enumerate(evidence.steps)
        ),
    )
    title = steps.section(wrong).title
    assert "not to be relied on: typically off by 40% (median), at worst by 280%" in title


def test_a_rate_missed_below_the_one_that_was_kept_is_said(evidence: Evidence) -> None:
    found = evidence.profile.capacity
    assert found is not None and found.rate is not None
    low = min(found.tried, key=lambda p: p.rate)
    worse = low.model_copy(update={"met": 0, "attainment": 0.0, "attainment_low": 0.0})
    tried = tuple(worse if p is low else p for p in found.tried)
    top = max(p.rate for p in tried)
    profile = evidence.profile.model_copy(
        update={"capacity": Capacity(knobs=found.knobs, rate=top, tried=tried), "slo_met": True}
    )
    doubtful = replace(evidence, profile=profile)
    title, missed = capacity.section(doubtful).title, number(low.offered_rate)
    assert "up to" not in title and missed in title and "not certain" in title
    head = headline(doubtful)
    assert head.tone == "unsure" and f"missed at {missed}" in head.status


def test_doubts_stand_in_the_headline(evidence: Evidence) -> None:
    class Doubted(Profile):
        doubts: tuple[str, ...] = ()

    doubted = Doubted(
        **{name: getattr(evidence.profile, name) for name in Profile.model_fields if name != "doubts"}
        | {"cost_model": None, "doubts": ("the <machine> was busy",)}
    )
    made = compose(replace(evidence, profile=doubted))
    assert made.headline.doubts == ("The <machine> was busy.",)
    words = "".join(Page(html(made)).words)
    assert words.index("The <machine> was busy.") < words.index(made.headline.meaning[0])
    console = Console(width=120, record=True, file=StringIO())
    table.show(doubted, console)
    assert "The <machine> was busy." in console.export_text()
    assert headline(evidence).doubts == ()


# -- profiles that lack things ------------------------------------------------------------------------------------------


def test_an_older_profile_says_what_it_lacks() -> None:
    file = ROOT / "profiles" / "cpu-2core-tiny.yaml"
    profile = changed(
        Evidence(load_profile(file), file.name), cost_model=None, simulated=(), simulation=None, confidence=None
    )
    made = compose(gather(profile, Path("nowhere") / file.name))
    absent = {s.key: s.absent for s in made.sections if s.absent is not None}
    assert set(absent) >= {"latency", "twins", "steps"}
    assert all(why.endswith(".") and why.count(". ") <= 1 for why in absent.values())
    assert section(made, "pareto").plots and section(made, "capacity").plots
    assert "not worked out" in made.headline.sure
    Page(html(made))


def test_a_run_stopped_in_the_search(evidence: Evidence) -> None:
    found = [p.model_copy(update={"stage": "search", "seeds": (0,)}) for p in evidence.compared]
    best = evidence.recommended.model_copy(
        update={"point": next(p for p in found if p.knobs == evidence.recommended.knobs)}
    )
    profile = changed(
        evidence, status="stopped", points=tuple(found), settings={"balanced": best}, capacity=None, baseline=None,
        confidence=None, simulated=(), cost_model=None, simulation=None, verdict="stopped before the end", slo_met=True,
    )  # fmt: skip
    made = compose(Evidence(profile, "p.yaml"))
    assert made.headline.status == "SLO not missed so far (run stopped early)" and made.headline.tone == "unsure"
    assert "Not validated" in made.headline.sure
    assert {s.key for s in made.sections if s.absent} >= {"capacity", "twins", "steps", "latency"}
    Page(html(made))


def test_a_profile_of_one_point() -> None:
    one = sample_profile({"interactive": Knobs()})
    made = compose(Evidence(one, "p.yaml"))
    assert section(made, "pareto").absent and section(made, "sensitivity").absent
    Page(html(made))


def test_an_slo_that_is_not_met_is_said_first(evidence: Evidence) -> None:
    none = evidence.profile.capacity
    assert none is not None
    capacity = Capacity(knobs=none.knobs, rate=None, tried=none.tried)
    made = compose(Evidence(changed(evidence, slo_met=False, capacity=capacity, cost_model=None), "p.yaml"))
    assert made.headline.status == "SLO not met" and made.headline.tone == "bad"
    assert section(made, "capacity").title == "The SLO was not kept at any rate tried"


# -- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_its_parts_find_each_other(text: str, report: Report) -> None:
    page = Page(text)
    ids = page.all("id")
    assert len(ids) == len(set(ids)) and set(SECTIONS) <= set(ids)
    assert [a[1:] for a in page.all("href")] == SECTIONS
    plots = json.loads(page.scripts[0])
    assert [f"plot-{key}" for key in plots] == [i for i in ids if i.startswith("plot-")]
    assert sum(len(s.plots) for s in report.sections) == len(plots) == 15
    assert all(label for label in page.all("aria-label")) and "viewport" in page.all("name")


def test_nothing_is_loaded_and_only_our_scripts_run(text: str) -> None:
    page = Page(text)
    assert page.all("src") == [] and not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    assert all(a.startswith("#") for a in page.all("href"))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    for script in page.scripts[1:]:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert len(page.scripts) == 3 and "unsafe-inline" not in re.search(r"script-src[^;]*", policy)[0]  # type: ignore[index]


def test_hostile_names_stay_names(evidence: Evidence, report: Report) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
    profile = evidence.profile
    point = profile.points[0].model_copy(update={"label": f"{evil} defaults"})
    hostile = changed(
        evidence, name=evil, verdict=evil, command=evil, points_file=evil.replace("/", ""),
        model=profile.model.model_copy(update={"name": evil}), points=(point, *profile.points[1:]),
        workload=profile.workload.model_copy(update={"description": evil, "spec": evil}),
        machine=profile.machine.model_copy(update={"os": evil, "cpu": evil}),
    )  # fmt: skip
    failures = (*evidence.failures, evidence.failures[0]._replace(cause=evil, trial=3))
    steps = tuple(s.model_copy(update={"region": evil}) for s in evidence.steps)
    found = Evidence(hostile, evil, evidence.runs, steps, failures, (evil,))
    page = Page(html(compose(found)))
    assert len(page.scripts) == 3, "no script but ours"
    assert "img" not in {tag for tag, _ in page.elements} and page.all("onerror") == []
    assert evil in "".join(page.words) and "49" not in page.words
    for plot in json.loads(page.scripts[0]).values():
        shown = json.dumps([[t.get("text"), t.get("name")] for v in plot["views"] for t in v["data"]])
        assert "<img" not in shown and "<script" not in shown, "plotly reads HTML in its labels"


def test_plotly_knows_every_property_and_the_style_sheet_every_colour(text: str) -> None:
    from plotly.graph_objects import Figure

    style = text[text.index("<style>") : text.index("</style>")]
    defined = set(re.findall(r"--([\w-]+):", style))
    plots = json.loads(Page(text).scripts[0])
    used = set(re.findall(r'"@([\w-]+)"', json.dumps(plots)))
    assert used <= defined and "accent" in used
    dark = style[style.index("prefers-color-scheme: dark") :]
    assert used - {"font"} <= set(re.findall(r"--([\w-]+):", dark[: dark.index("\n}")])), "each has its dark twin"
    for plot in plots.values():
        for view in plot["views"]:
            assert view["data"], "an empty plot"
            resolved = re.sub(r'"@font"', '"Arial"', json.dumps(view))
            resolved = re.sub(r'"@[\w-]+"', '"#123456"', resolved)
            Figure(data=json.loads(resolved)["data"], layout=json.loads(resolved)["layout"])


# -- the command --------------------------------------------------------------------------------------------------------


def test_it_writes_the_page_and_prints_the_essentials(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "example.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "req/s in SLO" in shown and "token_budget" in shown and "balanced" in shown
    assert shown.rstrip().endswith("report  example.html")
    assert Page((folder / "example.html").read_text()).scripts
    assert run(["report", "example.yaml"]) == 0, "a report may be overwritten"


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str], evidence: Evidence) -> None:
    save_profile(changed(evidence, cost_model=None), folder / "example.yaml")
    assert run(["report", "example.yaml", "--out", "page.html", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["file"] == "page.html" and made["knobs"] == evidence.recommended.knobs.as_dict()
    assert made["goodput"] == evidence.recommended.point.goodput.mean and made["lacking"] == []
    assert list(made["sections"]) == SECTIONS and made["sections"]["pareto"]["absent"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("example.points.jsonl",), "holds the raw runs of a profile; name the profile itself, example.yaml"),
        (("log.jsonl", "--records", "no.jsonl"), "--records: no.jsonl cannot be read (No such file or directory)"),
        (("example.yaml", "--records", "r.jsonl"), "it goes with a decision log, and example.yaml is none"),
        (("page.html",), "is a page, perhaps a report already; name the profile it was made from"),
        (("nothing.yaml",), "nothing.yaml: cannot be read (No such file or directory)"),
        (("empty.yaml",), "empty.yaml: is not a profile"),
        (("other.json",), "other.json: is not a profile; `autotune profile` makes one"),
        (("d",), "d: is a directory; name a profile"),
        (("example.yaml", "--out", "x.pdf"), "--out: x.pdf must end in .html"),
        (("example.yaml", "--out", "no/x.html"), "there is no directory no"),
        (("example.yaml", "--out", "page.html"), "--out: page.html exists and is no report; name another file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    shutil.copy(ROOT / "tests/replay/data/cpu-growing.decisions.jsonl", "log.jsonl")
    Path("page.html").write_text("<!DOCTYPE html><p>mine")
    Path("empty.yaml").write_text("")
    Path("other.json").write_text('{"a": 1}')
    Path("d").mkdir()
    before = {p.name for p in folder.iterdir()}
    assert run(["report", *words]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ") and says in complaint and complaint.count("\n") == 1
    assert {p.name for p in folder.iterdir()} == before and Path("page.html").read_text().endswith("mine")
