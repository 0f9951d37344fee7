"""A plot as plain data: what plotly draws, and the labels the page itself puts where there is room.

Colours are names (``@accent``) that the page looks up in its style sheet, so light, dark and paper each have their own.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
Axis = dict[str, Any]


@dataclass(frozen=True)
class Label:
    """Words beside the point (x, y), in the page's colour ``colour``; the page finds the place."""

    x: float
    y: float
    text: str
    colour: str = "@text"
    bold: bool = False


@dataclass(frozen=True)
class View:
    """One way to look at a plot. ``name`` is on its button where a plot has several."""

    name: str
    data: list[Trace]
    layout: dict[str, Any]
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True)
class Plot:
    """``title``: what can be seen, above the plot; ``summary``: the same for those who cannot see it; ``height`` in pixels."""

    key: str
    title: str
    summary: str
    views: list[View]
    height: int = 320


def plain(text: str) -> str:
    """Plotly reads a little HTML in labels; what comes from a profile is not to be read as such."""
    return html.escape(text, quote=False)


def axis(title: str, **more: Any) -> Axis:
    """A plain axis: no frame, no zero line, a faint grid."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": "@muted"}, "standoff": 8},
        "gridcolor": "@grid",
        "linecolor": "@line",
        "tickfont": {"size": 12, "color": "@muted"},
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def log_axis(title: str, values: Sequence[float], *, pad: float = 1.12, **more: Any) -> Axis:
    """A logarithmic axis around ``values`` with round ticks, written out."""
    known = [v for v in values if v > 0 and math.isfinite(v)] or [1.0, 10.0]
    low, high = min(known) / pad, max(known) * pad
    ticks = round_ticks(low, high)
    return axis(
        title,
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"{t:,.10g}" for t in ticks],
        tickangle=0,
        **more,
    )


def round_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1–2–5 within the range, thinned to 1–3 or to powers of ten (or some of these) when there are more than ``most``."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for steps in ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        found = [float(f"{m}e{e}") for e in range(first, last + 1) for m in steps if low <= float(f"{m}e{e}") <= high]
        if len(found) <= most:
            break
    while len(found) > most:
        found = found[::2]
    if len(found) < 2:  # less than a factor of two wide
        digits = 1 - math.floor(math.log10(low))
        found = sorted({round(low * (high / low) ** share, digits) for share in (0.1, 0.5, 0.9)})
    return found


def layout(x: Axis, y: Axis, **more: Any) -> dict[str, Any]:
    """What all plots have in common."""
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 8, "r": 24, "t": 8, "b": 8},
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "@font", "size": 13, "color": "@text"},
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left",
            "bgcolor": "@card",
            "bordercolor": "@line",
            "font": {"color": "@text", "size": 12},
        },
        "dragmode": False,
        **more,
    }


def dots(
    x: Sequence[float], y: Sequence[float], hover: Sequence[str], *, colour: str | Sequence[str], **marker: Any
) -> Trace:
    """Points with a hover text each (already :func:`plain` where it names things)."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "text": list(hover),
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, **marker},
    }


def line(x: Sequence[float | None], y: Sequence[float | None], *, colour: str, width: float = 2, **more: Any) -> Trace:
    """A line that says nothing of its own when hovered, unless ``more`` says so."""
    style: dict[str, Any] = {"color": colour, "width": width}
    style.update(more.pop("line", {}))
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "hoverinfo": "skip", "line": style, **more}


def rule(*, x: float | None = None, y: float | None = None, colour: str = "@target") -> dict[str, Any]:
    """A dotted line across the whole plot at ``x`` or ``y``."""
    where = (
        {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
        if x is not None
        else {"y0": y, "y1": y, "x0": 0, "x1": 1, "xref": "paper"}
    )
    return {"type": "line", "line": {"color": colour, "width": 1.5, "dash": "dot"}, "layer": "below", **where}


def note(text: str, *, x: float, y: float, xref: str = "x", yref: str = "paper", **more: Any) -> dict[str, Any]:
    """Words at a fixed place."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": xref,
        "yref": yref,
        "showarrow": False,
        "font": {"size": 12, "color": "@muted"},
        **more,
    }


def error_bars(values: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: str) -> dict[str, Any]:
    """Intervals that may lean to one side. Thin and without caps: many of them lie over each other."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, high - value) for value, high in zip(values, highs, strict=True)],
        "arrayminus": [max(0.0, value - low) for value, low in zip(values, lows, strict=True)],
        "color": colour,
        "thickness": 1.25,
        "width": 0,
    }
