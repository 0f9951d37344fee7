"""The report's sections: what they gather from a profile, and what their plots show."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cli.report import _essentials
from autotune.cost.model import region_errors
from autotune.profile import Spread
from autotune.profiling.objective import Objective
from autotune.report import Evidence, Report, compose, gather, html
from autotune.report.figure import round_ticks
from autotune.report.headline import headline
from autotune.report.panels import history, pareto
from autotune.report.standing import _share, standing
from autotune.report.wording import defaults, names, number
from autotune.simulate.sensitivity import one_at_a_time, values_of
from runtime.knobs import KNOBS, Knobs
from tests.sample_profile import sample_point, sample_profile
from tests.unit.report.reporting import SECTIONS, TRIALS, Page, section

# -- what it gathers ----------------------------------------------------------------------------------------------------


def test_the_sidecar_is_read_in_whole(evidence: Evidence) -> None:
    assert len(evidence.trials("simulation")) == TRIALS
    assert [t.number for t in evidence.trials("simulation")] == list(range(TRIALS))
    assert len(evidence.steps) == 36 and len(evidence.failures) == 2 and evidence.lacking == ()
    chosen = evidence.recommended.point
    assert [r.score.seed for r in evidence.runs_of(chosen)] == list(chosen.seeds) == [1, 2, 3]
    pairs = evidence.pairs()
    assert {p.knobs for p, _ in pairs} == {p.knobs for p in evidence.compared}
    assert all(a.stage == "validation" and b.stage == "simulation" and a.knobs == b.knobs for a, b in pairs)


def test_without_the_sidecar_it_says_so_and_goes_on(evidence: Evidence, tmp_path: Path) -> None:
    bare = gather(evidence.profile, tmp_path / "example.yaml")
    assert bare.runs == bare.steps == () and "example.points.jsonl" in bare.lacking[0]
    made = compose(bare)
    assert section(made, "latency").absent and section(made, "history").absent
    steps = section(made, "steps")
    assert steps.tables and not steps.plots and steps.notes, "the errors by region are in the profile itself"
    assert section(made, "pareto").plots and section(made, "sensitivity").plots and section(made, "paired").plots
    Page(html(made))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"kind": "step", "region": \nnot json\n[1]\n3\n', "4 lines of example.points.jsonl could not be read"),
        (b"\xff\xfe\x00", "1 line of example.points.jsonl could not be read and was left out."),
        (b"[" * 100_000, "1 line of example.points.jsonl could not be read and was left out."),
        (b"", None),
    ],
)
def test_a_broken_sidecar_is_said(evidence: Evidence, tmp_path: Path, content: bytes, says: str | None) -> None:
    (tmp_path / "example.points.jsonl").write_bytes(content)
    found = gather(evidence.profile, tmp_path / "example.yaml")
    assert found.runs == ()
    assert found.lacking == () if says is None else says in found.lacking[0]


def test_of_a_sidecar_with_a_line_that_is_no_text_the_line_is_left_out(
    evidence: Evidence, path: Path, tmp_path: Path
) -> None:
    whole = path.with_name("example.points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "example.points.jsonl").write_bytes(b"".join([*whole[:5], b'{"stage": "\xff"}\n', *whole[5:]]))
    found = gather(evidence.profile, tmp_path / "example.yaml")
    assert (found.runs, found.steps, found.failures) == (evidence.runs, evidence.steps, evidence.failures)
    assert found.lacking == ("1 line of example.points.jsonl could not be read and was left out.",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("score", "ttft_ms", "p99"), float("inf")),
        (("score", "tpot_ms", "p50"), float("nan")),
        (("score", "throughput"), float("-inf")),
        (("score", "steps", "mean_ms"), float("nan")),
        (("score", "blocks", 0, 1), float("inf")),
        (("score", "setting", "token_budget"), 1e-12),
    ],
)
def test_of_a_sidecar_with_a_run_that_cannot_be_the_line_is_left_out(
    evidence: Evidence, path: Path, tmp_path: Path, field: tuple[str | int, ...], value: float
) -> None:
    whole = path.with_name("example.points.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    odd = json.loads(next(line for line in reversed(whole) if '"stage":"validation"' in line))
    at = odd
    for name in field[:-1]:
        at = at[name]
    at[field[-1]] = value
    (tmp_path / "example.points.jsonl").write_text("".join([*whole, json.dumps(odd) + "\n"]), encoding="utf-8")
    found = gather(evidence.profile, tmp_path / "example.yaml")
    assert found.runs == evidence.runs
    assert found.lacking == ("1 line of example.points.jsonl could not be read and was left out.",)


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
        "pareto": 1, "sensitivity": len([s for s in KNOBS if s.searched]),
        "capacity": 1, "latency": 3, "paired": 4, "steps": 1, "history": 1,
        "provenance": 0, "points": 0,
    }  # fmt: skip
    goodput = number(evidence.recommended.point.goodput.mean)
    assert report.headline.title.startswith(f"{goodput} req/s within the SLO")
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
    paired = section(report, "paired").plots[0].views[0].data
    assert sorted(paired[2]["x"]) == sorted(b.goodput.mean for _, b in evidence.pairs())


def test_a_share_is_told_alike_all_over_the_page(report: Report, evidence: Evidence) -> None:
    """Counted, not as a profile of before rounded it, and never as met where it is missed."""
    objective, chosen = Objective.of(evidence.profile), evidence.recommended.point
    point = chosen.model_copy(update={"offered": 299, "met": 296, "attainment": 0.99})
    trial = evidence.trials("simulation")[0]._replace(attainment=296 / 299)
    told = pareto._hover(objective, point), pareto._hover(objective, trial), history._hover(objective, trial, 1, "")
    assert all("98.997% of requests" in text for text in told)
    assert _share(point, {*point.seeds}, point).mean == 296 / 299
    setting = evidence.recommended.model_copy(update={"point": point})
    profile = evidence.profile.model_copy(update={"settings": {"balanced": setting}})
    rounded = replace(report, evidence=replace(evidence, profile=profile))
    assert _essentials(rounded, Path("x.html"))["attainment"] == 296 / 299


def test_a_knob_is_turned_alone_around_the_choice(evidence: Evidence) -> None:
    chosen = evidence.recommended
    shares: list[float] = []
    found = one_at_a_time(evidence.profile, chosen.knobs, chosen.point.rate, advance=shares.append)
    assert found is not None and found.complete and shares == sorted(shares) and shares[-1] == 1
    assert set(found.by_knob) == {s.name for s in KNOBS if s.searched}
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
    assert values_of(specs["token_budget"], knobs, 1500)[-1] == 1500
    assert {500.0, 1000.0} <= set(values_of(specs["token_budget"], knobs, 1500))
    assert values_of(specs["max_batch_size"], knobs, 1024)[0] == 1
    assert values_of(specs["max_wait_ms"], knobs, 5) == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("base", "says", "clear"),
    [
        ((5.0, 4.9, 5.1), "no clear difference to the vLLM defaults", False),
        ((11.0, 10.0, 12.0), "no clear difference to the vLLM defaults", False),
        ((12.6, 12.0, 13.2), "no clear difference to the vLLM defaults", False),
        ((13.0, 12.5, 13.5), "no clear difference to the vLLM defaults", False),
        ((11.5, 11.0, 11.9), "no clear difference to the vLLM defaults", False),
        ((11.1, 11.05, 11.15), "no clear difference to the vLLM defaults", False),
        ((11.7, 11.0, 12.4), "as many as with the vLLM defaults", False),
        ((0.0, 0.0, 0.0), "none with the vLLM defaults", True),
    ],
)
def test_no_difference_is_claimed_that_was_not_measured(
    base: tuple[float, float, float], says: str, clear: bool
) -> None:
    plain = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)
    spread = Spread(mean=base[0], low=base[1], high=base[2], runs=(base[0],))
    point = sample_point(plain, "baseline").model_copy(update={"goodput": spread, "seeds": (3, 4)})
    compared = Evidence(sample_profile().model_copy(update={"baseline": point}), "p.yaml")
    found = standing(compared)
    assert found.short == f"11.7 req/s within the SLO, {says}" and found.beside == says and found.clear is clear
    overlap = base[1] <= compared.recommended.point.goodput.high and base[2] >= compared.recommended.point.goodput.low
    assert ("within the 95% intervals" in found.sentence) == ("no clear" in says and overlap)
    assert ("by intervals of either alone" in found.sentence) == ("no clear" in says and not overlap)
    assert "same requests" not in found.sentence
    head = headline(compared)
    assert (head.title, head.figures[0].beside) == (found.short, says)
    assert pareto.section(compared).title == f"Best: {found.short}"


def test_regions_are_computed_when_no_model_says_them(evidence: Evidence) -> None:
    off = [abs((step.predicted or 0) / step.seconds - 1) for step in evidence.steps]
    found = {r.region: r for r in region_errors(evidence.steps, off)}
    assert set(found) == {"decode", "prefill", "mixed"} and found["mixed"].points == 9
    assert region_errors(evidence.steps[:1], off[:1])[0].median == off[0]


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
    assert all(t.offered_rate < 25 for t in found.candidates)
    made = pareto.section(found)
    assert any("grey dots met 30.0 req/s" in note for note in made.notes)
    assert not any("30.0 req/s" in note for note in pareto.section(evidence).notes)


def test_a_paired_simulation_is_of_the_same_requests(evidence: Evidence) -> None:
    profile = evidence.profile
    other = profile.simulated[0].model_copy(update={"seeds": (77,), "label": "search"})
    assert all(set(a.seeds) == set(b.seeds) for a, b in evidence.pairs())
    mixed = replace(evidence, profile=profile.model_copy(update={"simulated": (other, *profile.simulated)}))
    assert mixed.pairs() == evidence.pairs()


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
