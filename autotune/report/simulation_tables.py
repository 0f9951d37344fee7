"""What was simulated, as tables for people and as plain data for scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cost.price import money, per_million
from autotune.profile.parts import Point
from autotune.report.tables import Detail, fullest, latency, setting_cells, setting_table
from autotune.simulate.capacity import Best, SettingCapacity
from runtime.knobs import Knobs
from runtime.slo import SLO, RequestClass, attained, in_percent, share_met

_LABEL = 14  # columns of a label that is broken into lines


def simulated_table(
    points: Sequence[Point], slo: SLO, price: float | None, width: int = 120, classes: Sequence[RequestClass] = (),
    *, repeated: bool = False,
) -> Table:  # fmt: skip
    """One row a setting: what it did at the requested rate. Those that met the SLO's share are bright. ``repeated``: some of
    the requests are the same under every seed, which then give no interval.

    For ``width`` columns: a narrow one loses medians and preemptions, then intervals, then latencies with no target.
    """
    return fullest(lambda detail: _simulated(points, slo, price, detail, classes, repeated), width)


def _simulated(
    points: Sequence[Point],
    slo: SLO,
    price: float | None,
    detail: Detail,
    classes: Sequence[RequestClass],
    repeated: bool,
) -> Table:
    full, barest = detail <= Detail.ALL_CLOSE, detail == Detail.BAREST
    shown: dict[str, Callable[[Point], str]] = {
        "met" if detail >= Detail.SHORT else "attainment": lambda p: (
            f"{in_percent(share_met(p), target=None if p.classes else slo.attainment)}{_between(p, detail, repeated)}"
        ),
        "goodput\n/s" if barest else "goodput/s": lambda p: f"{p.goodput.mean:.2f}",
    }
    if not barest or price is None:
        shown["tok/s"] = lambda p: f"{p.throughput.mean:.0f}"
    if full:
        shown["TTFT p50"] = lambda p: latency(p.ttft_p50_ms)
    if not barest or slo.ttft_ms is not None:
        shown["TTFT p99"] = lambda p: latency(p.ttft_p99_ms)
    if full:
        shown["TPOT p50"] = lambda p: latency(p.tpot_p50_ms)
    if not barest or slo.tpot_ms is not None or slo.itl_ms is not None:
        shown["TPOT p99"] = lambda p: latency(p.tpot_p99_ms)
    if not barest or slo.e2e_ms is not None:
        shown["E2E p99"] = lambda p: latency(p.e2e_p99_ms)
    if full:
        shown["preempted"] = lambda p: str(p.preemptions)
    if price is not None:
        shown["/M tokens" if barest else "/M tokens\nat this rate"] = lambda p: money(
            per_million(price, p.throughput.mean)
        )
    drawn = setting_table(shown, detail)
    for point in points:
        style = "" if attained(point, slo, classes) else "dim"
        _add(drawn, point.label, point.knobs, [cell(point) for cell in shown.values()], style, detail)
    return drawn


def capacity_table(
    found: Sequence[SettingCapacity], best: SettingCapacity, price: float | None, width: int = 120
) -> Table:
    """One row a setting: the highest rate at which it meets the SLO, and what it does there.

    For ``width`` columns: a narrow one loses how many requests run, then intervals.
    """
    return fullest(lambda detail: _capacities(found, best, price, detail), width)


def _capacities(found: Sequence[SettingCapacity], best: SettingCapacity, price: float | None, detail: Detail) -> Table:
    full, bare = detail <= Detail.ALL_CLOSE, detail >= Detail.BARE
    tokens = detail < Detail.BAREST or price is None  # the price says the same
    titles = [
        "capacity,\nreq/s" if bare else "capacity, req/s",
        *(("tok/s",) if tokens else ()),
        "TTFT p99",
        "TPOT p99",
    ]
    titles += [*(("running",) if full else ()), *(("/M tokens\nat capacity",) if price is not None else ())]
    drawn = setting_table(titles, detail)
    rows = list(found) + ([best] if best not in found else [])
    for one in rows:
        low, high = one.interval
        scores = one.scores
        ttft, tpot = (_middle(getattr(s, name).p99 for s in scores) for name in ("ttft_ms", "tpot_ms"))
        running = _middle(s.steps.mean_running for s in scores)
        interval = "" if bare else f" ({low:.3g}–{high:.3g})"
        figures = [
            "unbounded" if one.unbounded else f"{one.rate:.3g}{interval}" if one.rate else "none",
            *(("–" if one.unbounded else f"{one.throughput:.0f}",) if tokens else ()),
            latency(ttft),
            latency(tpot),
            *(("–" if running is None else f"{running:.1f}",) if full else ()),
        ]
        if price is not None:
            figures.append("–" if one.unbounded else money(per_million(price, one.throughput)))
        _add(drawn, one.label, one.knobs, figures, "bold green" if one is best and len(rows) > 1 else "", detail)
    return drawn


def cheapest_sentence(found: Best, slo: SLO, price: float) -> str:
    """Which of the settings tried meets the SLO for the least money, and for how much; or that none does."""
    best, far = found.setting, "" if found.whole else " before the stop"
    if best.unbounded:
        return f"no rate tried with {best.label} ({best.knobs}) missed {slo}: tokens at capacity have no price"
    cost = per_million(price, best.throughput)
    if cost is None or not best.rate:
        return f"none of the {found.tried} settings tried{far} meets {slo}, at whatever price"
    return (
        f"cheapest of {found.tried} settings tried{far} that meets {slo}: {best.label} ({best.knobs}). At this setting's "
        f"capacity of {best.rate:.3g} req/s, a million output tokens cost {money(cost)} (at {money(price)} an hour)."
    )


def cheapest_data(found: Best | None, price: float | None) -> dict[str, Any] | None:
    """The same for scripts; None where nothing was looked for, or nothing found before a stop."""
    if found is None:
        return None
    return capacity_data(found.setting, price) | {"tried": found.tried, "whole": found.whole}


def offered_sentence(rate: float, points: Sequence[Point], *, repeated: float) -> str:
    """How many requests ``points`` counted, how fast they came, and that weights count where they do; ``repeated``: the share
    that is the same under every seed."""
    came, count, seeds = fmean(p.offered_rate for p in points), points[0].offered, len(points[0].seeds)
    under = f" under {seeds} seed{'s' if seeds > 1 else ''}"
    if repeated:
        those = "the same" if repeated == 1 else "those of the trace the same"
        under = f", {those} under every seed" + (" and so counted once" if repeated < 1 else "")
    several = seeds > 1 and not repeated
    one_sided = any(p.met in (0, p.offered) for p in points)
    single = "; over requests where all or none met the SLO" if one_sided else ""
    over = f" ( ) is a 95% interval over {seeds} seeds{single}." if several else ""
    over += " In goodput, each request counts by the weight of its class." if any(p.classes for p in points) else ""
    return (
        f"Requests arrive at {rate:.3g} req/s in the long run, at {came:.3g} req/s in these simulations: {count} "
        f"requests{under}.{over}"
    )


def interval_words(seeds: int, *, repeated: float = 0.0) -> str:
    """What the interval of a capacity over ``seeds`` seeds is; ``repeated``: the share of requests that all of them have."""
    same = f"The requests{'' if repeated == 1 else ' of the trace'} are the same under every seed."
    if seeds == 1:
        more = same if repeated == 1 else "For an interval over seeds, set a higher --seeds."
        return f"( ) is the two rates between which the search ended. {more}"
    return f"Mean and 95% interval over {seeds} seeds." + (f" {same}" if repeated else "")


def unbounded_sentence(found: Sequence[SettingCapacity], slo: SLO, requests: int) -> str | None:
    """What it means that some setting's capacity has no bound; None where all have one."""
    endless = [one for one in found if one.unbounded]
    if not endless:
        return None
    return (
        f"unbounded: no rate tried missed {slo} ({', '.join(one.label for one in endless)}; up to "
        f"{max(one.rate for one in endless):.3g} req/s). So few requests ({requests}) meet the SLO however close together they "
        "arrive. More --requests may miss it."
    )


def capacity_data(one: SettingCapacity, price: float | None) -> dict[str, Any]:
    low, high = one.interval
    return {
        "label": one.label,
        "knobs": one.knobs.as_dict(),
        "capacity": None if one.unbounded else one.rate or None,
        "unbounded": one.unbounded,
        "capacity_low": low,
        "capacity_high": None if one.unbounded else high,
        "interval": "bisection" if len(one.seeds) == 1 else "95%",
        "seeds": [
            {"seed": s.seed, "capacity": s.offered, "mean_rate": s.rate, "simulations": s.tried} for s in one.seeds
        ],
        "throughput": None if one.unbounded else one.throughput,
        "price_per_million": None if price is None or one.unbounded else per_million(price, one.throughput),
    }  # fmt: skip


def point_data(point: Point, price: float | None) -> dict[str, Any]:
    cost = None if price is None else per_million(price, point.throughput.mean)
    return point.model_dump(mode="json") | {"price_per_million": cost}


def _add(drawn: Table, label: str, knobs: Knobs, figures: Sequence[str], style: str, detail: Detail) -> None:
    broken = (
        textwrap.wrap(label, _LABEL, break_long_words=False, break_on_hyphens=False)
        if detail >= Detail.SHORT
        else [label]
    )
    cells = (*setting_cells("\n".join(broken).replace(", ", ",\n"), knobs, detail), *figures)
    drawn.add_row(*(Text(cell, style=style) for cell in cells))


def _between(point: Point, detail: Detail, repeated: bool) -> str:
    """The interval over seeds, or over requests where all or none met the SLO; "" where there is one seed, or the requests are
    ``repeated`` under each: nothing is known of others."""
    if repeated or len(set(point.seeds)) < 2 or detail >= Detail.BARE:
        return ""
    return f" ({point.attainment_low * 100:.1f}–{point.attainment_high * 100:.1f})"


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
