"""The report in a real browser: drawn whole at every width, in light, dark and on paper, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.model import CostModel
from autotune.profile import Setting, load_profile
from autotune.report import Evidence, compose, gather, html
from tests.report_profile import report_profile

ROOT = Path(__file__).parents[2]
WIDTHS = (400, 800, 1400)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = "AUTOTUNE_BROWSER"
"""Names the Chromium to use, where it is not found by one of the names above."""

pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(600)]

MARKS = """plot => [...plot.querySelectorAll('.points path, .js-line, .errorbars path, .js-fill')]
    .filter(one => { const box = one.getBoundingClientRect(); return box.width + box.height > 1; }).length"""

CUT_OFF = """() => [...document.querySelectorAll('.plot')].flatMap(plot => {
    const frame = plot.getBoundingClientRect();
    return [...plot.querySelectorAll('svg text')].filter(text => text.textContent.trim()).flatMap(text => {
        const box = text.getBoundingClientRect();
        const inside = box.left >= frame.left - 2 && box.right <= frame.right + 2
            && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2;
        return inside ? [] : [plot.id + ': ' + text.textContent];
    });
})"""

OVERLAPPING = """selector => [...document.querySelectorAll('.plot')].flatMap(plot => {
    const boxes = [...plot.querySelectorAll(selector)].filter(text => text.textContent.trim())
        .map(text => [text.textContent, text.getBoundingClientRect()]);
    const found = [];
    boxes.forEach(([one, a], n) => boxes.slice(n + 1).forEach(([other, b]) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 2) found.push(plot.id + ': ' + one + ' / ' + other);
    }));
    return found;
})"""

SQUEEZED = """() => [...document.querySelectorAll(
        'header.page h1, header.page p, header.page .status, .tile, .tile *, .facts *, h2, nav a, figcaption')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline')
    .map(one => one.tagName + '.' + one.className + ': ' + one.textContent.trim().slice(0, 60))"""

FLAT = """() => [...document.querySelectorAll('.plot')].filter(plot => {
    const ys = plot.data.filter(trace => trace.mode === 'markers').flatMap(trace => [...trace.y]);
    return ys.length > 1 && ys.every(y => y === 0);
}).map(plot => plot.id)"""

SHORTENED = """() => [...document.querySelectorAll('.plot svg text, header.page *')]
    .filter(one => !one.children.length && one.textContent.trim().endsWith('…')).map(one => one.textContent)"""

ON_A_RULE = """() => [...document.querySelectorAll('.plot')].flatMap(plot => {
    const rules = [...plot.querySelectorAll('.shapelayer path')].map(path => path.getBoundingClientRect())
        .filter(box => Math.min(box.width, box.height) < 3);
    return [...plot.querySelectorAll('.annotation-text-g text')].filter(text => {
        const a = text.getBoundingClientRect();
        return rules.some(b => Math.min(a.right, b.right + 1) - Math.max(a.left, b.left - 1) > 1.5
            && Math.min(a.bottom, b.bottom + 1) - Math.max(a.top, b.top - 1) > 1.5);
    }).map(text => plot.id + ': ' + text.textContent);
})"""

SCROLLED = """() => [...document.querySelectorAll('header.page .scroll')]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.getAttribute('aria-label'))"""

STACKED = """() => {
    const blocks = [...document.querySelectorAll('header.page > *, .tile, nav a')], found = [];
    blocks.forEach((one, n) => blocks.slice(n + 1).forEach(other => {
        if (one.contains(other)) return;
        const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 1) found.push(one.textContent.trim().slice(0, 40) + ' / ' + other.textContent.trim().slice(0, 40));
    }));
    return found;
}"""


def browser_program() -> str:
    found = os.environ.get(BROWSER) or next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium here: install one (apt-get install chromium), or name it in {BROWSER}")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = browser_program()
    with api.sync_playwright() as playwright:
        # --no-sandbox: as root in a container there is none to be had, and the page is our own
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full profile; one of a disturbed machine; one without its sidecar and under long names; and the oldest that ships."""
    folder = tmp_path_factory.mktemp("pages")
    full = report_profile(folder, trials=150)
    shipped = ROOT / "profiles" / "cpu-2core-tiny.yaml"
    made = {"full": gather(load_profile(full), full), "shipped": gather(load_profile(shipped), shipped)}
    profile = made["full"].profile
    long = profile.model_copy(
        update={
            "name": "averyveryverylongname" * 4,
            "model": profile.model.model_copy(update={"name": "organisation/" + "model-with-a-long-name-" * 5}),
            "verdict": "<b>not bold</b> " + "and-so-on" * 20,
        }
    )
    made["disturbed"] = disturbed(made["full"])
    made["long"] = gather(long, folder / "elsewhere" / "p.yaml")
    for name, evidence in made.items():
        (folder / f"{name}.html").write_text(html(compose(evidence)), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def disturbed(evidence: Evidence) -> Evidence:
    """One setting best for two purposes and somebody's defaults besides; a model of a machine too slow to keep anything."""
    profile, base = evidence.profile, evidence.profile.baseline
    assert base is not None and profile.cost_model is not None
    defaults = Setting(knobs=base.knobs, why="of those measured", point=base)
    slow = CostModel(profile.cost_model).scaled(compute=0.1, bandwidth=0.1, overhead=0.1)
    settings = {"interactive": defaults, "balanced": profile.settings["balanced"], "throughput": defaults}
    return replace(evidence, profile=profile.model_copy(update={"settings": settings, "cost_model": slow.facts}))


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    """The page, drawn. Fails when it logged an error, raised one, or asked for anything but itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"raised: {error}"))
    page.on("request", lambda request: requested.append(request.url))
    try:
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=60_000)
        page.wait_for_timeout(150)  # a resize that follows is drawn in the next frame
        yield page
        assert said == []
        assert [url for url in requested if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    finally:
        context.close()


def check_whole(page: Any) -> None:
    """Nothing is wider than the window, empty, cut off, or on top of something else."""
    wide, there = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= there, f"{wide - there} px wider than the window"
    plots = page.query_selector_all(".plot")
    assert plots
    for plot in plots:
        assert plot.evaluate(MARKS) > 0, f"{plot.get_attribute('id')} is empty"
        inner, outer = plot.evaluate("p => [p.querySelector('svg').getBoundingClientRect().width, p.clientWidth]")
        assert outer - 2 <= inner <= outer, f"{plot.get_attribute('id')} does not fill its place"
    assert page.evaluate(CUT_OFF) == []
    for selector in (".annotation-text-g", ".xtick text", ".ytick text", ".legendtext"):
        assert page.evaluate(OVERLAPPING, selector) == [], selector
    assert page.evaluate(SQUEEZED) == []
    assert page.evaluate(STACKED) == []
    assert page.evaluate(FLAT) == [], "plots that show nothing but zeros"
    assert page.evaluate(SHORTENED) == [], "names cut short"
    assert page.evaluate(ON_A_RULE) == [], "words on a line"
    if page.viewport_size["width"] < 540:
        assert page.evaluate(SCROLLED) == [], "settings to be scrolled sideways"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "shipped", "long", "disturbed"])
def test_it_is_whole_at_every_width(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    with opened(browser, pages[name], width) as page:
        check_whole(page)


def test_each_view_of_the_front_is_whole(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 800) as page:
        titles = set()
        for button in page.query_selector_all(".views button"):
            button.click()
            assert button.get_attribute("aria-pressed") == "true"
            titles.add(page.text_content("#plot-pareto .xtitle"))
            check_whole(page)
        assert titles == {"worst p99, as a multiple of its target", "TTFT p99 (ms)", "TPOT p99 (ms)"}
        assert len(page.query_selector_all(".views button[aria-pressed=true]")) == 1


def test_it_follows_the_window_and_the_scheme(browser: Any, pages: dict[str, Path]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#plot-pareto .ytick text').style.fill"
    with opened(browser, pages["full"], 1400, "dark") as page:
        check_whole(page)
        dark = page.evaluate(background), page.evaluate(ink)
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(300)
        assert all(
            before != after for before, after in zip(dark, (page.evaluate(background), page.evaluate(ink)), strict=True)
        )
        page.set_viewport_size({"width": 420, "height": 900})
        page.wait_for_timeout(800)
        check_whole(page)


def test_hovering_says_what_a_point_is(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 1400) as page:
        page.locator("#plot-capacity").scroll_into_view_if_needed()
        page.locator("#plot-capacity .points path").first.hover(force=True)
        said = page.locator("#plot-capacity .hoverlayer").text_content(timeout=5_000)
        assert "req/s offered" in said and "requests met the SLO" in said


def test_tables_sort(browser: Any, pages: dict[str, Path]) -> None:
    rows = "[...document.querySelector('#points table').tBodies[0].rows]"
    cells = rows + ".map(r => parseFloat(r.cells[4].textContent.replace(/,/g, '')))"
    with opened(browser, pages["full"], 1400) as page:
        head = page.locator("#points thead th").nth(4)
        head.click()
        down = page.evaluate(cells)
        assert (
            head.get_attribute("aria-sort") == "descending"
            and down == sorted(down, reverse=True)
            and len(set(down)) > 1
        )
        head.press("Enter")
        assert page.evaluate(cells) == down[::-1] or page.evaluate(cells) == sorted(down)


def test_on_paper_it_is_light_and_as_wide_as_a_page(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], 1400, "dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        widths = page.evaluate(
            "[...document.querySelectorAll('.plot')].map(p => p.querySelector('svg').getBoundingClientRect().width)"
        )
        assert min(widths) > 200 and max(widths) <= 682
        assert (
            page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#ffffff"
        )
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        check_whole(page)
        printed = page.pdf(format="A4")
        assert printed.startswith(b"%PDF") and len(printed) > 50_000
