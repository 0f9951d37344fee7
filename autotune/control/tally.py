"""How the requests of a run ended, counted by class: what met its SLO, what was rejected, relegated or late, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord
from runtime.slo import SLO, common_target, in_percent


@dataclass
class ClassTally:
    """Requests of one class. ``offered``: all but the cancelled ones. Each of those that did not meet their SLO is in one of
    ``rejected`` (by cause), ``unfinished`` (by how they ended) and ``late``, whose ``missed`` targets are counted by metric.

    ``relegated``: requests that once waited behind all that could still be met; of those, ``relegated_met`` met their SLO.
    ``weight``: of each request; None in a sum of runs that had different ones. ``lost_before``: weight of what those lost.
    """

    weight: float | None = 1.0
    offered: int = 0
    met: int = 0
    cancelled: int = 0
    relegated: int = 0
    relegated_met: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    unfinished: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    lost_before: float = 0.0

    def add(self, record: RequestRecord, slo: SLO) -> None:
        """A request has ended that had to meet ``slo``."""
        if not record.offered:
            self.cancelled += 1
            return
        missed = slo.violated(record)
        self.offered += 1
        self.met += not missed
        self.relegated += record.relegated
        self.relegated_met += record.relegated and not missed
        if record.reason is FinishReason.REJECTED:
            self.rejected[record.cause or "no cause given"] += 1
        elif not record.completed:
            self.unfinished[record.reason.value] += 1
        elif missed:
            self.late += 1
            self.missed.update(missed)

    @property
    def lost(self) -> float:
        """Weight of the requests that did not meet their SLO, each by the weight it had in its run."""
        return self.lost_before if self.weight is None else self.weight * (self.offered - self.met)

    def __add__(self, other: ClassTally) -> ClassTally:
        """Of two runs together."""
        summed = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        alike = self.weight == other.weight and self.weight is not None
        return ClassTally(
            weight=self.weight if alike else None,
            lost_before=0.0 if alike else self.lost + other.lost,
            rejected=self.rejected + other.rejected,
            unfinished=self.unfinished + other.unfinished,
            missed=self.missed + other.missed,
            **summed,
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        counts = {name: getattr(self, name) for name in ("weight", *_COUNTS)}
        return counts | {name: dict(sorted(getattr(self, name).items())) for name in _COUNTERS}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ClassTally:
        """The inverse of :meth:`as_dict`. Raises :class:`InputError`."""
        try:
            made = cls(_at_least_0(float(data["weight"])))
            for name in _COUNTS:
                setattr(made, name, int(_at_least_0(data[name])))
            for name in _COUNTERS:
                getattr(made, name).update({str(cause): int(_at_least_0(n)) for cause, n in data[name].items()})
            return made
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(f"outcomes cannot be read: {type(error).__name__}: {error}") from None


def _at_least_0(value: float) -> float:
    if not 0 <= value <= _MOST:  # NaN is not
        raise ValueError(f"{value!r:.40} is not a number of at least 0")
    return value


_MOST = 2.0**63
_COUNTS = ("offered", "met", "cancelled", "relegated", "relegated_met", "late")
_COUNTERS = ("rejected", "unfinished", "missed")


def losses(tallies: Mapping[str, ClassTally], targets: Mapping[str, float] | None = None) -> Iterator[str]:
    """Where goodput went, a line a class, that which lost the most first; nothing of no requests. ``targets``: the attainment
    that each class was to have, of those of which that is known."""
    ended = {name: one for name, one in tallies.items() if one.offered or one.cancelled}
    if not ended:
        return
    offered, met = (sum(getattr(one, name) for one in ended.values()) for name in ("offered", "met"))
    wanted = {name: (targets or {}).get(name) for name in ended}
    yield f"requests  {met} of {offered} met their SLO{_share(met, offered, common_target(wanted.values()))}"
    several, weighed = len(ended) > 1, any(one.weight != 1 for one in ended.values())  # None: not the same in all runs
    for name, one in sorted(ended.items(), key=lambda pair: (-pair[1].lost, pair[0])):
        parts = [f"{one.met} of {one.offered} met{_share(one.met, one.offered, wanted[name])}"] if several else []
        if weighed and one.lost:
            at = "at the weights of the runs" if one.weight is None else f"at weight {one.weight:g}"
            parts.append(f"{one.lost:.4g} lost {at}")
        if one.rejected:
            parts.append(f"rejected {one.rejected.total()} ({_by(one.rejected)})")
        if one.late:
            parts.append(f"late {one.late} (missed {_by(one.missed)})")
        if one.unfinished:
            parts.append(f"unfinished {one.unfinished.total()} ({_by(one.unfinished)})")
        if one.relegated:
            parts.append(f"relegated {one.relegated}, of which {one.relegated_met} met their SLO all the same")
        if one.cancelled:
            parts.append(f"cancelled by the client {one.cancelled}, left out")
        if parts:
            yield f"{name:<8}  {'; '.join(parts)}"


def _share(met: int, offered: int, target: float | None) -> str:
    return f" ({in_percent(met / offered, target=target)})" if offered else ""


def _by(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


__all__ = ["ClassTally", "losses"]
