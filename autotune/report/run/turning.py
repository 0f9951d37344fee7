"""The knobs over time, under bands of what limited, and every decision in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from autotune.control.decision_log import Decision, describe
from autotune.control.explain import summarize
from autotune.report.figure import Plot, View, axis, dots, layout, line, log_axis, plain
from autotune.report.run.story import Run
from autotune.report.section import Section, Table
from autotune.report.wording import listed, number, percent
from runtime.knobs import KNOBS, KnobSpec

_FOLDED = 40  # decisions beyond which their table is shut at first
_ROWS = 2000  # decisions in their table
_DRAWN = 2000  # changes in a plot, at most: four of each stretch of time


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
    if any(len(_changes(run, spec)) > _DRAWN for spec in KNOBS):
        lead += " Where changes are many, the first, the last, the least and the greatest of each stretch of time are drawn."
    return Section("knobs", "Knobs", title, lead if plots else "", plots)


def _times(turned: Mapping[str, int]) -> str:
    return listed([f"{name} {'once' if count == 1 else f'{count} times'}" for name, count in turned.items() if count])


def _plot(run: Run, spec: KnobSpec) -> Plot:
    times, values, why, at, there = [0.0], [run.decisions[0].old[spec.name]], [], [], []
    changes = _changes(run, spec)
    for decision in _outline(changes, spec.name):
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
    summary = f"{spec.name} from {values[0]:g} to {values[-1]:g} in {len(changes)} changes."
    return Plot(f"knob-{spec.name}", spec.name, summary, [View("", data, layout(axis("s"), y))], 240)


def _changes(run: Run, spec: KnobSpec) -> list[Decision]:
    name = spec.name
    return [d for d in run.decisions if d.action != "observe" and d.old[name] != d.new[name]]


def _outline(changes: Sequence[Decision], name: str) -> list[Decision]:
    """Those that draw the same line as all ``changes`` do: more lie on one another."""
    if len(changes) <= _DRAWN:
        return list(changes)
    width = max((changes[-1].at - changes[0].at) / (_DRAWN // 4 - 1), 1e-9)
    shown: list[int] = []
    for _, stretch in groupby(range(len(changes)), lambda i: int((changes[i].at - changes[0].at) / width)):
        some = list(stretch)
        low, high = (of(some, key=lambda i: changes[i].new[name]) for of in (min, max))
        shown += sorted({some[0], low, high, some[-1]})
    return [changes[i] for i in shown]


def regimes(run: Run) -> Section:
    """How long each thing limited."""
    spent = summarize(run.decisions).seconds
    total = sum(spent.values())
    if total <= 0:
        return Section(
            "regimes", "What limited", "What limited", absent="The run was over before anything could limit it."
        )
    most = max(spent, key=lambda name: spent[name])
    shares = {name: percent(round(seconds / total, 3)) for name, seconds in spent.items()}
    rows = [[name, number(seconds), shares[name]] for name, seconds in sorted(spent.items(), key=_longest)]
    said = {d.regime: d.cause for d in run.decisions if d.regime}
    for row in rows:
        row.append(said.get(row[0], ""))
    table = Table(("regime", "s", "share", "last said"), rows, numeric=frozenset({1, 2}))
    return Section("regimes", "What limited", f"Mostly {most}: {shares[most]} of the time", tables=(table,))


def _longest(item: tuple[str, float]) -> float:
    return -item[1]


def decisions(run: Run) -> Section:
    """All of them in words, or the latest if they are too many for a browser."""
    shown = run.decisions[-_ROWS:]
    rows = [[number(d.at - run.start, 4), d.action, *describe(d), _evidence(d)] for d in shown]
    counts = Counter(d.action for d in run.decisions)
    table = Table(
        ("s", "action", "what", "why", "evidence"),
        rows,
        numeric=frozenset({0}),
        title=f"{len(rows)} decisions" if len(rows) == counts.total() else _latest(len(rows), counts.total()),
        folded=len(rows) > _FOLDED,
    )
    title = listed(f"{count} {action}" for action, count in counts.most_common())
    return Section("decisions", "Decisions", title, tables=(table,))


def _latest(shown: int, of: int) -> str:
    return (
        f"the latest {shown} of {of} decisions; the other {of - shown} are left out here, and autotune explain has all"
    )


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
