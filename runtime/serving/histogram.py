"""Latency histograms fine enough to control by, and cheap enough to fill with every gap between tokens.

**Buckets.** The bounds are the preferred numbers R20 of ISO 3 (20 a decade: 1, 1.12, 1.25, ... 9, 10) from 1 ms to 63 s, and
1.5 in its one wider gap. Neighbours are 7 to 13% apart, so a quantile read off the buckets is within 13% of the true one
wherever it lies, and within about 6% if it is taken from the middle of its bucket. A controller that corrects in steps of
10 to 20% can steer by that; bounds that double, or an ITL histogram that begins at 10 ms, hide the whole of its effect in
one bucket. All usual targets (50 ms, 200 ms, 500 ms, 1 s, 2 s) are bounds, and the targets of the engine's own SLO are
added, so that the share below a target is exact, not interpolated. They are 102, some 8 KB of text a histogram.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

R20: Final = (
    1.00, 1.12, 1.25, 1.40, 1.50, 1.60, 1.80, 2.00, 2.24, 2.50, 2.80, 3.15, 3.55, 4.00, 4.50, 5.00, 5.60, 6.30, 7.10, 8.00,
    9.00,
)  # fmt: skip
"""One decade of ISO 3's preferred numbers, and 1.5."""

BOUNDS: Final = tuple(
    bound for power in (-3, -2, -1, 0, 1) for r in R20 if (bound := round(r * 10.0**power, 6)) <= 63.0
)
"""Upper bounds of the buckets, s."""


def bounds_with(targets: Iterable[float]) -> tuple[float, ...]:
    """:data:`BOUNDS` and ``targets`` (s)."""
    return tuple(sorted({*BOUNDS, *targets}))


class LatencyHistogram:
    """Counts of seconds in buckets. One thread at a time."""

    def __init__(self, name: str, doc: str, bounds: Sequence[float] = BOUNDS) -> None:
        self.name = name
        self.doc = doc
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._edges = np.asarray(self.bounds)
        self._counts = np.zeros(len(self.bounds) + 1, dtype=np.int64)  # the last one is beyond all bounds

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def observe(self, seconds: float | None) -> None:
        if seconds is not None:
            self.observe_all([seconds])

    def observe_all(self, seconds: Sequence[float]) -> None:
        if len(seconds):
            values = np.asarray(seconds, dtype=np.float64)
            at = np.searchsorted(self._edges, values)  # a value equal to a bound is within it
            self._counts += np.bincount(at, minlength=len(self._counts))
            self.sum += float(values.sum())

    def family(self) -> HistogramMetricFamily:
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        cumulative = np.cumsum(self._counts).tolist()
        return HistogramMetricFamily(
            self.name, self.doc, buckets=list(zip(names, cumulative, strict=True)), sum_value=self.sum
        )
