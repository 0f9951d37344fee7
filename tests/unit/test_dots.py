"""Pictures of rows of dots: scales that hold what is drawn, and nothing where there is no number."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from benchmarks.dots import Row, drawing, panels_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("values", [[0.3, 0.74], [0.05, 3.4], [1.0], [math.nan, math.inf], [], [1.2, 9.7]])
def test_a_scale_holds_every_number_and_the_mark_in_a_few_ticks(values: list[float]) -> None:
    (panel,) = panels_of(values, ["a"], mark=1.0)
    assert panel.low <= min([v for v in values if math.isfinite(v)] + [1.0])
    assert panel.high >= max([v for v in values if math.isfinite(v)] + [1.0])
    ticks = list(panel.ticks)
    assert 2 <= len(ticks) <= 14 and ticks[0] == pytest.approx(panel.low) and ticks[-1] == pytest.approx(panel.high)


def test_a_dot_for_each_number_at_its_place_and_none_for_what_is_no_number() -> None:
    rows = [Row("one", [{"a": 0.5, "b": 1.0}], "x & y"), Row("two", [{"a": math.inf, "b": math.nan}], "x & y")]
    (panel,) = panels_of([0.5, 1.0], ["a"], mark=1.0)
    svg = ElementTree.fromstring(drawing(rows, [panel], {"a": "A", "b": "B"}, title="t < u", description="d", left=100))
    dots = [float(dot.get("cx", "nan")) for dot in svg.iter(f"{SVG}circle")][2:]  # behind the legend's
    assert dots == [pytest.approx(100 + panel.x(0.5), abs=0.1), pytest.approx(100 + panel.x(1.0), abs=0.1)]
    assert [text.text for text in svg.iter(f"{SVG}text")].count("x & y") == 1


def test_panels_that_stand_above_each_other_have_the_rows_once_more() -> None:
    rows = [Row(name, [{"a": 0.1 * n} for n in range(3)]) for name in ("one", "two")]
    panels = panels_of([0.0, 1.0], ["P", "Q", "R"], mark=0.5)
    svg = ElementTree.fromstring(drawing(rows, panels, {"a": "A"}, title="t", description="d", left=100, across=2))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("one") == texts.count("two") == 2
    dots = [(float(d.get("cx", 0)), float(d.get("cy", 0))) for d in svg.iter("{http://www.w3.org/2000/svg}circle")][1:]
    assert len(dots) == 6 and max(y for _, y in dots) < float(svg.get("height", 0)) - 30
    below = [x for x, y in dots if y > 120]
    assert len(below) == 2 and all(100 < x < 360 for x in below), "the third panel stands under the first"
