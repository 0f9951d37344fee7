"""A comparison as a table for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autotune.bench.comparing import Comparison, Difference, Estimate
from autotune.bench.contenders import Contender
from runtime.slo import SLO, RequestClass


def show(
    comparison: Comparison, slo: SLO, console: Console, *, baseline: Contender, classes: Sequence[RequestClass] = ()
) -> None:
    """Print every contender's standing, and its difference to ``baseline`` where both met the same arrivals."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for title in ("attainment", f"− {baseline.name}", "goodput /s", "tok/s", *_TITLES, "unfinished"):
        table.add_column(title, justify="right", no_wrap=True)
    for contender in comparison.contenders:
        found = comparison.standing(contender)
        difference = None if contender == baseline else comparison.difference(contender, baseline)
        table.add_row(
            contender.name,
            share(found.attainment),
            "" if difference is None else points(difference),
            _spread(found.goodput, 2),
            f"{found.throughput:.0f}",
            *(_spread(value, 0) for pair in found.latencies.values() for value in pair),
            f"{found.unfinished} of {found.offered}",
        )
    console.print(table)
    if classes:
        console.print(_by_class(comparison, classes))
    by = "its class's SLO, each counted by the weight of its class" if classes else f"SLO {slo}"
    console.print(
        f"{by}: the share of requests that met every target. [low–high] is the 95% interval over "
        f"{max(comparison.standing(c).rounds for c in comparison.contenders)} rounds; latencies in ms.",
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _by_class(comparison: Comparison, classes: Sequence[RequestClass]) -> Table:
    """Attainment of each class, a row a contender."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    own = {one.name: one for one in classes}
    standings = [(contender, comparison.standing(contender).classes) for contender in comparison.contenders]
    names = [*own, *dict.fromkeys(name for _, seen in standings for name in seen if name not in own)]
    for name in names:
        target = "" if name not in own else f", target {own[name].slo.attainment * 100:g}%"
        table.add_column(f"{name}{target}", justify="right", no_wrap=True)
    for contender, seen in standings:
        cells = []
        for name in names:
            met, offered = seen.get(name, (0, 0))
            cells.append(f"{100 * met / offered:.1f}% of {offered}" if offered else "–")
        table.add_row(contender.name, *cells)
    return table


_TITLES = tuple(f"{metric} {q}" for metric in ("TTFT", "TPOT", "E2E") for q in ("p50", "p99"))


def share(estimate: Estimate) -> str:
    """``93.1% [90–95]``."""
    if math.isnan(estimate.value):
        return "–"
    return f"{100 * estimate.value:.1f}% {_interval(100 * estimate.low, 100 * estimate.high, 0)}"


def points(difference: Difference) -> str:
    """``+12.3 [9–15]``: percentage points."""
    found = difference.difference
    if math.isnan(found.value):
        return "–"
    return f"{100 * found.value:+.1f} {_interval(100 * found.low, 100 * found.high, 0)}"


def _spread(estimate: Estimate, digits: int) -> str:
    if math.isnan(estimate.value):
        return "–"
    return f"{estimate.value:.{digits}f} {_interval(estimate.low, estimate.high, digits)}"


def _interval(low: float, high: float, digits: int) -> str:
    return "" if math.isnan(low) else rf"\[{low:.{digits}f}–{high:.{digits}f}]"
