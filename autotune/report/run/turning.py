"""The knobs over time, under bands of what limited, and every decision in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autotune.control.decision_log import Decision, describe
from autotune.control.explain import summarize
from autotune.report.figure import Plot, View, axis, dots, layout, line, log_axis, plain
from autotune.report.run.story import Run
from autotune.report.section import Section, Table
from autotune.report.wording import listed, number, percent
from runtime.knobs import KNOBS, KnobSpec

_FOLDED = 40  # decisions beyond which their table is shut at first


def knobs(run: Run) -> Section:
    """One plot a knob: its value from decision to decision."""
    found = summarize(run.decisions)
    by_hand, restored = (
        Counter(name for d in run.decisions if d.action == action for name, _, _ in d.changes)
        for action in ("pause", "kill")
    )
    turned = {name: count - by_hand[name] - restored[name] for name, (count, _, _) in found.changes.items()}
    title = f"The controller changed {_times(turned)}" if any(turned.values()) else "The controller changed no knob"
    if by_hand:
        title += f"; its operator by hand {_times(by_hand)}"
    if restored:
        title += "; the knobs from before it were restored"
    lead = "Each knob from decision to decision; hover over a dot to read why."
    if found.would_change:
        title = f"The controller would have changed knobs {found.would_change} times, and was only allowed to watch"
    plots = tuple(_plot(run, spec) for spec in KNOBS if spec.name in found.changes)
    return Section("knobs", "Knobs", title, lead if plots else "", plots)


def _times(turned: Mapping[str, int]) -> str:
    return listed([f"{name} {'once' if count == 1 else f'{count} times'}" for name, count in turned.items() if count])


def _plot(run: Run, spec: KnobSpec) -> Plot:
    times, values, why, at, there = [0.0], [run.decisions[0].old[spec.name]], [], [], []
    for decision in run.decisions:
        if decision.action == "observe" or decision.old[spec.name] == decision.new[spec.name]:
            continue
        seconds = decision.at - run.start
        times += [seconds, seconds]
        values += [values[-1], decision.new[spec.name]]
        at.append(seconds)
        there.append(decision.new[spec.name])
        why.append(plain(f"{number(seconds)} s: {describe(decision)[1]}"))
    times.append(run.end - run.start)
    values.append(values[-1])
    data = [line(times, values, colour="@accent"), dots(at, there, why, colour="@accent", size=7)]
    unit = f"{spec.name} ({spec.unit})"
    y = log_axis(unit, values) if spec.log else axis(unit, rangemode="tozero")
    summary = f"{spec.name} from {values[0]:g} to {values[-1]:g} in {len(at)} changes."
    return Plot(f"knob-{spec.name}", spec.name, summary, [View("", data, layout(axis("s"), y))], 240)


def regimes(run: Run) -> Section:
    """How long each thing limited."""
    spent = summarize(run.decisions).seconds
    total = sum(spent.values())
    if total <= 0:
        return Section(
            "regimes", "What limited", "What limited", absent="The run was over before anything could limit it."
        )
    most = max(spent, key=lambda name: spent[name])
    rows = [[name, number(seconds), percent(seconds / total)] for name, seconds in sorted(spent.items(), key=_longest)]
    said = {d.regime: d.cause for d in run.decisions if d.regime}
    for row in rows:
        row.append(said.get(row[0], ""))
    table = Table(("regime", "s", "share", "last said"), rows, numeric=frozenset({1, 2}))
    return Section(
        "regimes", "What limited", f"Mostly {most}: {percent(spent[most] / total)} of the time", tables=(table,)
    )


def _longest(item: tuple[str, float]) -> float:
    return -item[1]


def decisions(run: Run) -> Section:
    """All of them, in words."""
    rows = [[number(d.at - run.start, 4), d.action, *describe(d), _evidence(d)] for d in run.decisions]
    counts = Counter(d.action for d in run.decisions)
    table = Table(
        ("s", "action", "what", "why", "evidence"),
        rows,
        numeric=frozenset({0}),
        title=f"{len(rows)} decisions",
        folded=len(rows) > _FOLDED,
    )
    title = listed(f"{count} {action}" for action, count in counts.most_common())
    return Section("decisions", "Decisions", title, tables=(table,))


def _evidence(decision: Decision) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in decision.evidence.items())


def _value(value: object) -> str:
    """What JSON may hold, for people: ``default ttft=500ms, batch e2e=60s``; ``none``; ``yes``."""
    if isinstance(value, Mapping):
        return f"({'; '.join(f'{name} {_value(one)}' for name, one in value.items())})"
    if isinstance(value, list | tuple):
        return f"({'; '.join(map(_value, value))})"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
