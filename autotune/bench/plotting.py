"""A comparison as a picture: attainment over time, what the controller did, and how latencies are distributed."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autotune.bench.comparing import Comparison
from autotune.bench.contenders import Contender
from autotune.writing import writable
from runtime.errors import InputError
from runtime.knobs import KNOBS
from runtime.slo import SLO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".html", ".svg", ".png")
_BINS = 15
_MOST = 6
"""Contenders drawn; more lines cannot be told apart."""


def check(path: Path) -> Path:
    """``path`` if a plot can go there. Raises :class:`InputError`."""
    if path.suffix not in FORMATS:
        raise InputError(f"--out: {path} must end in {', '.join(FORMATS)}")
    writable("--out", path)
    return path


def render(comparison: Comparison, slo: SLO, title: str, suffix: str, *, shown: Sequence[Contender] = ()) -> bytes:
    """The picture as a file of the kind ``suffix``: HTML and SVG hold their text as text and need nothing from elsewhere.

    ``shown``: which contenders to draw (at most six); those that were measured first unless given.
    """
    import matplotlib

    buffer = io.BytesIO()
    kind = "png" if suffix == ".png" else "svg"
    # text stays text, and the same comparison gives the same bytes
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autotune", "font.size": 9}):
        figure = _figure(comparison, slo, title, tuple(shown or comparison.contenders)[:_MOST])
        figure.savefig(buffer, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {})
    if suffix != ".html":
        return buffer.getvalue()
    svg = buffer.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
    style = "<style>body{margin:1em}svg{max-width:100%;height:auto}</style>\n"
    return f"{head}{style}{svg}</html>\n".encode()


def _figure(comparison: Comparison, slo: SLO, title: str, shown: Sequence[Contender]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2)
    colours = {c.name: f"C{i}" for i, c in enumerate(shown)}
    _over_time(axes[0, 0], comparison, shown, colours)
    _knobs(axes[0, 1], comparison)
    _cdf(axes[1, 0], comparison, shown, colours, "ttft_ms", "TTFT", slo.ttft_ms)
    _cdf(axes[1, 1], comparison, shown, colours, "tpot_ms", "TPOT", slo.tpot_ms or slo.itl_ms)
    return figure


def _over_time(axes: Axes, comparison: Comparison, shown: Sequence[Contender], colours: dict[str, str]) -> None:
    edges = np.linspace(0, comparison.duration, _BINS + 1)
    for contender in shown:
        outcomes = [o for result in comparison.of(contender) for o in result.outcomes]
        due, met = [o.due for o in outcomes], [o.due for o in outcomes if o.met]
        offered, kept = np.histogram(due, edges)[0], np.histogram(met, edges)[0]
        some = offered > 0
        middle = (edges[:-1] + edges[1:]) / 2
        axes.plot(
            middle[some],
            100 * kept[some] / offered[some],
            "-o",
            ms=3,
            color=colours[contender.name],
            label=contender.name,
        )
    axes.set(title="in SLO, by when due, all rounds", xlabel="s", ylabel="% of requests", ylim=(-3, 103))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _knobs(axes: Axes, comparison: Comparison) -> None:
    """What the controller set in its last round; empty without one."""
    last = next((r for r in reversed(comparison.results) if r.turn.contender.control), None)
    axes.set(title="knobs under control, last round", xlabel="s", ylabel="tokens, sequences", yscale="log")
    if last is None:
        axes.text(0.5, 0.5, "no controller was compared", ha="center", transform=axes.transAxes)
        return
    changes = [(0.0, last.turn.contender.knobs.as_dict()), *((d.at, d.new) for d in last.decisions)]
    changes.append((comparison.duration, changes[-1][1]))
    for knob in (spec.name for spec in KNOBS if spec.log):
        axes.step([at for at, _ in changes], [knobs[knob] for _, knobs in changes], where="post", label=knob)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _cdf(
    axes: Axes,
    comparison: Comparison,
    shown: Sequence[Contender],
    colours: dict[str, str],
    metric: str,
    name: str,
    target: float | None,
) -> None:
    """Shares of *offered* requests: a curve that ends below 100% leaves out those that never got there."""
    for contender in shown:
        outcomes = [o for result in comparison.of(contender) for o in result.outcomes]
        values = sorted(v for o in outcomes if (v := getattr(o, metric)) is not None)
        # without the metric and yet in SLO: one output token has no TPOT, and violates nothing
        offered = sum(getattr(o, metric) is not None or not o.met for o in outcomes)
        shares = 100 * np.arange(1, len(values) + 1) / max(1, offered)
        axes.plot(values, shares, color=colours[contender.name], label=contender.name, drawstyle="steps-post")
    if target is not None:
        axes.axvline(target, color="black", ls=":", lw=1)
        axes.annotate(f" {target:g} ms", (target, 3), fontsize=8)
    axes.set(title=f"{name} of all offered requests", xlabel="ms", ylabel="% at most", xscale="log", ylim=(-3, 103))
    axes.grid(alpha=0.3)
