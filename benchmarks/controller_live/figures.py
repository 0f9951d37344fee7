"""A picture of a run: for each case attainment over time, what the controller set, and latencies against their targets."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.bench import Contender, Result
from autotune.bench.running import Outcome
from benchmarks.controller_live.cases import Case
from runtime.errors import InputError
from runtime.records import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
_BINS = 14
_KNOBS = ("token_budget", "chunk_size", "max_batch_size")


class Panel(NamedTuple):
    """One case: its results, and whom to draw."""

    case: Case
    results: Sequence[Result]
    shown: Sequence[Contender]


def check(path: Path) -> Path:
    """``path`` if a picture can go there. Raises :class:`InputError`."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot: {path} must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot: {path} cannot be written: there is no directory {path.parent}")
    return path


def render(panels: Sequence[Panel], duration: float, title: str, suffix: str) -> bytes:
    """The picture as a file of the kind ``suffix``; the same results give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autotune", "font.size": 8}):
        figure = Figure(figsize=(12, 2.7 * len(panels) + 0.5), layout="constrained")
        figure.suptitle(title, fontsize=9)
        rows = figure.subplots(len(panels), 3, squeeze=False)
        for row, panel in zip(rows, panels, strict=True):
            _attainment(row[0], panel, duration)
            _knobs(row[1], panel, duration)
            _latencies(row[2], panel, duration)
        kind = suffix.removeprefix(".")
        figure.savefig(buffer, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def _outcomes(panel: Panel, contender: Contender) -> list[Outcome]:
    return [o for r in panel.results if r.turn.contender == contender for o in r.outcomes]


def _attainment(axes: Axes, panel: Panel, duration: float) -> None:
    edges = np.linspace(0, duration, _BINS + 1)
    for contender in panel.shown:
        outcomes = _outcomes(panel, contender)
        offered = np.histogram([o.due for o in outcomes], edges)[0]
        met = np.histogram([o.due for o in outcomes if o.met], edges)[0]
        some = offered > 0
        axes.plot(
            ((edges[:-1] + edges[1:]) / 2)[some], 100 * met[some] / offered[some], "-o", ms=2.5, label=contender.name
        )
    axes.set(title=f"{panel.case.name}: in SLO, by when due", xlabel="s", ylabel="% of requests", ylim=(-3, 103))
    axes.legend(fontsize=7)
    _dress(axes, panel, duration)


def _knobs(axes: Axes, panel: Panel, duration: float) -> None:
    """What the controller set in its last round."""
    axes.set(title="knobs under control, last round", xlabel="s", ylabel="tokens, sequences", yscale="log")
    last = next((r for r in reversed(panel.results) if r.turn.contender == panel.shown[0]), None)
    if last is None:
        return
    changes = [(0.0, last.turn.contender.knobs.as_dict()), *((d.at, d.new) for d in last.decisions if d.at < duration)]
    changes.append((duration, changes[-1][1]))
    for knob in _KNOBS:
        axes.step([at for at, _ in changes], [knobs[knob] for _, knobs in changes], where="post", label=knob)
    axes.legend(fontsize=7)
    _dress(axes, panel, duration)


def _latencies(axes: Axes, panel: Panel, duration: float) -> None:
    """p90 of TTFT (dashed) and TPOT, in units of what is promised."""
    slo = panel.case.slo
    for number, contender in enumerate(panel.shown):
        outcomes = _outcomes(panel, contender)
        for metric, target, style in (("tpot_ms", slo.tpot_ms, "-"), ("ttft_ms", slo.ttft_ms, "--")):
            assert target is not None
            bins: list[list[float]] = [[] for _ in range(_BINS)]
            for outcome in outcomes:
                if (value := getattr(outcome, metric)) is not None:
                    bins[min(_BINS - 1, int(_BINS * outcome.due / duration))].append(value / target)
            points = [
                ((at + 0.5) * duration / _BINS, percentile(values, 90) or 0.0)
                for at, values in enumerate(bins)
                if values
            ]
            label = contender.name if style == "-" else None
            axes.plot([x for x, _ in points], [y for _, y in points], style, color=f"C{number}", lw=1.2, label=label)
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set(title="TPOT p90 (TTFT dashed) of those served", xlabel="s", ylabel="× target", yscale="log")
    _dress(axes, panel, duration)


def _dress(axes: Axes, panel: Panel, duration: float) -> None:
    if panel.case.shifts:
        axes.axvline(duration / 2, color="grey", ls=":", lw=1)
    axes.grid(alpha=0.3)
