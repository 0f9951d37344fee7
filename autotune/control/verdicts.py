"""How the latest requests fared: what each missed, and its latencies."""

from __future__ import annotations

from collections import Counter, deque

from runtime.records import FinishReason, RequestRecord, percentile
from runtime.slo import METRICS, SLO, Attainment

_KEPT = 1024


class Verdicts:
    """Of the last :data:`_KEPT` requests that have ended."""

    def __init__(self) -> None:
        self._missed: deque[tuple[str, ...] | None] = deque(maxlen=_KEPT)  # None: cancelled
        self._latencies: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in METRICS}
        self._rejected: deque[str] = deque(maxlen=_KEPT)  # the cause of those rejected, empty of others

    def add(self, record: RequestRecord, slo: SLO) -> None:
        self._missed.append(slo.violated(record) if record.offered else None)
        self._rejected.append(record.cause or "rejected" if record.reason is FinishReason.REJECTED else "")
        for name, value in (
            ("ttft", record.ttft),
            ("tpot", record.tpot),
            ("itl", record.itl_p99 if slo.itl_ms is not None else None),
            ("e2e", record.e2e),
        ):
            if value is not None and record.completed:
                self._latencies[name].append(value)

    def attainment(self) -> Attainment:
        missed = [m for m in self._missed if m is not None]
        met = sum(not m for m in missed)
        return Attainment(met, len(missed), len(self._missed) - len(missed), Counter(n for m in missed for n in m))

    def rejections(self) -> dict[str, int]:
        """How many were turned away, by cause."""
        return dict(Counter(cause for cause in self._rejected if cause))

    def latencies_ms(self) -> dict[str, tuple[float, float]]:
        """(median, 99th percentile) of each metric that any of them has, ms."""
        found = {}
        for name, values in self._latencies.items():
            middle, high = percentile(values, 50), percentile(values, 99)
            if middle is not None and high is not None:
                found[name] = 1e3 * middle, 1e3 * high
        return found
