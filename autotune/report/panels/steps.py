"""Measured against modelled step time, by region of the plan."""

from __future__ import annotations

import statistics

from autotune.cost.model import region_errors
from autotune.profile.parts import RegionError, StepPoint
from autotune.report.evidence import Evidence
from autotune.report.figure import Plot, View, axis, dots, layout, log_axis, note, plain
from autotune.report.section import Section, Table, absent
from autotune.report.wording import error, number, off

KEY, TOPIC = "steps", "Measured against modelled step time"
_SERIES = (
    ("@c1", "circle"),
    ("@c2", "square"),
    ("@c3", "diamond"),
    ("@c4", "triangle-up"),
    ("@c5", "cross"),
    ("@c6", "x"),
)
_BAND = 0.05


def section(evidence: Evidence) -> Section:
    facts, steps = evidence.profile.cost_model, [s for s in evidence.steps if s.predicted is not None]
    if facts is None and not steps:
        return absent(
            KEY, TOPIC, "This profile holds no cost model: it was made without one, or stopped before it was fitted."
        )
    found = facts.regions if facts is not None and facts.regions else region_errors(steps, [_off(s) for s in steps])
    middle = facts.error if facts is not None else statistics.median(_off(s) for s in steps)
    count = facts.points if facts is not None else len(steps)
    title = off("Modelled step times", middle, max((_off(s) for s in steps), default=None))
    family = (
        f"Family {facts.family}, fitted to {count} kinds of steps" if facts is not None else f"{count} kinds of steps"
    )
    took = f" in {facts.seconds:.0f} s" if facts is not None and facts.seconds else ""
    lead = (
        f"{family}{took}. Each point is the median of a few real steps, against what a model fitted without it says; errors are "
        "medians."
    )
    notes = () if steps else ("The measured steps themselves are in the file of raw runs, which is not here.",)
    plots = (_plot(steps, title),) if steps else ()
    return Section(KEY, TOPIC, title, lead, plots, (_table(found),), notes)


def _off(step: StepPoint) -> float:
    return abs((step.predicted or 0.0) / step.seconds - 1)


def _plot(steps: list[StepPoint], title: str) -> Plot:
    data = []
    names = list(dict.fromkeys(s.region for s in steps))
    for place, region in enumerate(names):
        colour, symbol = _SERIES[place % len(_SERIES)]
        mine = [s for s in steps if s.region == region]
        xs, ys = [1000 * s.seconds for s in mine], [100 * ((s.predicted or 0.0) / s.seconds - 1) for s in mine]
        trace = dots(
            xs, ys, [_hover(s) for s in mine], colour=colour, symbol=symbol, size=9, line={"color": "@card", "width": 1}
        )
        data.append({**trace, "name": plain(region), "showlegend": True})
    far = max(100 * _BAND * 1.6, *(1.15 * abs(v) for trace in data for v in trace["y"]))
    x = log_axis("measured step time (ms)", [v for trace in data for v in trace["x"]])
    y = axis("modelled − measured (%)", range=[-far, far], ticksuffix="%", zeroline=True, zerolinecolor="@line")
    band = {
        "type": "rect", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": -100 * _BAND, "y1": 100 * _BAND,
        "fillcolor": "@region", "line": {"width": 0}, "layer": "below",
    }  # fmt: skip
    within = note(f"within {_BAND:.0%}", x=1, y=-100 * _BAND, xref="paper", yref="y", xanchor="right", yanchor="bottom",
                  font={"color": "@good", "size": 12})  # fmt: skip
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}, "itemclick": False,
              "itemdoubleclick": False}  # fmt: skip
    made = layout(x, y, shapes=[band], annotations=[within], showlegend=True, legend=legend)
    return Plot("steps", "", f"{TOPIC}. {title}.", [View("", data, made)], 340)


def _hover(step: StepPoint) -> str:
    parts = []
    if step.decodes:
        parts.append(f"{step.decodes:,} sequences decode over {step.decode_context:,} tokens of context")
    if step.prefill_tokens:
        before = step.prefill_context - step.prefill_tokens
        parts.append(f"{step.prefill_tokens:,} prompt tokens" + (f" behind {before:,}" if before > 0 else ""))
    predicted = step.predicted or 0.0
    return "<br>".join(
        (
            f"<b>{plain(step.region)} step</b>",
            *parts,
            f"measured {number(1000 * step.seconds)} ms (median of {step.repeats}, spread {error(step.spread)})",
            f"modelled {number(1000 * predicted)} ms, {predicted / step.seconds - 1:+.1%}",
        )
    )


def _table(found: tuple[RegionError, ...]) -> Table:
    rows = [(r.region, f"{r.points}", error(r.median), error(r.p90)) for r in found]
    return Table(("region", "kinds of steps", "median error", "9 in 10 within"), rows, frozenset({1, 2, 3}))
