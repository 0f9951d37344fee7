"""A comparison as a page: attainment over time, what the controller did, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from autotune.bench.comparing import PairedComparison
from autotune.bench.contenders import Contender
from autotune.bench.running import Outcome, Result
from autotune.report.figure import Axis, Plot, Trace, View, axis, layout, line, log_axis, note, plain, rule
from autotune.report.page import rendered
from autotune.report.section import Section
from autotune.writing import writable
from runtime.errors import InputError
from runtime.knobs import KNOBS
from runtime.slo import SLO, RequestClass

MOST = 6
"""Contenders drawn; more lines cannot be told apart."""
_BINS = 15
_KNOBS = tuple(spec.name for spec in KNOBS if spec.log)


def check(path: Path, option: str = "--out", suffixes: Sequence[str] = (".html",)) -> Path:
    """``path`` if a page can go there. Raises :class:`InputError`."""
    if path.suffix not in suffixes:
        raise InputError(f"{option}: {path} must end in {' or '.join(suffixes)}")
    writable(option, path)
    return path


def render(
    comparison: PairedComparison,
    slo: SLO,
    title: str,
    *,
    classes: Sequence[RequestClass] = (),
    shown: Sequence[Contender] = (),
    notes: Sequence[str] = (),
) -> bytes:
    """The page, which needs nothing from elsewhere; the same comparison gives the same bytes.

    ``classes``: those with an SLO of their own, of which no target is drawn; ``shown``: which contenders to draw (at most
    :data:`MOST`), those that were measured first unless given; ``notes``: sentences below.
    """
    drawn = tuple(shown or comparison.contenders)[:MOST]
    outcomes = {c.name: [o for result in comparison.of(c) for o in result.outcomes] for c in drawn}
    last = next((r for r in reversed(comparison.results) if r.turn.contender.control), None)
    plots = [attainment("attainment", outcomes, comparison.duration)]
    if last is not None:
        plots.append(knobs("knobs", last, comparison.duration))
    plots.append(_distribution("ttft", outcomes, "ttft_ms", "TTFT", None if classes else slo.ttft_ms))
    plots.append(_distribution("tpot", outcomes, "tpot_ms", "TPOT", None if classes else slo.tpot_ms))
    said = [*notes]
    if classes:
        own = "; ".join(str(one) for one in classes)
        said.append(f"Each request is judged by the SLO of its class, so no target is drawn: {own}; any other: {slo}.")
    if last is None:
        said.append("No controller was compared.")
    names = ", ".join(outcomes)
    return page(title, [Section("comparison", "Comparison", names, plots=tuple(plots), notes=tuple(said))])


def page(title: str, sections: Sequence[Section]) -> bytes:
    """One file with everything in it."""
    return rendered("comparison.html.j2", sections, title=title).encode()


def attainment(
    key: str, outcomes: Mapping[str, Sequence[Outcome]], duration: float, *, changed: float | None = None
) -> Plot:
    """Of each contender, all rounds together. ``changed``: when the load did."""
    edges = np.linspace(0, duration, _BINS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    data: list[Trace] = []
    for number, (name, found) in enumerate(outcomes.items()):
        offered = np.histogram([o.due for o in found], edges)[0]
        met = np.histogram([o.due for o in found if o.met], edges)[0]
        some = offered > 0
        data.append(curve(middle[some], 100 * met[some] / offered[some], name, number))
    said = [f"{name} {sum(o.met for o in found)} of {len(found)}" for name, found in outcomes.items()]
    y = axis("% of requests", range=[-3, 103], ticksuffix="%")
    return _plot(
        key, "Requests within the SLO, by when due", f"Requests within the SLO: {', '.join(said)}.",
        data, axis("s", range=[0, duration]), y, [] if changed is None else [rule(x=changed)],
    )  # fmt: skip


def knobs(key: str, result: Result, duration: float, *, changed: float | None = None) -> Plot:
    """What the controller set in the turn of ``result``."""
    changes = [(0.0, result.turn.contender.knobs.as_dict())]
    changes += [(d.at, d.new) for d in result.decisions if d.at < duration]
    changes.append((duration, changes[-1][1]))
    at = [time for time, _ in changes]
    data = [
        curve(at, [found[knob] for _, found in changes], knob, number, shape="hv") for number, knob in enumerate(_KNOBS)
    ]
    values = [found[knob] for _, found in changes for knob in _KNOBS]
    return _plot(
        key, "Knobs under control, last round", f"Knobs under control, set {len(changes) - 2} times.",
        data, axis("s", range=[0, duration]), log_axis("tokens, sequences", values),
        [] if changed is None else [rule(x=changed)],
    )  # fmt: skip


def curve(x: Iterable[float], y: Iterable[float], name: str, number: int, **style: str) -> Trace:
    """A line with its name in the legend, in the colour of that number."""
    colour = f"@c{number % MOST + 1}"
    return line(list(map(float, x)), list(map(float, y)), colour=colour, name=plain(name), showlegend=True, line=style)


def _distribution(
    key: str, outcomes: Mapping[str, Sequence[Outcome]], metric: str, name: str, target: float | None
) -> Plot:
    """Shares of *offered* requests: a curve that ends below 100% leaves out those that never got there."""
    data, every = [], [] if target is None else [target]
    for number, (contender, found) in enumerate(outcomes.items()):
        values = sorted(v for o in found if (v := getattr(o, metric)) is not None)
        # without the metric and yet met: one output token has no TPOT, and violates nothing
        offered = sum(getattr(o, metric) is not None or not o.met for o in found)
        shares = 100 * np.arange(1, len(values) + 1) / max(1, offered)
        data.append(curve(values, shares, contender, number, shape="hv"))
        every += values
    plot = _plot(
        key, f"{name} of all offered requests", f"Share of the offered requests by {name}.",
        data, log_axis("ms", every), axis("% at most", range=[-3, 103], ticksuffix="%"),
        [] if target is None else [rule(x=target)],
    )  # fmt: skip
    if target is not None:
        words = note(f"{target:g} ms", x=float(np.log10(target)), y=0, xanchor="left", yanchor="bottom")
        plot.views[0].layout["annotations"] = [words]
    return plot


def _plot(
    key: str, title: str, summary: str, data: list[Trace], x: Axis, y: Axis, shapes: list[dict[str, object]]
) -> Plot:
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return Plot(key, title, summary, [View("", data, layout(x, y, shapes=shapes, showlegend=True, legend=legend))])


__all__ = ["MOST", "attainment", "check", "curve", "knobs", "page", "render"]
