"""The status of an attached controller, in one line or as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO, Attainment, common_target, in_percent

OVERDUE_S = 1.0  # a step record that is due for longer is worth a word
JUDGED = ", each by the SLO of when it came"  # where that is not the SLO of now


@dataclass(frozen=True)
class ClassStatus:
    """A request class: its SLO, and the attainment of its latest requests. ``latencies_ms``: (median, 99th percentile) of each
    metric. ``slo_changed``: whether any of them came under an SLO with other targets, by which it was judged."""

    slo: SLO
    attainment: Attainment
    latencies_ms: Mapping[str, tuple[float, float]]
    slo_changed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "slo": str(self.slo),
            "attainment": self.attainment.share if self.attainment.offered else None,
            "offered": self.attainment.offered,
            "slo_changed": self.slo_changed,
            "targets_ms": {name: ms for name, ms in self.slo.targets_ms.items() if ms is not None},
            "latencies_ms": {
                name: {"p50": round(p50, 3), "p99": round(p99, 3)} for name, (p50, p99) in self.latencies_ms.items()
            },
        }


@dataclass(frozen=True)
class Status:
    """``attainment`` is over the latest requests that have ended, each judged by the SLO that its class had when it came; so are
    ``classes`` (``default``: those of no class of their own) and ``rejections``, rejected requests by cause. ``overdue_s``:
    seconds for which the record of a step has been due; None while none is, as for an engine with nothing to do. ``without``: the
    knobs that the engine does not have. ``limits``: its ceilings. ``closed``: the engine is, and its knobs no longer move."""

    knobs: Knobs
    regime: str
    attainment: Attainment
    slo: SLO
    paused: bool
    observe_only: bool
    ended: bool
    classes: Mapping[str, ClassStatus] = field(default_factory=dict)
    rejections: Mapping[str, int] = field(default_factory=dict)
    overdue_s: float | None = None
    without: tuple[str, ...] = ()
    limits: KnobLimits = field(default_factory=KnobLimits)
    closed: bool = False

    @property
    def target(self) -> float | None:
        """The attainment that every class is to have; None where they differ."""
        return common_target(slo.attainment for slo in [one.slo for one in self.classes.values()] or [self.slo])

    def as_dict(self) -> dict[str, Any]:
        return {
            "attainment": self.attainment.share if self.attainment.offered else None,
            "offered": self.attainment.offered,
            "regime": self.regime,
            "slo": str(self.slo),
            "paused": self.paused,
            "observe_only": self.observe_only,
            "ended": self.ended,
            "closed": self.closed,
            "knobs": self.knobs.as_dict(),
            "classes": {name: status.as_dict() for name, status in self.classes.items()},
            "rejections": dict(self.rejections),
            "overdue_s": None if self.overdue_s is None else round(self.overdue_s, 3),
            "without": list(self.without),
            "ceilings": {spec.name: getattr(self.limits, spec.name) for spec in KNOBS},
        }

    def __str__(self) -> str:
        k, seen = self.knobs, self.attainment
        share = (
            f"attainment {in_percent(seen.share, target=self.target)} of the last {seen.offered}"
            + (JUDGED if any(one.slo_changed for one in self.classes.values()) else "")
            if seen.offered
            else "no request has ended yet"
        )
        states = {
            "detached": self.ended,
            "the engine is closed": self.closed,
            "paused": self.paused,
            "observing": self.observe_only,
        }
        state = next((text for text, so in states.items() if so), "")
        shown = (s for s in k.shown if s.name not in self.without)
        knobs = ", ".join(f"{s.short} {getattr(k, s.name):.10g}{' ms' if s.unit == 'ms' else ''}" for s in shown)
        overdue = "" if (self.overdue_s or 0.0) < OVERDUE_S else f"no step record for {self.overdue_s:.1f} s"
        return " · ".join(part for part in (share, f"regime {self.regime}", knobs, overdue, state) if part)
