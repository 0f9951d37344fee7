"""Tables for people: how full a form of one a terminal has room for, and the columns of the knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from io import StringIO
from itertools import zip_longest
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.profile.parts import ClassPoint, Point
from runtime.knobs import KNOBS, Knobs
from runtime.slo import SLO, RequestClass, in_percent, share_met

SHORTER = {spec.name: spec.short for spec in KNOBS} | {"max_batch_size": "batch"}
"""Titles of the knobs where not even their short ones find room."""

_BOUNDLESS = 100_000  # columns of a terminal that cuts nothing


class Detail(IntEnum):
    """How much of a table is shown, from all of it to what cannot be done without."""

    ALL = 0  # two blanks between columns
    ALL_CLOSE = 1  # one
    MAIN = 2  # without the columns that tell the least
    MAIN_CLOSE = 3
    SHORT = 4  # the same under shorter titles
    BARE = 5  # without intervals
    BAREST = 6

    @property
    def gap(self) -> int:
        """Blanks between columns."""
        return 2 if self in (Detail.ALL, Detail.MAIN) else 1


def fullest(draw: Callable[[Detail], Table], width: int) -> Table:
    """What ``draw`` makes in the most detail that takes no more than ``width`` columns; the barest where none does."""
    for detail in Detail:
        drawn = draw(detail)
        if columns(drawn) <= width:
            break
    return drawn


def columns(drawn: Table) -> int:
    """How wide a terminal must be to show all of ``drawn``."""
    return Console(width=_BOUNDLESS, file=StringIO()).measure(drawn).maximum


def empty_table(detail: Detail) -> Table:
    """Without columns yet: no lines, only blanks between them."""
    return Table(box=None, pad_edge=False, padding=(0, detail.gap, 0, 0), header_style="bold")


def setting_table(titles: Iterable[str], detail: Detail) -> Table:
    """Without rows yet: a label, the knobs that every setting has, a bar, then figures under ``titles``."""
    drawn = empty_table(detail)
    short = detail >= Detail.SHORT
    drawn.add_column("", no_wrap=True)
    for spec in (spec for spec in KNOBS if spec.required):
        drawn.add_column(SHORTER[spec.name] if short else spec.short, justify="right", no_wrap=True)
    if not short:
        drawn.add_column("│", no_wrap=True)
    for title in titles:
        drawn.add_column(title, justify="right", no_wrap=True)
    return drawn


def setting_cells(label: str, knobs: Knobs, detail: Detail) -> list[str]:
    """What stands left of the figures in a row of :func:`setting_table`: no room is kept for knobs that few turn, they stand
    under the label of a setting that does."""
    values = (f"{getattr(knobs, spec.name):g}" for spec in KNOBS if spec.required)
    return ["\n".join([label, *turned(knobs)]), *values, *([] if detail >= Detail.SHORT else ["│"])]


class ClassRow(NamedTuple):
    """How the class ``name`` fared at a point, and the SLO it is judged by."""

    label: str
    point: Point
    name: str
    seen: ClassPoint
    slo: SLO

    @property
    def missed(self) -> bool:
        """Whether its attainment is below that of its SLO."""
        return self.seen.offered > 0 and share_met(self.seen) < self.slo.attainment


def class_rows(rows: Iterable[tuple[str, Point]], slo: SLO, classes: Iterable[RequestClass]) -> list[ClassRow]:
    """Each class of each (label, point); ``slo`` is that of requests of no class of their own."""
    own = {one.name: one.slo for one in classes}
    return [
        ClassRow(label, point, name, seen, own.get(name, slo))
        for label, point in rows
        for name, seen in point.classes.items()
    ]


def class_table(rows: Iterable[tuple[str, Point]], slo: SLO, classes: Iterable[RequestClass]) -> Table | None:
    """How each class fared under each setting, by its own SLO; None where no point tells classes apart."""
    drawn = empty_table(Detail.ALL)
    for title in ("setting", "class"):
        drawn.add_column(title, no_wrap=True)
    for title in ("attainment", "target", "of", "weight", "tok/s", "TTFT p99", "TPOT p99", "E2E p99"):
        drawn.add_column(title, justify="right", no_wrap=True)
    last: Point | None = None
    for row in class_rows(rows, slo, classes):
        seen = row.seen
        cells = (
            "" if row.point is last else row.label, row.name,
            in_percent(share_met(seen), target=row.slo.attainment) if seen.offered else "–", f"{row.slo.attainment * 100:g}%",
            f"{seen.offered}",
            f"{seen.weight:g}", f"{seen.throughput:.0f}",
            *(latency(ms) for ms in (seen.ttft_p99_ms, seen.tpot_p99_ms, seen.e2e_p99_ms)),
        )  # fmt: skip
        styles = ("", "", "yellow" if row.missed else "")
        drawn.add_row(*(Text(cell, style=style) for cell, style in zip_longest(cells, styles, fillvalue="")))
        last = row.point
    return drawn if last is not None else None


def turned(knobs: Knobs) -> list[str]:
    """``name value`` of the knobs that not every setting has and that are not at their default."""
    return [f"{spec.short} {getattr(knobs, spec.name):g}" for spec in knobs.shown if not spec.required]


def latency(ms: float | None) -> str:
    """Milliseconds for people: 9.8 ms, 217 ms, 18.91 s."""
    if ms is None:
        return "–"
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
