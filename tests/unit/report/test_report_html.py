"""The page itself, and the command that writes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from autotune.cli.main import run
from autotune.cli.report import page_for
from autotune.profile import find_profile, save_profile
from autotune.report import Evidence, Report, compose, html
from runtime.knobs import KNOBS
from tests.unit.report.reporting import SECTIONS, Page, changed

ROOT = Path(__file__).parents[3]


# -- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_its_parts_find_each_other(text: str, report: Report) -> None:
    page = Page(text)
    ids = page.all("id")
    assert len(ids) == len(set(ids)) and set(SECTIONS) <= set(ids)
    assert [a[1:] for a in page.all("href")] == SECTIONS
    plots = json.loads(page.scripts[0])
    assert [f"plot-{key}" for key in plots] == [i for i in ids if i.startswith("plot-")]
    assert sum(len(s.plots) for s in report.sections) == len(plots) == 11 + sum(knob.searched for knob in KNOBS)
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
    assert "req/s within the SLO" in shown and "token_budget" in shown and "balanced" in shown
    assert shown.rstrip().endswith("report  example.html")
    assert Page((folder / "example.html").read_text()).scripts
    assert run(["report", "example.yaml"]) == 0, "a report may be overwritten"


def test_a_price_given_is_in_the_page_and_not_in_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("example.yaml").read_text()
    assert run(["report", "example.yaml", "--price", "2.50/h"]) == 0
    page = (folder / "example.html").read_text()
    assert "price/M tokens" in page and "at 2.50 per hour" in page
    assert Path("example.yaml").read_text() == before


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str], evidence: Evidence) -> None:
    save_profile(changed(evidence, cost_model=None), folder / "example.yaml")
    assert run(["report", "example.yaml", "--out", "page.html", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["file"] == "page.html" and made["knobs"] == evidence.recommended.knobs.as_dict()
    assert made["goodput"] == evidence.recommended.point.goodput.mean and made["lacking"] == []
    assert made["stage"] == "validation"
    assert list(made["sections"]) == SECTIONS and made["sections"]["pareto"]["absent"] is None


def test_help_says_where_the_page_goes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["report", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "beside the profile or log, named .html; for a shipped profile, in this folder" in said
    assert page_for(find_profile("cpu-2core-tiny"), None) == Path("cpu-2core-tiny.html")
    assert page_for(folder / "example.yaml", None) == folder / "example.html"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("example.points.jsonl",), "is the raw runs of a profile; name the profile itself, example.yaml"),
        (("log.jsonl", "--records", "no.jsonl"), "--records: no.jsonl cannot be read (No such file or directory)"),
        (("example.yaml", "--records", "r.jsonl"), "it goes with a decision log, and example.yaml is none"),
        (("log.jsonl", "--price", "1/h"), "--price is 1/h; it goes with a profile, and log.jsonl is a decision log"),
        (("example.yaml", "--price", "1"), '--price: "1" is not a price for a time; write 1/h'),
        (("page.html",), "is a page, perhaps a report already; name the profile it was made from"),
        (("nothing",), "nothing: cannot be read (No such file or directory), and is no shipped profile either"),
        (("n" * 300,), "n: cannot be read (File name too long)"),
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
