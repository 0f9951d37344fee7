"""The picture of ``docs/when-tuning-pays.md``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks import dots
from benchmarks.dots import Panel, Row
from benchmarks.when_tuning_pays.play import ADMISSION, BOTH, CONTROLLER, DEFAULTS, SETTING, Found

_DRAWN: Final = (DEFAULTS, ADMISSION, SETTING, BOTH, CONTROLLER)


def drawing(found: Sequence[Found]) -> str:
    """A row for each cell, a panel for each load, and a dot for each part at its share of requests within the SLO."""
    loads = list(found[0].loads) if found else []
    means = "; ".join(
        f"at {load} of capacity "
        + ", ".join(f"{part} {statistics.fmean(one.loads[load].mean(part) for one in found):.0%}" for part in _DRAWN)
        for load in loads
    )
    rows = [
        Row(
            f"{one.cell.workload}, {one.cell.slo_name}",
            [{part: 100 * one.loads[load].mean(part) for part in _DRAWN} for load in loads],
            one.cell.title,
        )
        for one in found
    ]
    return dots.drawing(
        rows,
        [Panel(f"{load} of capacity: % within the SLO", 0, 100, 20) for load in loads],
        {part: "best setting with order and admission" if part == BOTH else part for part in _DRAWN},
        title="Requests within the SLO, by GPU, requests and SLO",
        description=f"Means over all rows: {means}.",
        left=250,
    )
