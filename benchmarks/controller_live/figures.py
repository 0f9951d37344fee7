"""A page of a run: for each case attainment over time, what the controller set, and latencies against their targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.bench import Contender, Result
from autotune.bench.plotting import attainment, curve, knobs, page
from autotune.bench.running import Outcome
from autotune.report.figure import Plot, View, axis, layout, log_axis, rule
from autotune.report.section import Section
from benchmarks.controller.contenders import LAYERS
from benchmarks.dots import Row, drawing, panels_of
from benchmarks.live.contenders import base_and_layer
from benchmarks.live.loads import Case
from runtime.records import percentile

_BINS = 14


class Panel(NamedTuple):
    """One case: its results, and whom to draw."""

    case: Case
    results: Sequence[Result]
    shown: Sequence[Contender]


def render(panels: Sequence[Panel], duration: float, title: str) -> bytes:
    """The page; the same results give the same bytes."""
    return page(title, [_section(panel, duration) for panel in panels])


def layers_picture(groups: Mapping[str, Mapping[str, float]], title: str) -> str:
    """An SVG: a row for each contender, a panel for each of ``groups``, a dot for each layer at its ratio there, by name."""
    names = dict.fromkeys(name for of_load in groups.values() for name in of_load)
    rows: dict[str, list[dict[str, float]]] = {}
    for name in names:
        base, layer = base_and_layer(name)
        for at, of_load in zip(rows.setdefault(base, [{} for _ in groups]), groups.values(), strict=True):
            at[layer] = of_load.get(name, math.nan)
    return drawing(
        [Row(base, values) for base, values in rows.items()],
        panels_of([value for of_load in groups.values() for value in of_load.values()], groups, mark=1.0),
        {layer: text for layer, text in LAYERS.items()},
        title=title,
        description=f"{title}: {', '.join(groups)}.",
        left=130,
    )


def _section(panel: Panel, duration: float) -> Section:
    key = panel.case.name
    changed = duration / 2 if panel.case.shifts else None
    outcomes = {c.name: [o for r in panel.results if r.turn.contender == c for o in r.outcomes] for c in panel.shown}
    plots = [attainment(f"{key}-attainment", outcomes, duration, changed=changed)]
    last = next((r for r in reversed(panel.results) if r.turn.contender == panel.shown[0]), None)
    if last is not None:
        plots.append(knobs(f"{key}-knobs", last, duration, changed=changed))
    plots.append(_latencies(f"{key}-latencies", panel, outcomes, duration, changed))
    return Section(key, key, f"{key}, SLO {panel.case.slo}", plots=tuple(plots))


def _latencies(
    key: str, panel: Panel, outcomes: dict[str, list[Outcome]], duration: float, changed: float | None
) -> Plot:
    """p90 of TTFT (dashed) and TPOT, in units of their targets."""
    slo, data, every = panel.case.slo, [], [1.0]
    for number, (name, found) in enumerate(outcomes.items()):
        for metric, target, dash in (("tpot_ms", slo.tpot_ms, "solid"), ("ttft_ms", slo.ttft_ms, "dash")):
            assert target is not None
            bins: list[list[float]] = [[] for _ in range(_BINS)]
            for outcome in found:
                if (value := getattr(outcome, metric)) is not None:
                    bins[min(_BINS - 1, int(_BINS * outcome.due / duration))].append(value / target)
            x = [(at + 0.5) * duration / _BINS for at, values in enumerate(bins) if values]
            y = [percentile(values, 90) or 0.0 for values in bins if values]
            what = f"{name} {metric.removesuffix('_ms').upper()}"
            data.append(curve(x, y, what, number, dash=dash))
            every += y
    shapes = [rule(y=1.0), *([] if changed is None else [rule(x=changed)])]
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    drawn = layout(
        axis("s", range=[0, duration]), log_axis("× target", every), shapes=shapes, showlegend=True, legend=legend
    )
    title = "p90 of TPOT and TTFT of those served"
    return Plot(key, title, f"{title}, in units of their targets, over time.", [View("", data, drawn)])
