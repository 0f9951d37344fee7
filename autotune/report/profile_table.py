"""The result as a table for people: recommended settings, the baseline, and what else is Pareto-optimal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.cost.price import money
from autotune.engines.defaults import VLLM_LABEL
from autotune.engines.named import knob_name
from autotune.profile import PURPOSES, RECOMMENDED, Point, Profile, Purpose, Setting
from autotune.profiling.objective import Objective
from autotune.profiling.points import known_gain, pareto, share_beside, share_interval
from autotune.profiling.space import is_baseline
from autotune.report.standing import ahead, compared_by
from autotune.report.tables import Detail, class_table, columns, fullest, latency, setting_cells, setting_table
from autotune.report.wording import compared, lateness, percent, required, sentence, times
from autotune.workload import parse_workload
from runtime.errors import InputError
from runtime.knobs import KNOBS, Knobs
from runtime.slo import share_met

OTHERS, EVERY_PURPOSE = "also Pareto", "every purpose"
_MOST_OTHERS = 4
_LOOKED_AT = 50  # requests, for whether a seed changes any


def rows(profile: Profile) -> list[tuple[str, Point, str]]:
    """(label, point, mark): the purposes, those of one setting in one row; the baseline; other Pareto-optimal points of the
    same comparison."""
    held: dict[Knobs, list[Purpose]] = {}
    for purpose in PURPOSES:
        if purpose in profile.settings:
            held.setdefault(profile.settings[purpose].knobs, []).append(purpose)
    found = [
        (
            EVERY_PURPOSE if [*purposes] == [*PURPOSES] else ", ".join(purposes),
            profile.settings[purposes[0]].point,
            "← recommended" if RECOMMENDED in purposes else "",
        )
        for purposes in held.values()
    ]
    if profile.baseline is not None:
        found.append((VLLM_LABEL, profile.baseline, ""))
    shown = {row[1].knobs for row in found}
    stage, rate = found[0][1].stage, found[0][1].rate
    peers = [p for p in profile.points if p.stage == stage and p.rate == rate]
    others = [p for p in pareto(peers) if p.knobs not in shown]
    others.sort(key=Objective.of(profile).value, reverse=True)
    return found + [(OTHERS, p, "") for p in others[:_MOST_OTHERS]]


def table(profile: Profile, width: int = 120) -> Table:
    """For a terminal of ``width`` columns; a narrow one loses throughput and intervals."""
    return fullest(lambda detail: _drawn(profile, detail), width)


def _drawn(profile: Profile, detail: Detail) -> Table:
    full, price = detail <= Detail.ALL_CLOSE, profile.price_per_hour
    target = required(Objective.of(profile))
    priced = () if price is None else ("per M tok",)
    met = "met" if detail >= Detail.SHORT else "attainment"
    by_mean = profile.objective == "mean-e2e"
    mean = ("E2E mean",) if by_mean else ()
    titles = (*mean, met, "req/s", *(("tok/s",) if full else ()), *priced, "TTFT p99", "TPOT p99")
    drawn = setting_table(titles, detail)
    marked = detail < Detail.BAREST  # else by its style alone
    if marked:
        drawn.add_column("", no_wrap=True)
    for label, point, mark in rows(profile):
        style = "bold green" if mark else "dim" if label in (OTHERS, VLLM_LABEL) else ""
        interval = f" ({share_interval(point.attainment_low, point.attainment_high)})" if full else ""
        half = point.goodput.half if detail < Detail.BARE else None
        spread = "" if half is None else f" ± {half:.1f}"
        figures = [
            *((latency(point.e2e_mean_ms),) if by_mean else ()),
            f"{share_beside(share_met(point), point.attainment_low if full else 0.0, target)}{interval}",
            f"{point.goodput.mean:.1f}{spread}",
            *((f"{point.throughput.mean:.0f}",) if full else ()),
            *(() if price is None else (money(Objective.of(profile).cost(point.throughput.mean)),)),
            _ms(point.ttft_p99_ms),
            _ms(point.tpot_p99_ms),
            *((mark if full else mark[:1],) if marked else ()),
        ]
        if detail >= Detail.SHORT and ", " in label:  # interactive +1: it and one other
            label = f"{label.partition(', ')[0]} +{label.count(', ')}"
        drawn.add_row(*(Text(cell, style=style) for cell in (*setting_cells(label, point.knobs, detail), *figures)))
    return drawn


def _repeated(profile: Profile) -> float:
    """Share of its requests that were the same under each of its seeds, as a trace's are; 0 where the trace is not here."""
    if len(profile.workload.validation_seeds) < 2:
        return 0.0
    try:
        return parse_workload(profile.workload.spec).repeated(limit=_LOOKED_AT)
    except InputError:
        return 0.0


def _same_requests(profile: Profile) -> str:
    """What seeds did not change, in parentheses; "" for nothing."""
    repeated = _repeated(profile)
    which = "the same requests" if repeated == 1 else f"the same {repeated:.0%} of the requests"
    return f" (a trace brings {which} under every seed)" if repeated else ""


def show(profile: Profile, console: Console) -> None:
    """The table, how it was measured, and the verdict."""
    first = rows(profile)[0][1]
    counts = sorted({len(point.seeds) for _, point, _ in rows(profile)})
    fresh = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    how = {
        "validation": f"{fresh} run{'s' if counts != [1] else ''} a row, under fresh seeds" + _same_requests(profile),
        "search": "the search's own seed, not validated",
        "simulation": "simulated, not measured",
    }
    weighed = ", each counted by the weight of its class;" if profile.classes else ""
    console.print()
    console.print(escape(conclusion(profile)), highlight=False, style="bold")
    console.print()
    console.print(table(profile, console.width))
    drawn = class_table([(label, point) for label, point, _ in rows(profile)], profile.slo, profile.classes)
    if drawn is not None:
        console.print(drawn)
    console.print(
        f"req/s: those that met the SLO{weighed or ', of'} {_offered(profile)}; "
        f"{profile.workload.window_s:g} s windows, {how.get(first.stage, first.stage)}; "
        f"± and ( ) are 95% intervals{_too_few(profile, console.width)}; wait in ms; p99 of so few requests is rough",
        style="dim",
        highlight=False,
    )
    late = max(row[1].lateness_p99_ms for row in rows(profile))
    if (said := lateness(late, profile.slo, *(one.slo for one in profile.classes))) is not None:
        console.print(said, style="yellow")
    for warning in warnings(profile):
        console.print(escape(warning), highlight=False, style="yellow")
    if profile.confidence is not None:
        console.print(escape(profile.confidence.sentence), highlight=False, style="dim")
    chosen = profile.settings.get(RECOMMENDED)
    if profile.objective != "goodput":
        console.print(
            "E2E mean is what settings were compared by; attainment by the SLO is shown beside it", style="dim"
        )
    elif chosen is not None and any(
        point.weighted_attainment > chosen.point.weighted_attainment for _, point, _ in rows(profile)
    ):
        console.print(f"{RECOMMENDED}: {escape(chosen.why)}", highlight=False, style="dim")
    if (text := cheapest(profile)) is not None:
        console.print(escape(text), highlight=False)
    console.print(escape(profile.verdict), highlight=False, style="" if profile.slo_met else "yellow")


def _too_few(profile: Profile, width: int) -> str:
    """Why a goodput has no ±, as a clause; "" where each has one, or the table of that ``width`` shows none."""
    shown = columns(_drawn(profile, Detail.SHORT)) <= width
    lacking = any(point.goodput.half is None for _, point, _ in rows(profile))
    return ", where too few met it there is no ±" if shown and lacking else ""


def _offered(profile: Profile) -> str:
    """What came to the settings compared: the nominal rate may be another."""
    rates = sorted({f"{point.offered_rate:.3g}" for _, point, _ in rows(profile)}, key=float)
    return (
        f"{rates[0]} req/s offered to every setting alike"
        if len(rates) == 1
        else f"{rates[0]} to {rates[-1]} req/s offered"
    )


def conclusion(profile: Profile) -> str:
    """What to set and what it gains over vLLM's defaults on this engine, in one sentence."""
    setting, base = profile.settings.get(RECOMMENDED, next(iter(profile.settings.values()))), profile.baseline
    simulated = setting.point.stage == "simulation"
    if simulated and base is not None and base.knobs == setting.knobs:
        return "By simulation alone, no setting beats vLLM's defaults here. Nothing has been measured."
    if profile.objective == "mean-e2e" and (base is None or base.knobs != setting.knobs):
        return _by_mean_e2e(profile, setting)
    if not setting.point.met:
        rate = f"{setting.point.offered_rate:.3g} req/s"
        return f"No setting can be advised: at {rate} no request met the SLO. Profile a quiet machine, or relax --slo."
    if base is not None and base.knobs == setting.knobs:
        of = (setting.point.stage, base.rate)
        others = [p for p in profile.points if (p.stage, p.rate) == of and p.knobs != base.knobs]
        measured_more = any(p.weighted_attainment > base.weighted_attainment for p in others)
        count = len({p.knobs for p in others})
        better = f"{'clearly ' * measured_more}better"
        if not others:
            best = "they were the only setting measured"
        elif count == 1:
            best = f"the one other setting measured was not {better}"
        else:
            best = f"none of the {count} others measured was {better}"
        candidates = (p for p in others if not is_baseline(p.label))  # defaults of other engines: pins may forbid them
        most = max((p for p in candidates if ahead(p, base)), key=Objective.of(profile).value, default=None)
        if most is not None and profile.objective == "goodput":
            return _measured_ahead(profile, most, base)
        return f"No setting beats vLLM's defaults here: {best}."
    turned = _turned(profile, setting.knobs, base)
    if simulated:
        return f"By simulation alone: set {turned}. Nothing has been measured."
    advice, gain = f"Set {turned}", known_gain(profile)
    once = f"; one run of {profile.workload.window_s:.3g} s" if len(setting.point.seeds) == 1 else ""
    if base is None or base.stage != setting.point.stage or base.rate != setting.point.rate:
        return f"{advice}. vLLM's defaults were not measured beside it."
    best = f"Best by measurement and simulation, {turned}"
    if gain is None:  # of a version that did not compare the runs, or the defaults met none
        did = (
            f"{_share(profile, setting.point)} of requests within the SLO, with vLLM's defaults {_share(profile, base)}"
        )
        if not base.met and ahead(setting.point, base):
            return f"{advice}: {did}."
        single = " (intervals of single requests)" if base.met and base.stage == "validation" else ""
        return f"No clear gain over vLLM's defaults here. {best}: {did}{single}."
    if not gain.bounded:
        interval = f"from {times(gain.low)} times as many, without an upper end"
    elif gain.ratio >= 2:
        interval = f"{times(gain.low)}–{times(gain.high)}"
    elif gain.high >= 3:
        interval = f"{times(gain.low)} to {times(gain.high)} times as many"
    else:
        interval = f"{_percent(gain.low)} to {_percent(gain.high)}"
    objective = Objective.of(profile)
    if all(point.met == point.offered for point in (setting.point, base)):
        few = "" if objective.confirmed(base) else f"{base.offered} requests are too few to tell them apart; "
        return (
            f"No gain over vLLM's defaults to be seen here: with either, every request met the SLO at {base.offered_rate:.3g} "
            f"req/s; {few}best by measurement and simulation, {turned}."
        )
    more = compared(gain.ratio, "requests within the SLO", "with vLLM's defaults")
    before = "" if gain.block_s is not None else ", by the rule of earlier versions, which claimed too much"
    apart = "" if gain.paired else "; the two met different requests"
    more += f" (95% interval {interval}{before}{apart}{once})"
    if gain.clear:
        return f"{advice}: {more}."
    both = objective.confirmed(setting.point) and objective.confirmed(base)
    met = "; both meet the SLO at this rate" if both else ""
    return f"No clear gain over vLLM's defaults here. {best}: {more}{met}."


def _share(profile: Profile, point: Point) -> str:
    """Its attainment and the interval of that."""
    interval = share_interval(point.attainment_low, point.attainment_high)
    return f"{share_beside(share_met(point), point.attainment_low, required(Objective.of(profile)))} ({interval}%)"


def _measured_ahead(profile: Profile, point: Point, base: Point) -> str:
    """Of ``point``, whose interval lies above that of vLLM's defaults, though they were chosen: block by block, and beyond
    what runs of one setting differ by, it does not."""
    mine, other, shares = compared_by(point, base)
    turned = _turned(profile, point.knobs, base)
    target = required(Objective.of(profile))
    did = (
        f"{percent(mine.mean, target=target)} of the same requests within the SLO against {percent(other.mean, target=target)}"
        if shares
        else f"{mine.mean:.3g} req/s within the SLO against {other.mean:.3g}"
    )
    runs, window = len(set(point.seeds)), f"{profile.workload.window_s:.3g} s"
    windows = f"a window of {window}" if runs == 1 else f"{runs} windows of {window}"
    return (
        f"No setting beats vLLM's defaults beyond chance here. {turned} measured {did}: in {windows}, a burst or two can make "
        "that difference."
    )


def _turned(profile: Profile, knobs: Knobs, base: Point | None) -> str:
    """``knobs`` that ``base`` has otherwise (None: all), by the names that the profile's engine has for them."""
    return ", ".join(
        f"{knob_name(profile.engine.name, spec.name)}={getattr(knobs, spec.name):g}"
        for spec in KNOBS
        if base is None or getattr(knobs, spec.name) != getattr(base.knobs, spec.name)
    )


def _by_mean_e2e(profile: Profile, setting: Setting) -> str:
    """The same where the lowest mean E2E was looked for."""
    base, here = profile.baseline, setting.point.e2e_mean_ms
    turned = _turned(profile, setting.knobs, base)
    advice = f"{'By simulation alone: set' if setting.point.stage == 'simulation' else 'Set'} {turned}"
    if here is None:
        return f"{advice}."
    there = None if base is None else base.e2e_mean_ms
    if there is None or base is None or base.stage != setting.point.stage or base.rate != setting.point.rate:
        return f"{advice}: mean E2E {latency(here)}. vLLM's defaults were not measured beside it."
    return (
        f"{advice}: mean E2E {latency(here)}, with vLLM's defaults {latency(there)} ({_percent(here / there)}), at "
        f"{setting.point.offered_rate:.3g} req/s."
    )


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f}%"


def warnings(profile: Profile) -> tuple[str, ...]:
    """What about the run makes its figures unreliable, a sentence each."""
    return tuple(sentence(text) for text in profile.warnings)


def cheapest(profile: Profile) -> str | None:
    """The cheapest setting that meets the SLO, in a sentence; None without a price or such a setting."""
    if profile.price_per_hour is None:
        return None
    tried = profile.capacity.tried if profile.capacity is not None else ()
    objective, points = Objective.of(profile), (*(point for _, point, _ in rows(profile)), *tried)
    known = len({p.knobs for p in points})
    best = objective.cheapest(points)
    cost = None if best is None else objective.cost(best.throughput.mean)
    how = "by simulation, " if all(point.stage == "simulation" for point in points) else ""
    if best is None or cost is None:
        return f"{how}at {money(profile.price_per_hour)} per hour, none of the {known} settings known meets the SLO"
    return (
        f"{how}cheapest of the {known} settings known that meets the SLO: {best.knobs} at {best.offered_rate:.3g} req/s, "
        f"{money(cost)} per million output tokens at {money(profile.price_per_hour)} per hour"
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"
