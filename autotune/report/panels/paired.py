"""Simulated against measured, for every setting where both are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Set
from textwrap import wrap
from typing import NamedTuple

from autotune.profile import Point
from autotune.profiling.objective import Objective
from autotune.report.evidence import Evidence
from autotune.report.figure import Plot, View, axis, dots, error_bars, layout, line, log_axis, plain
from autotune.report.section import Section, absent
from autotune.report.wording import cut, error, listed, names, number, off, short_setting

KEY, TOPIC = "paired", "Simulated against measured"
_NAME = 60  # letters of one, at most
_FRAME, _ROW, _LINE, _NARROW = 90, 10, 16, 14  # pixels, and the letters in a line of a name where there is least room


class _Metric(NamedTuple):
    key: str
    name: str
    unit: str
    log: bool
    of: Callable[[Point], float | None]


_OTHERS = (
    _Metric("throughput", "Throughput", "output tokens/s", False, lambda p: p.throughput.mean),
    _Metric("ttft", "TTFT p99", "ms", True, lambda p: p.ttft_p99_ms),
    _Metric("tpot", "TPOT p99", "ms", True, lambda p: p.tpot_p99_ms),
)


def section(evidence: Evidence) -> Section:
    pairs = evidence.pairs()
    if not pairs:
        return absent(KEY, TOPIC, _why(evidence))
    known, rate = names(evidence), evidence.recommended.point.rate

    def called(p: Point) -> str:
        name = known.get(p.knobs, p.label)
        return name if math.isclose(p.rate, rate) else f"{name} at {number(p.rate)} req/s"

    objective = Objective.of(evidence.profile)
    measure = objective.measure
    first = _Metric(
        measure.name.replace(" ", "-").lower(), measure.title, measure.unit, measure.lowest, objective.figure
    )
    pairs = sorted(pairs, key=lambda pair: objective.value(pair[0]))
    compared = [pair for pair in pairs if math.isclose(pair[0].rate, rate)] or pairs
    left = [pair for pair in pairs if pair not in compared]
    judged = frozenset(p.key for p, _ in compared)
    plots = tuple(
        made
        for metric in (first, *_OTHERS)
        if (made := _plot(metric, [(called(a), a, b) for a, b in pairs], judged)) is not None
    )
    offs = _errors((first.of(a), first.of(b)) for a, b in compared)
    title = (
        off(f"Simulated {measure.name} figures", statistics.median(offs), max(offs)) + _elsewhere(first, left)
        if offs
        else f"No request {measure.met} either way"
    )
    interval = "" if objective.interval(pairs[0][0]) is None else f"the 95% interval of {measure.name}, and "
    alike = (
        " and with the same arrivals"
        if all(set(a.seeds) == set(b.seeds) for a, b in pairs)
        else ", but with other arrivals"
    )
    lead = (
        f"Median over the {len(compared)} setting{'s' if len(compared) != 1 else ''} that were both simulated and measured, at "
        f"the {'rate compared' if left else 'same rate'}{alike}. Bars are {interval}the range of the runs"
        f"{' elsewhere' if interval else ''}."
    )
    if left:
        lead += (
            f" The comparison left {_rates(left)} req/s once it knew the speed of the machine better; what was measured there "
            "may have been served at another speed than that of the simulation, which is the one found in the end."
        )
    return Section(KEY, TOPIC, title, lead, plots)


def _errors(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    """How far (measured, simulated) lie apart, as shares of what was measured, where both are known."""
    return [abs(simulated / measured - 1) for measured, simulated in pairs if measured and simulated is not None]


def _elsewhere(metric: _Metric, left: list[tuple[Point, Point]]) -> str:
    """How far off the simulation is at rates the comparison has left, for a title."""
    offs = _errors((metric.of(a), metric.of(b)) for a, b in left)
    if not offs:
        return ""
    most = "by up to " if len(offs) > 1 else "by "
    return f", at the rate compared; {most}{error(max(offs))} at {_rates(left)} req/s, before the speed was fitted"


def _rates(left: list[tuple[Point, Point]]) -> str:
    return listed(map(number, sorted({p.rate for p, _ in left})))


def _why(evidence: Evidence) -> str:
    if not evidence.profile.simulated:
        return "Nothing was simulated for this profile, so there is nothing to hold against what was measured."
    if not any(p.stage == "validation" for p in evidence.profile.points):
        return "The run was stopped before any setting was validated, so simulated figures have nothing measured beside them."
    return "None of the validated settings was simulated at the rate it was measured at."


def _plot(metric: _Metric, pairs: list[tuple[str, Point, Point]], judged: Set[tuple[object, ...]]) -> Plot | None:
    """Its title is about the points ``judged``, by their keys."""
    known = [
        (name, p, a, b) for name, p, q in pairs if (a := metric.of(p)) is not None and (b := metric.of(q)) is not None
    ]
    if not known:
        return None
    rows = list(range(len(known)))
    measured, simulated = [m for _, _, m, _ in known], [s for _, _, _, s in known]
    links_x: list[float | None] = []
    links_y: list[float | None] = []
    for row, (_, _, a, b) in enumerate(known):
        links_x += [a, b, None]
        links_y += [row, row, None]
    hover = [_hover(metric, *each) for each in known]
    solid = dots(measured, [float(r) for r in rows], hover, colour="@measured", size=10)
    spread = {"goodput": lambda p: p.goodput, "throughput": lambda p: p.throughput}.get(metric.key)
    if spread is not None:
        spreads = [spread(p) for _, p, _, _ in known]
        solid["error_x"] = error_bars(measured, [s.low for s in spreads], [s.high for s in spreads], "@measured")
    data = [
        line(links_x, links_y, colour="@faint", width=2, showlegend=False),
        {**solid, "name": "measured", "showlegend": True},
        {
            **dots(simulated, [float(r) for r in rows], hover, colour="@simulated", symbol="diamond-open", size=10),
            "name": "simulated",
            "showlegend": True,
        },
    ]
    data[2]["marker"]["line"] = {"width": 2}
    values = [*measured, *simulated]
    title = f"{metric.name} ({metric.unit})"
    x = log_axis(title, values, pad=1.25) if metric.log else axis(title, rangemode="tozero", nticks=5)
    y = axis(
        "", tickmode="array", tickvals=rows, ticktext=[plain(cut(name, _NAME)) for name, *_ in known], showgrid=False
    )
    y["range"] = [-0.7, len(known) - 0.3]
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 12}, "itemclick": False,
              "itemdoubleclick": False}  # fmt: skip
    made = layout(x, y, showlegend=True, legend=legend)
    offs = _errors((a, b) for _, p, a, b in known if p.key in judged)
    said = f"{metric.name}: typically {error(statistics.median(offs))} off" if offs else metric.name
    return Plot(
        f"{KEY}-{metric.key}", said, f"{TOPIC}. {said}.", [View("", data, made)], _FRAME + _tall(known) * len(known)
    )


def _tall(known: list[tuple[str, Point, float, float]]) -> int:
    """Pixels of a row that has room for the longest name, which the page breaks into lines."""
    return _ROW + _LINE * max(len(wrap(cut(name, _NAME), _NARROW)) for name, *_ in known)


def _hover(metric: _Metric, name: str, point: Point, measured: float, simulated: float) -> str:
    change = f"{simulated / measured - 1:+.1%}" if measured > 0 else "–"
    return "<br>".join(
        (
            f"<b>{plain(name)}</b>",
            short_setting(point.knobs),
            f"measured {number(measured)} {metric.unit}",
            f"simulated {number(simulated)} {metric.unit} ({change})",
        )
    )
