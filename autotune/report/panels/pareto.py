"""What settings are compared by, against latency: every setting that was tried, the front, and the region the SLO asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autotune.profile import Point
from autotune.profiling.objective import Measure, Objective
from autotune.report.evidence import Evidence, LatencyBound, MeasuredTrial, targets, trial_of, worst_of
from autotune.report.figure import Label, Plot, Trace, View, axis, dots, error_bars, layout, line, log_axis, note, plain
from autotune.report.section import Section, absent
from autotune.report.standing import standing
from autotune.report.wording import (
    STAGES,
    defaults,
    ms,
    names,
    number,
    percent,
    plus_minus,
    reached,
    required,
    short_setting,
)
from runtime.knobs import Knobs
from runtime.slo import SLO, share_met

KEY = "pareto"
_FEWEST = 2
_LEAST = 0.1  # as good as the best: a slow setting that is less is left out
_SAME_LOAD = 0.05
_EVERY = targets(SLO(ttft_ms=1, tpot_ms=1, e2e_ms=1))  # latencies, whose targets say nothing
_MOST_DRAWN = 3000  # faint points; beyond that a page turns slow and nothing more is seen


class _Scale(NamedTuple):
    """A latency to draw against: its button, axis title, where its target is (None: classes have several), and its value for a
    trial or point."""

    name: str
    title: str
    bound: float | None
    of: Callable[[MeasuredTrial | Point], float | None]


class _Cloud(NamedTuple):
    """Trials that are drawn alike, and the sentence that says what they are; ``front``: with a line along the best."""

    name: str
    trials: list[MeasuredTrial]
    colour: str
    symbol: str
    opacity: float
    said: str
    front: bool = False


def section(evidence: Evidence) -> Section:
    compared, classes, objective = evidence.compared, evidence.profile.classes, Objective.of(evidence.profile)
    measure = objective.measure
    topic = f"{measure.title} against latency"
    bounds, clouds = _EVERY if classes else targets(evidence.profile.slo), _clouds(evidence)
    trials = [t for cloud in clouds for t in cloud.trials]
    if len(compared) + len(trials) < _FEWEST:
        return absent(KEY, topic, "Only one setting was measured, so there is no front to draw.")
    if not bounds:
        return absent(KEY, topic, "The SLO targets nothing but ITL, which profiles do not keep.")
    tried: list[MeasuredTrial | Point] = [*trials, *compared]
    bounds = [bound for bound in bounds if any(bound.of(one) is not None for one in tried)]
    scales = _untargeted(bounds) if classes else _scales(bounds)
    if not scales:
        return absent(KEY, topic, "No request has a latency that the SLO bounds.")
    notes = _cautions(compared, clouds)
    if evidence.profile.slo.itl_ms is not None and not classes:
        notes.append("Profiles do not keep the ITL: its target is not in the picture.")
    kept = _drawn(objective, trials, compared, scales)
    if gone := [t for t in trials if t not in kept]:
        best = max(gone, key=objective.value)
        limit = "" if not objective.value(best) else "at best " if measure.lowest else "at most "
        what = "1 slow setting" if len(gone) == 1 else f"{len(gone)} slow settings"
        notes.append(f"Outside the picture: {what} with {limit}{reached(objective, best)}.")
    clouds = [cloud._replace(trials=[t for t in cloud.trials if t in kept]) for cloud in clouds]
    views = [_view(evidence, objective, scale, compared, clouds) for scale in scales]
    title = f"Best{' by simulation' if evidence.simulated else ''}: {standing(evidence).short}"
    count = len({one.knobs for one in tried})
    known = (
        "" if objective.interval(evidence.recommended.point) is None else f"the 95% interval of its {measure.name} and "
    )
    region = (
        "in the shaded region the 99th percentile meets its target"
        if not classes
        else "p99s are of all classes together, which have targets of their own"
    )
    lead = (
        f"Each point is one of {count} settings. {measure.direction}, further left is faster; {region}. "
        f"The star is the recommended setting, with {known}"
        f"the range of its runs. {' '.join(cloud.said for cloud in clouds)}"
    )
    return Section(
        KEY, topic, title, lead.strip(), (Plot("pareto", "", f"{topic}. {title}.", views, 460),), notes=tuple(notes)
    )


def _clouds(evidence: Evidence) -> list[_Cloud]:
    """What was tried beside the compared points, the faintest first."""
    simulated, candidates = evidence.trials("simulation"), evidence.candidates
    found = []
    if simulated and simulated != candidates:
        found.append(_Cloud("grey dots", simulated, "@faint", "circle", 0.45, "Grey dots are simulated trials."))
    if candidates:
        said = "Diamonds are what no other simulated setting beats, joined by the dotted line."
        found.append(_Cloud("diamonds", candidates, "@simulated", "diamond-open", 0.9, said, True))
    if evidence.recommended.point.stage != "search" and (searched := evidence.trials("search")):
        said = "Open circles were measured once, in the search."
        found.append(_Cloud("open circles", searched, "@measured", "circle-open", 0.6, said))
    return found


def _drawn(
    objective: Objective, trials: list[MeasuredTrial], compared: list[Point], scales: Sequence[_Scale]
) -> set[MeasuredTrial]:
    """Without the slow ones that serve next to nothing in time: they would squeeze all others into a corner."""
    tried: list[MeasuredTrial | Point] = [*trials, *compared]
    best = max(tried, key=objective.value)
    none = objective.value(best) <= 0
    values = {t: [scale.of(t) for scale in scales] for t in trials}
    shown = [values[t] for t in trials if none or objective.share(t, best) >= _LEAST]
    shown += [[s.of(p) for s in scales] for p in compared]
    edges = [
        max([scale.bound or 0.0, *(v for row in shown if (v := row[place]) is not None)])
        for place, scale in enumerate(scales)
    ]
    return {
        t for t, row in values.items() if all(v is not None and v <= edge for v, edge in zip(row, edges, strict=True))
    }


def _scales(bounds: Sequence[LatencyBound]) -> list[_Scale]:
    single = [_Scale(b.name, f"{b.name} p99 (ms)", b.bound, b.of) for b in bounds]
    if len(single) < 2:
        return single
    worst = _Scale("Worst of all", "worst p99, as a multiple of its target", 1.0, lambda found: worst_of(found, bounds))
    return [worst, *single]


def _untargeted(bounds: Sequence[LatencyBound]) -> list[_Scale]:
    """The same latencies without their targets."""
    return [_Scale(one.name, f"{one.name} p99 (ms)", None, one.of) for one in bounds]


def _view(evidence: Evidence, objective: Objective, scale: _Scale, compared: list[Point], clouds: list[_Cloud]) -> View:
    called, owners, measure = names(evidence), defaults(evidence), objective.measure
    data: list[Trace] = []
    values = [] if scale.bound is None else [scale.bound]
    for cloud in clouds:
        known = [(t, at[0], at[1]) for t in cloud.trials[-_MOST_DRAWN:] if (at := _at(objective, scale, t))]
        if not known:
            continue
        xs, ys, hover = [x for _, x, _ in known], [y for *_, y in known], [_hover(objective, t) for t, *_ in known]
        data.append(dots(xs, ys, hover, colour=cloud.colour, symbol=cloud.symbol, size=6, opacity=cloud.opacity))
        values += xs
        if len(known) > 2 and cloud.front:
            data.append(
                line(*_front(measure, xs, ys), colour=cloud.colour, width=1.5, line={"shape": "hv", "dash": "dot"})
            )
    labels: list[Label] = []
    shown = [(p, at[0], at[1]) for p in compared if (at := _at(objective, scale, p))]
    values += [x for _, x, _ in shown]
    if shown:
        data.append(_validated(evidence, objective, scale, shown, owners))
    labels += [
        Label(x, y, called[p.knobs], _colour(evidence, p.knobs, owners), p.knobs == _chosen(evidence))
        for p, x, y in shown
        if p.knobs in owners or p.knobs in _settings(evidence)
    ]
    measured = {p.knobs for p, *_ in shown}
    tried = [t for cloud in reversed(clouds) for t in cloud.trials]
    elsewhere = {owners[t.knobs]: t for t in reversed(tried) if t.knobs in owners and t.knobs not in measured}
    others = [(t, at[0], at[1]) for t in elsewhere.values() if (at := _at(objective, scale, t))]
    if others:
        data.append(
            dots([x for _, x, _ in others], [y for *_, y in others], [_hover(objective, t) for t, *_ in others],
                 colour="@baseline", symbol="square-open", size=9)
        )  # fmt: skip
        labels += [Label(x, y, f"{owners[t.knobs]}, {STAGES[t.stage]}", "@baseline") for t, x, y in others]
    across = log_axis(scale.title, values, pad=1.3)
    if scale.bound == 1.0:
        across["ticktext"] = [f"{text}×" for text in across["ticktext"]]
    ys = [figure for t in tried if (figure := objective.figure(t)) is not None]
    for p in compared:
        interval, figure = objective.interval(p), objective.figure(p)
        ys += [interval.high] if interval else [] if figure is None else [figure]
    named = f"{measure.name} ({measure.unit_in_full})"
    y = log_axis(named, ys) if measure.lowest else axis(named, rangemode="tozero")
    if not measure.lowest:
        top = max(ys, default=1.0)
        y["range"] = [-0.03 * top, 1.1 * top]
    if scale.bound is None:
        return View(scale.name, data, layout(across, y), labels)
    region = {
        "type": "rect", "xref": "x", "yref": "paper", "x0": 10 ** across["range"][0], "x1": scale.bound, "y0": 0, "y1": 1,
        "fillcolor": "@region", "line": {"width": 0}, "layer": "below",
    }  # fmt: skip
    inside = note(
        "within target",
        x=across["range"][0],
        y=0.0,
        xanchor="left",
        yanchor="bottom",
        font={"color": "@good", "size": 12},
    )
    return View(scale.name, data, layout(across, y, shapes=[region], annotations=[inside]), labels)


def _at(objective: Objective, scale: _Scale, found: MeasuredTrial | Point) -> tuple[float, float] | None:
    """Where it is drawn; None where a latency or the figure is not known."""
    x, y = scale.of(found), objective.figure(found)
    return None if x is None or y is None else (x, y)


def _validated(
    evidence: Evidence,
    objective: Objective,
    scale: _Scale,
    shown: list[tuple[Point, float, float]],
    owners: dict[Knobs, str],
) -> Trace:
    chosen = _chosen(evidence)
    called = names(evidence)
    xs, ys = [x for _, x, _ in shown], [y for *_, y in shown]
    trace = dots(
        xs,
        ys,
        [_hover(objective, p, called[p.knobs]) for p, *_ in shown],
        colour=[_colour(evidence, p.knobs, owners) for p, *_ in shown],
        size=[16 if p.knobs == chosen else 11 for p, *_ in shown],
        symbol=["star" if p.knobs == chosen else "square" if p.knobs in owners else "circle" for p, *_ in shown],
        line={"color": "@card", "width": 1},
        opacity=1,  # plotly makes points of several sizes translucent
    )
    intervals = [interval for p, *_ in shown if (interval := objective.interval(p)) is not None]
    if intervals:
        trace["error_y"] = error_bars(ys, [one.low for one in intervals], [one.high for one in intervals], "@faint")
    ranges = [_range(evidence, scale, p, x) for p, x, _ in shown]
    if any(low < high for low, high in ranges):
        trace["error_x"] = error_bars(xs, [low for low, _ in ranges], [high for _, high in ranges], "@faint")
    return trace


def _range(evidence: Evidence, scale: _Scale, point: Point, value: float) -> tuple[float, float]:
    """What single runs gave, where the sidecar has them."""
    found = [x for run in evidence.runs_of(point) if (x := scale.of(trial_of(run))) is not None]
    return min([value, *found]), max([value, *found])


def _front(measure: Measure, xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """The best figure at or below each latency."""
    front_x: list[float] = []
    front_y: list[float] = []
    sign = -1 if measure.lowest else 1
    for x, y in sorted(zip(xs, ys, strict=True), key=lambda pair: (pair[0], -sign * pair[1])):
        if not front_y or sign * y > sign * front_y[-1]:
            front_x.append(x)
            front_y.append(y)
    return front_x, front_y


def _hover(objective: Objective, found: MeasuredTrial | Point, called: str = "") -> str:
    said, share = reached(objective, found), share_met(found) if isinstance(found, Point) else found.attainment
    if isinstance(found, Point):
        head = f"<b>{plain(called)}</b>, {STAGES[found.stage]}"
        if objective.interval(found) is not None and found.goodput.half is not None:
            said = f"{objective.measure.reads.format(plus_minus(found))} (95% interval)"
    else:
        head = f"trial {found.number}, {STAGES[found.stage]}" if found.number >= 0 else STAGES[found.stage]
    return "<br>".join(
        (
            head,
            short_setting(found.knobs),
            said,
            f"{percent(share, target=required(objective))} of requests met the SLO",
            f"p99: TTFT {ms(found.ttft_p99_ms)}, TPOT {ms(found.tpot_p99_ms)}",
        )
    )


def _cautions(compared: list[Point], clouds: list[_Cloud]) -> list[str]:
    """What a setting does under one load says little beside what another does under another."""
    offered = _mean([p.offered_rate for p in compared])
    found = []
    for cloud in clouds:
        other = _mean([t.offered_rate for t in cloud.trials])
        if offered and other and abs(other - offered) > _SAME_LOAD * max(other, offered):
            found.append(
                f"The {cloud.name} met {number(other)} req/s, validated settings {number(offered)}: compare {cloud.name} only "
                "with each other."
            )
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _chosen(evidence: Evidence) -> Knobs:
    return evidence.recommended.knobs


def _settings(evidence: Evidence) -> set[Knobs]:
    return {s.knobs for s in evidence.profile.settings.values()}


def _colour(evidence: Evidence, knobs: Knobs, owners: dict[Knobs, str]) -> str:
    if knobs == _chosen(evidence):
        return "@accent"
    return "@baseline" if knobs in owners else "@measured"
