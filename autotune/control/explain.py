"""A decision log as text: one line a decision, and a summary that says where goodput went."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from autotune.control.decision_log import SHORT, Decision, stated_slos, worded
from autotune.control.tally import ClassTally, losses
from runtime.errors import InputError

_INDENT = " " * 14
_FLIPS = 3  # between regimes that are shown together
_NARROWEST = 40  # columns of a reason


def timeline(
    decisions: Iterable[Decision],
    *,
    knobs: Collection[str] = (),
    dates: bool = True,
    width: int | None = None,
    fold: bool = False,
) -> Iterator[str]:
    """The lines of a log: local time (or seconds on the engine's clock, where the wall clock was not logged), what, why.

    ``knobs``: only the decisions that change one of these, and only those changes. ``dates``: a line wherever
    a new day begins. ``width``: columns that a line may take, the reason folded to its column; None for any number. ``fold``:
    three and more regimes in a row that changed no knob are one line.
    """
    day = ""
    for decision in _folded(decisions) if fold else decisions:
        if knobs and not any(name in knobs for name, _, _ in decision.changes):
            continue
        date, time = _when(decision)
        if dates and date != day:
            day = date
            yield date
        what, why = worded(decision, knobs)
        lines = [why]
        if width is not None:
            lines = textwrap.wrap(why, max(_NARROWEST, width - len(f"{time}  {what[0]:<25}  ")), break_on_hyphens=False)
        for index, (left, right) in enumerate(zip_longest(what, lines, fillvalue="")):
            yield f"{_INDENT if index else f'{time}  '}{left:<25}  {right}".rstrip()


def _folded(decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Flips between regimes as one decision, if there are several."""
    for idle, group in groupby(decisions, key=lambda decision: decision.action == "hold"):
        run = list(group)
        if not idle or len(run) < _FLIPS:
            yield from run
            continue
        regimes = " and ".join(dict.fromkeys(decision.regime for decision in run))
        first, last = run[0], run[-1]
        yield first._replace(
            action=f"hold × {len(run)}",
            cause=f"{regimes} by turns for {_between(first, last):.1f} s, which changed no knob; at last: {last.cause}",
            regime=last.regime,
        )


@dataclass
class Summary:
    """``changes``: for each knob how often it was changed, its first and its last value. ``seconds``: time per regime.
    ``outcomes``: how the requests of each class ended, as far as the log tells; ``open``: runs of which it does
    not, for they have not ended, or were cut off; ``last_open``: whether the last run is one of these. ``targets``: the
    attainment that each class was to have, as last said."""

    outcomes: dict[str, ClassTally] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    open: int = 0
    last_open: bool = False
    changes: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    would_change: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        changed = ", ".join(
            f"{SHORT[name]} {count} ({first:.10g} → {last:.10g})" for name, (count, first, last) in self.changes.items()
        )
        yield f"changes   {changed or 'none'}"
        if self.would_change:
            yield f"would     have changed knobs {self.would_change} times"
        total = sum(self.seconds.values())
        if total > 0:
            spent = (f"{name} {seconds:.1f} s ({seconds / total:.0%})" for name, seconds in self.seconds.items())
            yield f"regimes   {', '.join(spent)}"
        yield from losses(self.outcomes, self.targets)

    def add_last(self, ended: Mapping[str, ClassTally]) -> None:
        """The requests of the last run, which is open, are known from elsewhere."""
        self.open, self.last_open = self.open - 1, False
        _add(self.outcomes, ended)


def summarize(decisions: Iterable[Decision], *, knobs: Collection[str] = ()) -> Summary:
    """What a log came to. A run that was cut off counts up to its last decision; time under an operator's pause is apart."""
    found = Summary()
    state, before = "", None
    for decision in decisions:
        if decision.action == "attach":
            found.open, found.last_open = found.open + found.last_open, True
        elif decision.action == "detach":
            found.last_open = False
            _add(found.outcomes, _outcomes(decision))
        elif before is None:  # the beginning of the log is missing
            found.last_open = True
        found.targets |= {name: slo.attainment for name, slo in stated_slos(decision).items()}
        if state and before is not None and decision.action != "attach":
            found.seconds[state] = found.seconds.get(state, 0.0) + _between(before, decision)
        for name, old, new in decision.changes:
            if knobs and name not in knobs:
                continue
            if decision.action == "observe":
                found.would_change += 1
            else:
                count, first, _ = found.changes.get(name, (0, old, old))
                found.changes[name] = (count + 1, first, new)
        state = _state(decision, state)
        before = decision
    found.open += found.last_open
    return found


def _outcomes(decision: Decision) -> dict[str, ClassTally]:
    given = decision.evidence.get("outcomes", {})
    if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
        raise InputError(
            f"the outcomes of the {decision.action} at {decision.at:g} s are {given!r:.40}; they must be by class"
        )
    return {name: ClassTally.of(one) for name, one in given.items()}


def _add(outcomes: dict[str, ClassTally], ended: Mapping[str, ClassTally]) -> None:
    for name, one in ended.items():
        outcomes[name] = outcomes[name] + one if name in outcomes else one


def _state(decision: Decision, before: str) -> str:
    if decision.action == "note":
        return before
    if decision.action in ("detach", "kill"):
        return ""
    if decision.action == "pause":
        return "paused"
    if decision.action in ("attach", "resume"):
        return decision.regime or "learning"
    return decision.regime or before


def _between(earlier: Decision, later: Decision) -> float:
    """Seconds, both in one run: by the engine's clock, which nobody sets."""
    return max(0.0, later.at - earlier.at)


def _when(decision: Decision) -> tuple[str, str]:
    """(day, time of day), or nothing and the seconds on the engine's clock."""
    if (wall := decision.local_time) is not None:
        return f"{wall:%Y-%m-%d}", f"{wall:%H:%M:%S}.{wall.microsecond // 1000:03d}"
    return "", f"{decision.at:10.3f} s"


__all__ = ["Summary", "summarize", "timeline"]
