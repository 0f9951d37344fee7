"""What came of both classes: the table for people, and the JSON line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from autotune.bench import Estimate
from autotune.measure.score import Score
from benchmarks.classes.loads import BATCH, CHAT
from benchmarks.live.ratios import interval, number

LOSS: Final = 0.01
"""Of its attainment, that chat may lose at most."""
LEAST: Final = 0.85
"""Of what is left, that batch must get."""


class Measured(NamedTuple):
    """One seed of one contender: chat's attainment alone and beside batch, and batch tokens as a share of what is left."""

    alone: float
    beside: float
    batch_share: float
    goodput: float

    @classmethod
    def of(cls, alone: Score, beside: Score, left: float) -> Measured:
        """``left``: output tokens/s."""
        return cls(
            alone.classes[CHAT].attainment, beside.classes[CHAT].attainment,
            beside.classes[BATCH].throughput / left, beside.goodput,
        )  # fmt: skip


class Row(NamedTuple):
    """One contender on one machine under one load: its seeds, what chat gains beside batch, and batch's share of what is left."""

    machine: str
    share: float
    name: str
    runs: tuple[Measured, ...]
    difference: Estimate
    batch_share: Estimate

    @property
    def met(self) -> bool:
        return self.difference.value >= -LOSS and self.batch_share.value >= LEAST


def mean(values: Sequence[float]) -> Estimate:
    """Without an interval."""
    return Estimate(statistics.fmean(values), math.nan, math.nan)


HEAD: Final = (
    f"{'':<6}{'chat':>6}  {'contender':<10}{'chat alone':>12}{'beside':>9}{'difference':>12}"
    f"{'batch/left':>12}{'goodput':>9}"
)


def line(row: Row) -> str:
    """Under :data:`HEAD`; 95% intervals behind it, where there are any."""
    alone, beside, _, goodput = (statistics.fmean(column) for column in zip(*row.runs, strict=True))
    text = (
        f"{row.machine:<6}{row.share:>6.0%}  {row.name:<10}{alone:>12.2%}{beside:>9.2%}{row.difference.value:>+12.2%}"
        f"{row.batch_share.value:>12.1%}{goodput:>9.2f}"
    )
    if math.isnan(row.difference.low):
        return text
    chat, batch = row.difference, row.batch_share
    text = f"{text}  [{chat.low:+.2%} to {chat.high:+.2%}]"
    return text if math.isnan(batch.low) else f"{text} [{batch.low:.1%}–{batch.high:.1%}]"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """``machines`` and ``contenders``: the mean and the least over all seeds, machines and loads; and each machine and load by
    itself, with 95% intervals where there are any and whether the aims are ``met``."""
    names = dict.fromkeys(row.name for row in rows)
    return {
        "machines": [*dict.fromkeys(row.machine for row in rows)],
        "contenders": {name: _contender([row for row in rows if row.name == name]) for name in names},
    }


def _contender(rows: Sequence[Row]) -> dict[str, Any]:
    runs = [run for row in rows for run in row.runs]
    differences, shares = [r.beside - r.alone for r in runs], [r.batch_share for r in runs]
    loads: dict[str, dict[str, Any]] = {}
    for row in rows:
        loads.setdefault(row.machine, {})[f"{row.share:.0%}"] = {
            "interactive_difference": number(row.difference.value),
            "interactive_difference_interval": interval(row.difference),
            "batch_share_of_left": number(row.batch_share.value),
            "batch_share_of_left_interval": interval(row.batch_share),
            "runs": len(row.runs),
            "met": row.met,
        }
    return {
        "interactive_difference_mean": number(statistics.fmean(differences)),
        "interactive_difference_min": number(min(differences)),
        "batch_share_of_left_mean": number(statistics.fmean(shares)),
        "batch_share_of_left_min": number(min(shares)),
        "loads": loads,
    }
