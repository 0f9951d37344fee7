"""The picture of ``docs/when-tuning-pays.md``: an SVG, made by hand since plotly needs a browser for one."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.when_tuning_pays.play import ADMISSION, BOTH, CONTROLLER, DEFAULTS, SETTING, Found

_DOTS: Final[Mapping[str, tuple[str, float]]] = {
    DEFAULTS: ("#6e7781", 6.2), ADMISSION: ("#d4a72c", 5.4), SETTING: ("#0969da", 4.6), BOTH: ("#1a7f37", 3.8),
    CONTROLLER: ("#cf222e", 2.6),
}  # fmt: skip
"""Colour and radius of each part; the smaller ones lie on top, so that equal ones are rings."""

_LEFT, _PANEL, _GAP, _ROW, _TOP = 250, 260, 30, 17, 64
_CHARACTER: Final = 6.0  # its width, about


def drawing(found: Sequence[Found]) -> str:
    """A row for each cell, a panel for each load, and a dot for each part at its share of requests within the SLO."""
    loads = list(found[0].loads) if found else []
    width, height = _LEFT + len(loads) * (_PANEL + _GAP), _TOP + _ROW * len(found) + 34
    means = "; ".join(
        f"at {load} of capacity "
        + ", ".join(f"{part} {statistics.fmean(one.loads[load].mean(part) for one in found):.0%}" for part in _DOTS)
        for load in loads
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="11" fill="#1f2328">',
        "<title>Requests within the SLO, by GPU, requests and SLO</title>",
        f"<desc>{html.escape(f'Means over all rows: {means}.')}</desc>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
    ]
    for number, load in enumerate(loads):
        parts += _panel(found, load, _LEFT + number * (_PANEL + _GAP), height - 30)
    title = ""
    for number, one in enumerate(found):
        y = _TOP + _ROW * number + 4
        if one.cell.title != title:
            title = one.cell.title
            parts.append(f'<path d="M6 {y - 13}H{width - _GAP}" stroke="#d1d9e0" stroke-width="0.7"/>')
            parts.append(f'<text x="6" y="{y}" font-weight="bold">{html.escape(title)}</text>')
        label = f"{one.cell.workload}, {one.cell.slo_name}"
        parts.append(f'<text x="{_LEFT - 14}" y="{y}" text-anchor="end">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], 14.0
    for part, (colour, radius) in _DOTS.items():
        name = "best setting with order and admission" if part == BOTH else part
        parts.append(
            f'<circle cx="{x:g}" cy="16" r="{radius}" fill="{colour}"/><text x="{x + 10:g}" y="20">{name}</text>'
        )
        x += _CHARACTER * len(name) + 34
    return parts


def _panel(found: Sequence[Found], load: str, left: int, bottom: int) -> list[str]:
    parts = [f'<text x="{left}" y="{_TOP - 24}" font-weight="bold">{load} of capacity: % within the SLO</text>']
    for tick in range(0, 101, 20):
        x = left + _PANEL * tick / 100
        parts.append(f'<path d="M{x:g} {_TOP - 12}V{bottom}" stroke="#e4e8ec"/>')
        parts.append(f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle" fill="#59636e">{tick}</text>')
    for number, one in enumerate(found):
        y = _TOP + _ROW * number
        at = {part: left + _PANEL * one.loads[load].mean(part) for part in _DOTS}
        ends = f"M{min(at.values()):.1f} {y}H{max(at.values()):.1f}"
        parts.append(f'<path d="{ends}" stroke="#8c959f" stroke-width="1.2"/>')
        for part, (colour, radius) in _DOTS.items():
            parts.append(f'<circle cx="{at[part]:.1f}" cy="{y}" r="{radius}" fill="{colour}"/>')
    return parts
