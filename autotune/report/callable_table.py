"""The profile of a callable as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.profile.callable import BatcherSetting, CallablePoint, CallableProfile, items_per_s
from autotune.profiling.batcher_space import ONE_AT_A_TIME, OPEN, adaptive_alone
from autotune.profiling.points import share_interval
from autotune.report.tables import Detail, empty_table, fullest
from autotune.report.wording import lateness
from runtime.slo import in_percent, share_met

_OTHERS = 5  # rows of settings beside the recommended one and the baselines


def show(profile: CallableProfile, console: Console) -> None:
    """What it is, what a call takes, the settings tried, and the verdict."""
    service, load, inputs = profile.service, profile.workload, profile.inputs
    cost = f", cost {inputs.cost} ({inputs.mean_cost:.3g} on average)" if inputs.cost else ""
    per_cost = f" + {service.per_cost_ms:.3g} × cost" if service.per_cost_ms else ""
    for line in (
        f"{profile.function} · {inputs.items} inputs of {inputs.file}{cost} · SLO {profile.slo} ({profile.slo_from})",
        f"a call of n items takes {service.fixed_ms:.3g} + {service.per_item_ms:.3g} × n{per_cost} ms "
        f"(typical error {service.error:.1%}; tried up to {service.largest} items: {service.ended})",
        *_workers(profile),
        f"so it can do about {items_per_s(service.capacity)} inside the SLO, in calls of {service.capacity_size}; "
        f"offered here: {items_per_s(load.rate)} ({profile.why_rate})",
    ):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print()
    console.print(table(profile, console.width))
    measured = any(p.source == "measured" for p in profile.points)
    windows = f"{load.window_s:.3g} s windows of Poisson arrivals, " if measured else ""
    console.print(
        f"as it comes: {_as_written(profile)}, no other option; attainment: share of the items offered that came back in time, "
        "( ) its 95% interval; p50, p99: of those that came back; "
        f"{windows}{profile.simulated} settings simulated",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    if profile.points[0].setting == _as_it_comes(profile):
        console.print(
            f"Recommended is the Batcher as it comes: {_as_written(profile)} needs nothing else.", highlight=False
        )
    late = max(p.lateness_p99_ms for p in profile.points)
    if (said := lateness(late, profile.slo)) is not None:
        console.print(said, style="yellow")
    console.print(escape(profile.verdict), highlight=False, style="" if profile.slo_met else "yellow", soft_wrap=True)
    if profile.confidence is not None:
        console.print(escape(profile.confidence.sentence), highlight=False, style="dim", soft_wrap=True)


def _workers(profile: CallableProfile) -> list[str]:
    if profile.replicas == 1:
        return []
    return [
        f"{profile.replicas} workers call it; while all do, a call takes {profile.service.beside:.3g} times as long"
    ]


def table(profile: CallableProfile, width: int = 120) -> Table:
    """One row a setting; a narrow terminal loses the interval and the rates. A ceiling as high as it goes is open."""
    return fullest(lambda detail: _drawn(profile, detail), width)


def _drawn(profile: CallableProfile, detail: Detail) -> Table:
    wide = detail <= Detail.ALL_CLOSE
    drawn = empty_table(detail)
    drawn.add_column("", no_wrap=True)
    drawn.add_column("strategy", no_wrap=True)
    knobs = ["items ≤", "wait ≤", *(["cost ≤"] if profile.inputs.cost else [])]
    for title in (*knobs, "attainment", *(("on time/s", "items/call") if wide else ()), "p50", "p99"):
        drawn.add_column(title, justify="right", no_wrap=True)
    for index, point in enumerate(_rows(profile)):
        style = "bold green" if index == 0 else "dim" if point.source == "simulated" else ""
        cells = [
            _label(profile, index, point),
            point.strategy,
            *_knobs(profile, point),
            *_figures(profile, point, wide),
        ]
        drawn.add_row(*(Text(cell, style=style) for cell in cells))
    return drawn


def _rows(profile: CallableProfile) -> list[CallablePoint]:
    baselines = [p for p in profile.points[1:] if p.setting in (_as_it_comes(profile), ONE_AT_A_TIME)]
    others = [p for p in profile.points[1:] if p not in baselines]
    return [profile.points[0], *others[:_OTHERS], *baselines]


def _as_it_comes(profile: CallableProfile) -> BatcherSetting | None:
    """The baseline: no option but the most items in a call, where the profile was bounded by that."""
    found = [p.setting for p in profile.points if adaptive_alone(p.setting)]
    return max(found, key=lambda setting: setting.knobs.max_batch_size, default=None)


def _as_written(profile: CallableProfile) -> str:
    found = _as_it_comes(profile)
    if found is None or found.knobs.max_batch_size >= OPEN.max_batch_size:
        return "Batcher(fn, slo=…)"
    return f"Batcher(fn, slo=…, max_batch_size={found.knobs.max_batch_size})"


def _label(profile: CallableProfile, index: int, point: CallablePoint) -> str:
    known = {_as_it_comes(profile): "as it comes", ONE_AT_A_TIME: "no batching"}.get(point.setting, "also tried")
    return ("recommended" if index == 0 else known) + (" (simulated)" if point.source == "simulated" else "")


def _knobs(profile: CallableProfile, point: CallablePoint) -> list[str]:
    knobs, top = point.knobs, OPEN
    items = "open" if knobs.max_batch_size >= top.max_batch_size else f"{knobs.max_batch_size}"
    wait = "open" if knobs.max_wait_ms >= top.max_wait_ms else f"{knobs.max_wait_ms:g} ms"
    cost = "open" if knobs.token_budget >= top.token_budget else f"{knobs.token_budget}"
    return [items, wait, *([cost] if profile.inputs.cost else [])]


def _figures(profile: CallableProfile, p: CallablePoint, wide: bool) -> list[str]:
    interval = f" ({share_interval(p.attainment_low, p.attainment_high)})" if wide else ""
    rates = [f"{p.goodput:.4g}", f"{p.items_per_call:.1f}"] if wide else []
    share = in_percent(share_met(p), target=profile.slo.attainment)
    return [f"{share}{interval}", *rates, _ms(p.e2e_p50_ms), _ms(p.e2e_p99_ms)]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
