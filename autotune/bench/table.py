"""A comparison as a table for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.bench.comparing import METRICS, Difference, Estimate, PairedComparison
from autotune.bench.contenders import Contender
from autotune.report.tables import Detail, empty_table, fullest
from autotune.report.wording import lateness, sentence
from runtime.slo import SLO, RequestClass, in_percent


def show(
    comparison: PairedComparison,
    slo: SLO,
    console: Console,
    *,
    baseline: Contender,
    classes: Sequence[RequestClass] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print every contender's standing, and its difference to ``baseline`` where both met the same arrivals; ``notes`` on the
    load; and that requests were sent late, if it matters."""
    target = None if classes else slo.attainment  # of each class its own
    console.print(fullest(lambda detail: _summaries(comparison, baseline, detail, target), console.width))
    if classes:
        console.print(_by_class(comparison, classes))
    by = "its class's SLO, each counted by the weight of its class" if classes else f"SLO {slo}"
    console.print(
        f"{by}: the share of requests that met every target. {certainty(comparison)}; latencies in ms."
        + "".join(f" {sentence(text)}" for text in notes),
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    late = max(result.score.lateness_p99_ms for result in comparison.results)
    if (said := lateness(late, slo, *(one.slo for one in classes))) is not None:
        console.print(said, style="yellow", highlight=False, soft_wrap=True)


def certainty(comparison: PairedComparison) -> str:
    """What the intervals are, or why there are none."""
    rounds = max(comparison.summary(c).rounds for c in comparison.contenders)
    if not comparison.intervals:
        return "Intervals are left out, as the comparison was stopped"
    once = comparison.repeated and rounds > 1
    if comparison.has_intervals:
        counted = f"{rounds} round{'' if rounds == 1 else 's'}"
        return f"[low–high] is the 95% interval over {counted}" + (
            ", and requests that every round repeats count once" if once else ""
        )
    if once:
        return f"Rounds of {comparison.duration:g} s of the same requests have no intervals: a longer --duration has"
    longer = "a longer --duration has" if comparison.repeated else "more --rounds or a longer --duration has"
    return f"One round of {comparison.duration:g} s has no intervals: {longer}"


def _summaries(comparison: PairedComparison, baseline: Contender, detail: Detail, target: float | None) -> Table:
    """A row a contender. Where there is little room, latencies lose their intervals first, then their medians. ``target``: the
    attainment required, None with classes, whose requests count by weight."""
    intervals, medians, every = detail < Detail.MAIN, detail < Detail.SHORT, detail < Detail.BAREST
    metrics = [metric for metric in METRICS if every or metric != "e2e_ms"]
    paired = baseline in comparison.contenders  # else none of its turns could be measured
    table = empty_table(detail)
    table.add_column("", no_wrap=True)
    titles = [
        f"{metric.removesuffix('_ms').upper()} {q}"
        for metric in metrics
        for q in (("p50", "p99") if medians else ("p99",))
    ]
    for title in (
        "weighted\nattainment" if target is None else "attainment",
        *((f"− {baseline.name}",) if paired else ()), "goodput /s", *(("tok/s",) if every else ()), *titles,
        *(("unfinished",) if every else ()),
    ):  # fmt: skip
        table.add_column(title, justify="right", no_wrap=True)
    for contender in comparison.contenders:
        found = comparison.summary(contender)
        difference = None if contender == baseline else comparison.difference(contender, baseline)
        latencies = [value for m in metrics for value in (found.latencies[m] if medians else found.latencies[m][1:])]
        table.add_row(
            contender.name,
            share(found.weighted_attainment, target),
            *(("" if difference is None else points(difference),) if paired else ()),
            _spread(found.goodput, 2, interval=detail < Detail.BARE),
            *((f"{found.throughput:.0f}",) if every else ()),
            *(_spread(value, 0, interval=intervals) for value in latencies),
            *((f"{found.unfinished} of {found.offered}",) if every else ()),
        )
    return table


def _by_class(comparison: PairedComparison, classes: Sequence[RequestClass]) -> Table:
    """Attainment of each class, a row a contender."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    own = {one.name: one for one in classes}
    by_class = [(contender, comparison.summary(contender).classes) for contender in comparison.contenders]
    names = [*own, *dict.fromkeys(name for _, seen in by_class for name in seen if name not in own)]
    for name in names:
        required = "" if name not in own else f", target {own[name].slo.attainment * 100:g}%"
        table.add_column(Text(f"{name}{required}"), justify="right", no_wrap=True)
    for contender, seen in by_class:
        cells = []
        for name in names:
            met, offered = seen.get(name, (0, 0))
            target = own[name].slo.attainment if name in own else None
            cells.append(f"{in_percent(met / offered, target=target)} of {offered}" if offered else "–")
        table.add_row(contender.name, *cells)
    return table


def share(estimate: Estimate, target: float | None = None) -> str:
    """``93.1% [90–95]``."""
    if math.isnan(estimate.value):
        return "–"
    return f"{in_percent(estimate.value, target=target)}{_interval(100 * estimate.low, 100 * estimate.high, 0)}"


def points(difference: Difference) -> str:
    """``+12.3 [9–15]``: percentage points."""
    found = difference.difference
    if math.isnan(found.value):
        return "–"
    return f"{100 * found.value:+.1f}{_interval(100 * found.low, 100 * found.high, 0)}"


def _spread(estimate: Estimate, digits: int, *, interval: bool) -> str:
    if math.isnan(estimate.value):
        return "–"
    value = f"{estimate.value:.{digits}f}"
    return f"{value}{_interval(estimate.low, estimate.high, digits)}" if interval else value


def _interval(low: float, high: float, digits: int) -> str:
    return "" if math.isnan(low) else rf" \[{low:.{digits}f}–{high:.{digits}f}]"
