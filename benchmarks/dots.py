"""A picture of rows of dots, as an SVG made by hand, since plotly needs a browser for one.

A row for each thing compared, a panel for each way to compare it, and a dot for each series, joined by a line.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

SERIES: Final = (("#6e7781", 6.2), ("#d4a72c", 5.4), ("#0969da", 4.6), ("#1a7f37", 3.8), ("#cf222e", 2.6))
"""Colour and radius of each series in turn; the smaller ones lie on top, so that equal ones are rings."""

_PANEL, _GAP, _ROW, _TOP = 260, 30, 17, 64
_CHARACTER: Final = 6.0  # its width, about


class Panel(NamedTuple):
    """One scale: its title, where its axis begins and ends, the distance of its ticks, and a value to mark, or nan."""

    title: str
    low: float
    high: float
    tick: float
    mark: float = math.nan

    def x(self, value: float) -> float:
        """Where ``value`` lies, in pixels from the panel's left; at an end where it lies outside."""
        return _PANEL * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> Iterator[float]:
        for number in range(round((self.high - self.low) / self.tick) + 1):
            yield self.low + number * self.tick


def panels_of(values: Iterable[float], titles: Iterable[str], mark: float) -> list[Panel]:
    """Panels of one scale that holds ``values`` and ``mark``, of whole tenths: at most a dozen ticks, a darker one at ``mark``.
    What is no finite number is left out."""
    known = [value for value in values if math.isfinite(value)] + [mark]
    low, high = math.floor(10 * min(known) - 1e-9), math.ceil(10 * max(known) + 1e-9)
    tick = math.ceil((high - low) / 12)
    low, high = low // tick * tick, -(-high // tick) * tick
    return [Panel(title, low / 10, high / 10, tick / 10, mark) for title in titles]


class Row(NamedTuple):
    """What is drawn in one line: for each panel the value of each series; one that is absent or not finite is not drawn.

    ``heading`` stands in bold beside the first of the rows that share it.
    """

    label: str
    values: Sequence[Mapping[str, float]]
    heading: str = ""


def drawing(
    rows: Sequence[Row],
    panels: Sequence[Panel],
    series: Mapping[str, str],
    *,
    title: str,
    description: str,
    left: int,
    across: int = 0,
) -> str:
    """The file's text. ``series``: what the legend calls each, at most as many as :data:`SERIES`; ``left``: pixels for labels;
    ``across``: how many panels stand side by side, above the next ones with the same rows; 0: all of them."""
    across = across or max(1, len(panels))
    lines, deep = -(-len(panels) // across), _TOP + _ROW * len(rows) + 4
    width, height = left + min(across, len(panels)) * (_PANEL + _GAP), lines * deep + 30
    looks = dict(zip(series, SERIES, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="11" fill="#1f2328">',
        f"<title>{html.escape(title)}</title>",
        f"<desc>{html.escape(description)}</desc>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(series),
    ]
    for number, panel in enumerate(panels):
        line, place = divmod(number, across)
        parts += _axis(panel, left + place * (_PANEL + _GAP), _TOP + line * deep, (line + 1) * deep)
    for line in range(lines):
        heading = ""
        for number, row in enumerate(rows):
            y = _TOP + line * deep + _ROW * number
            if row.heading != heading:
                heading = row.heading
                parts.append(f'<path d="M6 {y - 9}H{width - _GAP}" stroke="#d1d9e0" stroke-width="0.7"/>')
                parts.append(f'<text x="6" y="{y + 4}" font-weight="bold">{html.escape(heading)}</text>')
            parts.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{html.escape(row.label)}</text>')
            of_line = slice(line * across, (line + 1) * across)
            for place, (panel, values) in enumerate(zip(panels[of_line], row.values[of_line], strict=True)):
                start = left + place * (_PANEL + _GAP)
                parts += _dots({s: start + panel.x(v) for s, v in values.items() if math.isfinite(v)}, y, looks)
    return "\n".join([*parts, "</svg>", ""])


def _legend(series: Mapping[str, str]) -> list[str]:
    parts, x = [], 14.0
    for (colour, radius), name in zip(SERIES, series.values(), strict=False):
        parts.append(
            f'<circle cx="{x:g}" cy="16" r="{radius}" fill="{colour}"/><text x="{x + 10:g}" y="20">{html.escape(name)}</text>'
        )
        x += _CHARACTER * len(name) + 34
    return parts


def _axis(panel: Panel, left: int, top: int, bottom: int) -> list[str]:
    parts = [f'<text x="{left}" y="{top - 24}" font-weight="bold">{html.escape(panel.title)}</text>']
    for tick in panel.ticks:
        x = left + panel.x(tick)
        colour = "#59636e" if abs(tick - panel.mark) < panel.tick / 2 else "#e4e8ec"
        parts.append(f'<path d="M{x:.1f} {top - 12}V{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#59636e">{tick:.3g}</text>')
    return parts


def _dots(at: Mapping[str, float], y: int, looks: Mapping[str, tuple[str, float]]) -> list[str]:
    if not at:
        return []
    parts = [f'<path d="M{min(at.values()):.1f} {y}H{max(at.values()):.1f}" stroke="#8c959f" stroke-width="1.2"/>']
    for one, (colour, radius) in looks.items():
        if one in at:
            parts.append(f'<circle cx="{at[one]:.1f}" cy="{y}" r="{radius}" fill="{colour}"/>')
    return parts
