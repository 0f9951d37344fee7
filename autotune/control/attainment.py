"""The SLOs of an engine's request classes, and their attainment over the latest requests."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from autotune.control.controllers.protocol import SLOAware
from autotune.control.status import ClassStatus
from autotune.control.tally import ClassTally
from runtime.records import FinishReason, RequestRecord, percentile
from runtime.slo import METRICS, SLO, Attainment, SLOHistory
from runtime.tunable import Tunable, slo_history_of

_WINDOW = 1024


class AttainmentTracker:
    """``slos``: the SLO of each class as of the last :meth:`look`; ``default`` is for classes not named.

    They are the engine's; with ``apart`` the ``slo`` stands in place of its ``default``, until that is set to another. Figures
    are all of the same last :data:`_WINDOW` requests, each judged by the SLO that its class had when it came.
    """

    def __init__(self, engine: Tunable, slo: SLO, *, apart: bool = False) -> None:
        self.slos: Mapping[str, SLO] = {"default": slo}
        self._reported: Mapping[str, SLO] = self.slos  # as of the last :meth:`changed`
        self._engine = engine
        self._apart, self._engines = apart, engine.slos.get("default")
        self._history = SLOHistory(self.slos)
        self._given = slo_history_of(engine)
        self._seen: tuple[float, Mapping[str, SLO]] | None = None  # the last of those at the last look
        self._latest: deque[_Outcome] = deque(maxlen=_WINDOW)
        self._tallies: dict[str, ClassTally] = {}

    @property
    def default(self) -> SLO:
        return self.slos["default"]

    def look(self) -> None:
        """See whether the engine's SLOs, which may change at any time, have; do so after each step. Those of the first look are
        taken for those from the beginning."""
        periods = self._given().periods
        if periods[-1] is self._seen:
            return
        fresh = [*takewhile(lambda period: period is not self._seen, reversed(periods))]
        if self._seen is None:
            fresh = [(-math.inf, periods[-1][1])]
        for since, slos in reversed(fresh):
            self._history.change(self._in_force(slos), since)
            self.slos = self._history.latest
        self._seen = periods[-1]

    def changed(self) -> bool:
        """Whether the SLOs of the last :meth:`look` differ from those at the last call."""
        before, self._reported = self._reported, self.slos
        return self.slos != before

    def _in_force(self, engines: Mapping[str, SLO]) -> dict[str, SLO]:
        slos = {"default": self.default, **engines}
        if self._apart:
            self._apart = engines.get("default") == self._engines
        return slos | {"default": self.default} if self._apart else slos

    def pass_slos(self, controller: object) -> None:
        """Give ``controller`` the SLOs in force, if it takes any."""
        if isinstance(controller, SLOAware):
            controller.set_slos(self.slos)

    def add(self, record: RequestRecord) -> None:
        """A request has ended. It is judged by the SLO that its class had when it came."""
        self.look()
        slos = self._history.at(record.arrival)
        name = record.request_class if record.request_class in slos else "default"
        slo = slos[name]
        self._latest.append(_Outcome.of(name, record, slo))
        if name not in self._tallies:
            self._tallies[name] = ClassTally(weight=self._engine.weights.get(name, 1.0))
        self._tallies[name].add(record, slo)

    def attainment(self) -> Attainment:
        """Of all classes together."""
        return _attainment(self._latest)

    def rejections(self) -> dict[str, int]:
        """Rejected requests by cause."""
        return dict(Counter(one.rejected for one in self._latest if one.rejected))

    def by_class(self) -> dict[str, ClassStatus]:
        """Attainment and latencies of each class."""
        by_class: dict[str, list[_Outcome]] = {name: [] for name in self.slos}
        for one in self._latest:
            by_class.setdefault(one.name, []).append(one)
        return {
            name: ClassStatus(
                slo,
                _attainment(by_class[name]),
                _latencies_ms(by_class[name]),
                any(one.missed is not None and _other(one.slo, slo) for one in by_class[name]),
            )
            for name, slo in self.slos.items()
        }

    def copy(self) -> AttainmentTracker:
        """Their state as it is now. Quick: :meth:`add` may have to wait for it."""
        made = AttainmentTracker(self._engine, self.default)
        made.slos, made._latest = self.slos, self._latest.copy()
        return made

    def as_evidence(self) -> dict[str, Any]:
        """Class → SLO, for the decision log, and from when on, unless that is from the beginning."""
        since = {} if self._history.since == -math.inf else {"since": self._history.since}
        return {"slos": {name: str(slo) for name, slo in sorted(self.slos.items())}, **since}

    def weights(self) -> dict[str, dict[str, float]]:
        """Class → weight, for the decision log; nothing where all weigh the same."""
        weights = self._engine.weights
        return {"weights": dict(sorted(weights.items()))} if set(weights.values()) - {1} else {}

    def outcomes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """How all requests of each class have ended since the beginning, for the decision log; nothing of none."""
        return (
            {"outcomes": {name: one.as_dict() for name, one in sorted(self._tallies.items())}} if self._tallies else {}
        )

    def as_text(self) -> str:
        """The same in words."""
        return ", ".join(f"{name} {slo}" for name, slo in sorted(self.slos.items()))


class _Outcome(NamedTuple):
    """How one request ended, judged by ``slo``. ``missed``: the targets, None of one that its client cancelled; ``rejected``: the
    cause, if it was; ``latencies``: of each of :data:`METRICS`, s, if it completed."""

    name: str
    slo: SLO
    missed: tuple[str, ...] | None
    rejected: str
    latencies: tuple[float | None, ...]

    @classmethod
    def of(cls, name: str, record: RequestRecord, slo: SLO) -> _Outcome:
        """Of a request of the class ``name`` that had to meet ``slo``."""
        missed = slo.violated(record) if record.offered else None
        rejected = record.cause or "rejected" if record.reason is FinishReason.REJECTED else ""
        if not record.completed:
            return cls(name, slo, missed, rejected, ())
        gap = record.itl_p99 if slo.itl_ms is not None else None
        return cls(name, slo, missed, rejected, (record.ttft, record.tpot, gap, record.e2e))


def _other(one: SLO, now: SLO) -> bool:
    """Whether they have other targets, whatever share is to meet them."""
    return one is not now and one.targets_ms != now.targets_ms


def _attainment(outcomes: Collection[_Outcome]) -> Attainment:
    missed = [one.missed for one in outcomes if one.missed is not None]
    met = sum(not m for m in missed)
    return Attainment(met, len(missed), len(outcomes) - len(missed), Counter(n for m in missed for n in m))


def _latencies_ms(outcomes: Collection[_Outcome]) -> dict[str, tuple[float, float]]:
    """(median, 99th percentile) of each metric that any of them has, ms."""
    found = {}
    for name, values in zip(
        METRICS, zip(*(one.latencies for one in outcomes if one.latencies), strict=True), strict=False
    ):
        known = [value for value in values if value is not None]
        middle, high = percentile(known, 50), percentile(known, 99)
        if middle is not None and high is not None:
            found[name] = 1e3 * middle, 1e3 * high
    return found


assert METRICS == ("ttft", "tpot", "itl", "e2e")
