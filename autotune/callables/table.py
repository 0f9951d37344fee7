"""The profile of a callable as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.callables.profile import CallableProfile, Point
from autotune.callables.settings import AS_IT_COMES, ONE_AT_A_TIME, Setting

_HIGHEST = 5  # rows of settings that were measured


def show(profile: CallableProfile, console: Console) -> None:
    """What it is, what a call takes, the settings tried, and the verdict."""
    service, load, inputs = profile.service, profile.load, profile.inputs
    cost = f", cost {inputs.cost} ({inputs.mean_cost:.3g} on average)" if inputs.cost else ""
    per_cost = f" + {service.per_cost_ms:.3g} × cost" if service.per_cost_ms else ""
    for line in (
        f"{profile.function} · {inputs.items} inputs of {inputs.file}{cost} · SLO {profile.slo} ({profile.slo_from})",
        f"a call of n items takes {service.fixed_ms:.3g} + {service.per_item_ms:.3g} × n{per_cost} ms "
        f"(typical error {service.error:.1%}; tried up to {service.largest} items: {service.ended})",
        f"so it can do about {load.capacity:.3g} items/s inside the SLO, in calls of {load.capacity_size}; "
        f"offered here: {load.rate:.3g} items/s ({load.rate_from})",
    ):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print()
    console.print(table(profile))
    measured = f"{load.window_s:.3g} s windows of Poisson arrivals, " if load.window_s else ""
    console.print(
        f"in SLO: share of the items offered that came back in time, ( ) its 95% interval; p50, p99: of those that came back; "
        f"{measured}{profile.simulated} settings simulated",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    late = max(p.lateness_p99_ms for p in profile.points)
    if profile.slo.e2e_ms is not None and late > max(profile.slo.e2e_ms / 10, 5.0):
        console.print(
            f"the load generator was up to {late:.0f} ms late, which the latencies include: is the machine busy?",
            style="yellow",
        )
    console.print(escape(profile.verdict), highlight=False, style="" if profile.slo_met else "yellow", soft_wrap=True)


def table(profile: CallableProfile) -> Table:
    """One row a setting. A ceiling that is as high as it goes is shown as open."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    drawn.add_column("", no_wrap=True)
    drawn.add_column("strategy", no_wrap=True)
    titles = ["max items", "max wait", *(["max cost"] if profile.inputs.cost else [])]
    for title in (*titles, "in SLO", "on time/s", "p50", "p99", "items/call", "calls/s"):
        drawn.add_column(title, justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    for index, point in enumerate(_rows(profile)):
        style = "bold green" if index == 0 else "dim" if point.source == "simulated" else ""
        cells = [_label(index, point), point.strategy, *_knobs(profile, point), *_figures(point), point.source]
        drawn.add_row(*(Text(cell, style=style) for cell in cells))
    return drawn


def _rows(profile: CallableProfile) -> list[Point]:
    yardsticks = [p for p in profile.points[1:] if _setting(p) in (AS_IT_COMES, ONE_AT_A_TIME)]
    others = [p for p in profile.points[1:] if p not in yardsticks]
    return [profile.points[0], *others[:_HIGHEST], *yardsticks]


def _setting(point: Point) -> Setting:
    return Setting(point.strategy, point.knobs)


def _label(index: int, point: Point) -> str:
    known = {AS_IT_COMES: "Batcher as it comes", ONE_AT_A_TIME: "no batching"}.get(_setting(point))
    if index == 0:
        return f"recommended ({known})" if known else "recommended"
    return known or "also tried"


def _knobs(profile: CallableProfile, point: Point) -> list[str]:
    knobs, top = point.knobs, AS_IT_COMES.knobs
    items = "open" if knobs.max_batch_size >= top.max_batch_size else f"{knobs.max_batch_size}"
    wait = "open" if knobs.max_wait_ms >= top.max_wait_ms else f"{knobs.max_wait_ms:g} ms"
    cost = "open" if knobs.token_budget >= top.token_budget else f"{knobs.token_budget}"
    return [items, wait, *([cost] if profile.inputs.cost else [])]


def _figures(p: Point) -> list[str]:
    return [
        f"{p.attainment * 100:.1f}% ({p.attainment_low * 100:.0f}–{p.attainment_high * 100:.0f})",
        f"{p.goodput:.3g}",
        _ms(p.e2e_p50_ms),
        _ms(p.e2e_p99_ms),
        f"{p.items_per_call:.1f}",
        f"{p.calls_per_s:.3g}",
    ]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"
