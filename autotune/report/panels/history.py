"""How the search went: the best so far over the trials, and what failed."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

from autotune.profiling.objective import Objective
from autotune.profiling.points import Stage
from autotune.report.evidence import Evidence, MeasuredTrial
from autotune.report.figure import Label, Plot, Trace, View, axis, dots, layout, line, log_axis, plain
from autotune.report.section import Section, Table, absent
from autotune.report.wording import STAGES, cut, defaults, listed, number, percent, reached, required, short_setting

KEY, TOPIC = "history", "The search"
_NEAR = 0.99


def section(evidence: Evidence) -> Section:
    stages: tuple[Stage, ...] = ("simulation", "search")
    found = [(stage, trials) for stage in stages if len(trials := _tried(evidence, stage)) > 1]
    if not found:
        return absent(
            KEY, TOPIC, "The trials are not in this profile: they are in the file of raw runs, which is not here."
        )
    trials, objective = found[0][1], Objective.of(evidence.profile)
    plots = tuple(
        _plot(evidence, stage, tried, len(found) > 1)
        for stage, tried in found
        if any(objective.figure(t) is not None for t in tried)
    )
    measure, best = objective.measure, max(trials, key=objective.value)
    if objective.value(best) > 0:
        first = next(n for n, t in enumerate(trials) if objective.share(t, best) >= _NEAR)
        title = f"Within 1% of its best after {first + 1} of {len(trials)} trials"
    else:
        title = f"No request {measure.met} in any of {len(trials)} trials"
    counts = listed(f"{len(t)} {'trials simulated' if s == 'simulation' else 'settings measured'}" for s, t in found)
    edge = "top" if measure.lowest else "bottom"
    crosses = f"; crosses at the {edge} are trials that failed" if evidence.failures else ""
    lead = f"{counts}. The line is the {measure.best} found so far{crosses}."
    causes = _causes(evidence)
    tables = (causes,) if causes is not None else ()
    notes = () if evidence.failures or evidence.lacking else ("No trial failed.",)
    return Section(KEY, TOPIC, title, lead, plots, tables, notes)


def _tried(evidence: Evidence, stage: Stage) -> list[MeasuredTrial]:
    """In the order they were tried; without a sidecar, simulated ones are only the best few, which is no history."""
    if stage == "simulation" and not any(r.stage == stage for r in evidence.runs):
        return []
    return evidence.trials(stage)


def _plot(evidence: Evidence, stage: Stage, tried: list[MeasuredTrial], titled: bool) -> Plot:
    owners, objective = defaults(evidence), Objective.of(evidence.profile)
    measure = objective.measure
    known = [(n, t, y) for n, t in enumerate(tried) if (y := objective.figure(t)) is not None]
    count = [t.number if t.number >= 0 else n for n, t, _ in known]
    trials, ys = [t for _, t, _ in known], [y for *_, y in known]
    best = [*accumulate(ys, min if measure.lowest else max)]
    marks = [n for n, t in enumerate(trials) if t.knobs in owners]
    plain_ = [n for n in range(len(trials)) if n not in set(marks)]
    hover = [_hover(objective, t, n, owners.get(t.knobs, "")) for t, n in zip(trials, count, strict=True)]
    data = [
        line(count, best, colour="@accent", line={"shape": "hv"}),
        _dots(plain_, count, ys, hover, colour="@faint", size=6, opacity=0.6),
        _dots(marks, count, ys, hover, colour="@baseline", symbol="square", size=8),
    ]
    failed = [f for f in evidence.failures if f.stage == stage and f.trial >= 0]
    if failed:
        why = [f"trial {f.trial} failed<br>{plain(cut(f.cause, 90))}" for f in failed]
        at = max(ys) if measure.lowest else 0.0
        data.append(dots([f.trial for f in failed], [at] * len(failed), why, colour="@bad", symbol="x", size=9))
    top = max(best) or 1.0
    right = max([*count, *(f.trial for f in failed)])
    how = "simulated" if stage == "simulation" else "measured"
    labels = [Label(count[-1], best[-1], f"best {number(best[-1])} {measure.unit}", "@accent", True)]
    labels += [
        Label(count[n], ys[n], owner, "@baseline")
        for owner, n in {owners[trials[n].knobs]: n for n in reversed(marks)}.items()
    ]
    x = axis(f"trial ({how})", range=[-0.03 * right - 0.5, 1.03 * right + 0.5], nticks=8)
    named = f"{measure.name} ({measure.unit})"
    up = log_axis(named, ys) if measure.lowest else axis(named, range=[-0.06 * top, 1.15 * top], nticks=6)
    what, said = measure.best[:1].upper() + measure.best[1:], measure.of_best.format(number(best[-1]))
    summary = f"{what} over {len(tried)} trials, {STAGES[stage]}: {said}."
    return Plot(
        f"history-{stage}",
        f"{len(tried)} {how}" if titled else "",
        summary,
        [View("", data, layout(x, up), labels)],
        300,
    )


def _dots(which: list[int], xs: list[int], ys: list[float], hover: list[str], **marker: Any) -> Trace:
    return dots([xs[n] for n in which], [ys[n] for n in which], [hover[n] for n in which], **marker)


def _hover(objective: Objective, trial: MeasuredTrial, number_: int, owner: str) -> str:
    head = f"<b>trial {number_}</b>" + (f", {plain(owner)}" if owner else "")
    met = percent(trial.attainment, target=required(objective))
    return "<br>".join(
        (
            head,
            short_setting(trial.knobs),
            f"{reached(objective, trial)}, {objective.measure.attained.format(met)}",
        )
    )


def _causes(evidence: Evidence) -> Table | None:
    if not evidence.failures:
        return None
    causes = Counter(f.cause for f in evidence.failures)
    trials = {
        cause: [
            str(f.trial) if f.trial >= 0 else STAGES.get(f.stage, f.stage)
            for f in evidence.failures
            if f.cause == cause
        ]
        for cause in causes
    }
    rows = [
        (str(count), cause, ", ".join(trials[cause][:8]) + (" …" if count > 8 else ""))
        for cause, count in causes.most_common()
    ]
    return Table(("failed", "cause", "trial"), rows, frozenset({0}), title="Failed trials")
