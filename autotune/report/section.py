"""What a page is made of: sections with a finding for a title, plots, tables, and a sentence where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.report.figure import Plot


@dataclass(frozen=True)
class Table:
    """``numeric``: columns aligned to the right; ``marked``: rows that stand out; ``folded``: shut at first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    title: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """``key``: its anchor; ``topic``: what it is about, small above ``title``, the finding. ``absent``: why it shows nothing."""

    key: str
    topic: str
    title: str
    lead: str = ""
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = field(default=())
    absent: str | None = None


def absent(key: str, topic: str, why: str) -> Section:
    """A section a profile has nothing for. ``why`` is one sentence."""
    return Section(key, topic, topic, absent=why)
