"""How a controller stands, in one line or as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.knobs import KNOBS, Knobs
from runtime.slo import SLO, Attainment

SILENT_S = 1.0  # from which on it is worth a word that no record has come


@dataclass(frozen=True)
class Fared:
    """A request class: its promise, and how the latest of its requests fared. ``latencies_ms``: (median, 99th percentile) of each
    metric."""

    slo: SLO
    attainment: Attainment
    latencies_ms: Mapping[str, tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "slo": str(self.slo),
            "in_slo": self.attainment.share if self.attainment.offered else None,
            "offered": self.attainment.offered,
            "targets_ms": {name: ms for name, ms in self.slo.targets_ms.items() if ms is not None},
            "latencies_ms": {
                name: {"p50": round(p50, 3), "p99": round(p99, 3)} for name, (p50, p99) in self.latencies_ms.items()
            },
        }


@dataclass(frozen=True)
class Status:
    """``attainment`` is over the latest requests that have ended, each judged by the promise of its class; so are ``classes``
    (``default``: of no class of their own) and ``rejections``, how many were turned away by cause. ``silent_s``: how long the
    record of a step that was begun has been due, s; None while none is, as of an engine with nothing to do."""

    knobs: Knobs
    regime: str
    attainment: Attainment
    slo: SLO
    paused: bool
    observe_only: bool
    ended: bool
    classes: Mapping[str, Fared] = field(default_factory=dict)
    rejections: Mapping[str, int] = field(default_factory=dict)
    silent_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "in_slo": self.attainment.share if self.attainment.offered else None,
            "offered": self.attainment.offered,
            "regime": self.regime,
            "slo": str(self.slo),
            "paused": self.paused,
            "observe_only": self.observe_only,
            "ended": self.ended,
            "knobs": self.knobs.as_dict(),
            "classes": {name: fared.as_dict() for name, fared in self.classes.items()},
            "rejections": dict(self.rejections),
            "silent_s": None if self.silent_s is None else round(self.silent_s, 3),
        }

    def __str__(self) -> str:
        k, seen = self.knobs, self.attainment
        share = f"in SLO {seen.share:.1%} of the last {seen.offered}" if seen.offered else "no request has ended yet"
        state = "detached" if self.ended else "paused" if self.paused else "observing" if self.observe_only else ""
        knobs = ", ".join(f"{s.short} {getattr(k, s.name):.10g}{' ms' if s.unit == 'ms' else ''}" for s in KNOBS)
        silent = "" if (self.silent_s or 0.0) < SILENT_S else f"no usable record for {self.silent_s:.1f} s"
        return " · ".join(part for part in (share, f"regime {self.regime}", knobs, silent, state) if part)
