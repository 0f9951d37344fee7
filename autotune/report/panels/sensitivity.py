"""What each knob does around the recommended setting: turned by itself in the simulator, or as the trials happen to show it."""

from __future__ import annotations

import math
from typing import Any

from autotune.measure.score import Score
from autotune.profile import Profile
from autotune.profile.serving import serving_speed
from autotune.profiling.objective import Measure, Objective
from autotune.report.evidence import Evidence, MeasuredTrial
from autotune.report.figure import Plot, View, axis, dots, layout, line, log_axis, note, rule
from autotune.report.section import Section, absent
from autotune.report.wording import ms, percent, reached, required, short_setting
from autotune.simulate.sensitivity import Sensitivity
from runtime.knobs import KNOBS, Knobs, KnobSpec

KEY, TOPIC = "sensitivity", "Each knob around the choice"
_FEWEST = 8  # trials that say something
_NOTHING = 0.01  # changes of the figure compared by that are below it are no change
_BINS = 9
_AHEAD = 1.03  # times as good as the choice: worth a word
_GOOD = 0.95  # of the best
_ENVELOPE = 40  # trials from which the best of each part of the range is more than chance


def section(evidence: Evidence, swept: Sensitivity | None) -> Section:
    objective = Objective.of(evidence.profile)
    if swept is not None and any(objective.value(score) > 0 for score in _scores(swept)):
        return _of_knobs(evidence, swept)
    trials = max((evidence.trials(stage) for stage in ("simulation", "search")), key=len)
    nothing = "" if swept is None else _none_served(objective.measure)
    if len(trials) < _FEWEST:
        return absent(KEY, TOPIC, nothing or _why(evidence.profile, len(trials)))
    if not any(objective.value(t) > 0 for t in trials):
        none = (
            f"No request {objective.measure.met} in any of {len(trials)} trials, so they do not tell what a knob does."
        )
        return absent(KEY, TOPIC, nothing or none)
    return _from_trials(evidence, trials, nothing)


def _scores(swept: Sensitivity) -> list[Score]:
    return [score for values in swept.by_knob.values() for _, score in values]


def _none_served(measure: Measure) -> str:
    return (
        f"At this rate no simulated request {measure.meets}, whatever a knob is set to. "
        "So the simulation cannot tell what a knob does."
    )


def _why(profile: Profile, trials: int) -> str:
    lacking = (
        "This profile holds no cost model to simulate with" if profile.cost_model is None else "Nothing was simulated"
    )
    return f"{lacking}, and {trials or 'no'} trials are too few to show what a knob does by itself."


def _of_knobs(evidence: Evidence, swept: Sensitivity) -> Section:
    here, objective = evidence.recommended.knobs, Objective.of(evidence.profile)
    measure = objective.measure
    losses = {s.name: _losses(objective, s, here, swept.by_knob[s.name]) for s in KNOBS if s.name in swept.by_knob}
    ys = [y for score in _scores(swept) if (y := objective.figure(score)) is not None]
    plots = [
        _panel(objective, spec, swept.by_knob[spec.name], here, ys, losses[spec.name])
        for spec in KNOBS
        if spec.name in swept.by_knob
    ]
    most = max(losses, key=lambda name: max(losses[name].values(), default=0.0))
    worst = max(losses[most].values(), default=0.0)
    if not any(losses.values()):
        title = (
            f"No simulated request {measure.meets} at the choice itself, so the simulation cannot tell what a knob does"
        )
    elif worst == math.inf:
        title = f"{most} matters most: {_step(losses[most])} leaves every request unserved"
    elif worst >= _NOTHING:
        title = f"{most} matters most: {_step(losses[most])} {measure.costs_in_full.format(percent(worst, 0))}"
    else:
        title = f"No knob {measure.costs_in_full.format('1%')} when it is halved or doubled"
    speed = serving_speed(evidence.profile)
    served = "" if abs(speed - 1) < 0.005 else f" at {percent(speed, 0)} of its speed, as the machine served"
    lead = (
        "One knob turned at a time, the others held at the recommended setting; "
        f"simulated with this profile's cost model{served}, "
        f"{swept.requests} requests a point, the same arrivals for all. Hover for latencies."
    )
    notes = [] if swept.complete else ["Cut short to keep this page quick; not every value was simulated."]
    better = _better(evidence, swept)
    if better:
        notes.append(better)
    return Section(KEY, TOPIC, title, lead, tuple(plots), notes=tuple(notes))


def _panel(
    objective: Objective,
    spec: KnobSpec,
    values: list[tuple[float, Score]],
    here: Knobs,
    every: list[float],
    losses: dict[str, float],
) -> Plot:
    """``every``: the figures of all knobs, for one axis."""
    known = [(x, y, score) for x, score in values if (y := objective.figure(score)) is not None]
    xs, ys = [x for x, *_ in known], [y for _, y, _ in known]
    hover = [_hover(objective, spec, x, score) for x, _, score in known]
    chosen = float(getattr(here, spec.name))
    data = [
        line(xs, ys, colour="@measured"),
        dots(xs, ys, hover, colour=["@accent" if x == chosen else "@measured" for x in xs],
             size=[13 if x == chosen else 8 for x in xs], symbol=["star" if x == chosen else "circle" for x in xs], opacity=1),
    ]  # fmt: skip
    found = _costs(objective.measure, losses)
    return Plot(
        f"knob-{spec.name}",
        f"{spec.name}: {found}" if found else spec.name,
        f"{objective.measure.title} against {spec.name} around {chosen:g} {spec.unit}. {found}.",
        [View("", data, _layout(objective.measure, spec, [value for value, _ in values], chosen, every))],
        height=230,
    )


def _layout(measure: Measure, spec: KnobSpec, xs: list[float], chosen: float, ys: list[float]) -> dict[str, Any]:
    title = f"{spec.name} ({spec.unit})"
    x = log_axis(title, xs) if spec.log else axis(title, range=[-0.03 * max(xs), 1.03 * max(xs)], nticks=6)
    named, top = f"{measure.name} ({measure.unit})", max(ys) or 1.0
    y = log_axis(named, ys) if measure.lowest else axis(named, range=[-0.04 * top, 1.12 * top], nticks=5)
    at = math.log10(chosen) if spec.log else chosen
    low, high = (math.log10(min(xs)), math.log10(max(xs))) if spec.log else (min(xs), max(xs))
    share = (at - low) / ((high - low) or 1.0)
    side = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    mark = note(f"chosen: {chosen:,g}", x=at, y=1, yanchor="bottom", xanchor=side,
                font={"color": "@accent", "size": 12})  # fmt: skip
    made = layout(x, y, shapes=[rule(x=chosen, colour="@accent")], annotations=[mark])
    made["margin"] = {**made["margin"], "t": 22}
    return made


def _losses(objective: Objective, spec: KnobSpec, here: Knobs, values: list[tuple[float, Score]]) -> dict[str, float]:
    """What is lost by half and by double; of a knob at 0, by its next value."""
    known = dict(values)
    chosen = float(getattr(here, spec.name))
    base = known.get(chosen)
    if base is None or objective.value(base) <= 0:
        return {}
    if not spec.log:
        others = [v for v in known if v != chosen]
        near = min(others, key=lambda v: abs(v - (10 if chosen != 10 else 0)), default=chosen)
        return {f"{near:g} {spec.unit}": objective.loss(known[near], base)} if others else {}
    wanted = {"half": chosen / 2, "double": chosen * 2}
    return {
        what: objective.loss(known[near], base)
        for what, value in wanted.items()
        if (near := min(known, key=lambda v: abs(v - value))) != chosen and 0.9 < near / value < 1.1
    }


def _step(losses: dict[str, float]) -> str:
    what = max(losses, key=lambda name: losses[name])
    return {"half": "halving it", "double": "doubling it"}.get(what, what)


def _costs(measure: Measure, losses: dict[str, float]) -> str:
    if len(losses) > 1 and all(abs(loss) < _NOTHING for loss in losses.values()):
        return f"{' or '.join(losses)} changes nothing"
    return ", ".join(f"{what} {_cost(measure, loss)}" for what, loss in losses.items())


def _cost(measure: Measure, loss: float) -> str:
    if abs(loss) < _NOTHING:
        return "changes nothing"
    if loss == math.inf:
        return "leaves every request unserved"
    return measure.costs.format(percent(loss, 0)) if loss > 0 else measure.gains.format(percent(-loss, 0))


def _better(evidence: Evidence, swept: Sensitivity) -> str:
    """Said when the simulator thinks that one knob alone could do better: the choice was made by measuring."""
    here, objective = evidence.recommended.knobs.as_dict(), Objective.of(evidence.profile)
    found = [(s, name, value) for name, values in swept.by_knob.items() for value, s in values]
    base = next((s for s, *_ in found if s.setting == here), None)
    best, name, value = max(found, key=lambda one: (objective.value(one[0]), *one[1:]))
    if base is None or objective.value(base) <= 0 or objective.share(best, base) <= _AHEAD:
        return ""
    ahead = objective.measure.ahead.format(f"{name} = {value:,g}", percent(-objective.loss(best, base), 0))
    return (
        f"The simulator puts {ahead}, which was made by measuring: "
        "the difference is within what it gets wrong, or worth trying."
    )


def _hover(objective: Objective, spec: KnobSpec, value: float, score: Score) -> str:
    met = percent(score.attainment, target=required(objective))
    return "<br>".join(
        (
            f"<b>{spec.name} {value:,g} {spec.unit}</b>, simulated",
            f"{reached(objective, score)}, {objective.measure.attained.format(met)}",
            f"p99: TTFT {ms(score.ttft_ms.p99)}, TPOT {ms(score.tpot_ms.p99)}",
        )
    )


def _from_trials(evidence: Evidence, trials: list[MeasuredTrial], nothing: str) -> Section:
    here, objective = evidence.recommended.knobs, Objective.of(evidence.profile)
    measure, enough = objective.measure, len(trials) >= _ENVELOPE
    known = [(t, y) for t in trials if (y := objective.figure(t)) is not None]
    best = max(trials, key=objective.value)
    plots = []
    for spec in KNOBS:
        if len({getattr(t.knobs, spec.name) for t in trials}) < 3:
            continue
        xs, ys = [float(getattr(t.knobs, spec.name)) for t, _ in known], [y for _, y in known]
        hover = [f"{short_setting(t.knobs)}<br>{reached(objective, t)}" for t, _ in known]
        data = [dots(xs, ys, hover, colour="@faint" if enough else "@measured", size=7, opacity=0.6)]
        if enough:
            data.append(line(*_envelope(measure, spec, xs, ys), colour="@measured"))
        chosen = float(getattr(here, spec.name))
        good = [x for x, (t, _) in zip(xs, known, strict=True) if objective.share(t, best) >= _GOOD]
        low, high = min(good), max(good)
        title = f"{spec.name}: within 5% of the best from {low:,g} to {high:,g} {spec.unit}"
        plots.append(
            Plot(
                f"knob-{spec.name}",
                title,
                title,
                [View("", data, _layout(measure, spec, [*xs, chosen], chosen, ys))],
                230,
            )
        )
    how = "simulated" if trials[0].stage == "simulation" else "measured"
    lead = (
        f"Every dot is one of {len(trials)} {how} settings; the other knobs differ from dot to dot, so only the "
        f"{'lower' if measure.lowest else 'upper'} edge"
        f"{' (the line)' if enough else ''} speaks of the knob itself. "
    )
    lead += nothing or (
        "This profile holds no cost model to turn one knob at a time with."
        if evidence.profile.cost_model is None
        else "The load is not to be had here, so one knob at a time could not be simulated."
    )
    title = "Where good settings lie" if plots else TOPIC
    if nothing and plots:
        title = f"At this rate no simulated request {measure.meets}: where good settings lie, by the trials"
    return Section(KEY, TOPIC, title, lead, tuple(plots))


def _envelope(measure: Measure, spec: KnobSpec, xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """The best figure within each of a few equal parts of the range."""
    scale = math.log if spec.log else float
    low, high = min(map(scale, xs)), max(map(scale, xs))
    better = min if measure.lowest else max
    best: dict[int, tuple[float, float]] = {}
    for x, y in zip(xs, ys, strict=True):
        part = min(_BINS - 1, int(_BINS * (scale(x) - low) / ((high - low) or 1.0)))
        best[part] = better(best.get(part, (y, x)), (y, x))
    ordered = [best[part] for part in sorted(best)]
    return [x for _, x in ordered], [y for y, _ in ordered]
