"""The SLOs of an engine's request classes, and their attainment over the latest requests."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from autotune.control.controllers.protocol import SLOAware
from autotune.control.status import ClassStatus
from autotune.control.tally import ClassTally
from runtime.records import FinishReason, RequestRecord, percentile
from runtime.slo import METRICS, SLO, Attainment
from runtime.tunable import Tunable

_WINDOW = 1024


class AttainmentTracker:
    """``slos``: the SLO of each class as of the last :meth:`changed`; ``default`` is for classes not named.

    They are the engine's; with ``apart`` the ``slo`` stands in place of its ``default``, until that is set to another.
    """

    def __init__(self, engine: Tunable, slo: SLO, *, apart: bool = False) -> None:
        self.slos: dict[str, SLO] = {"default": slo}
        self.all = Outcomes()
        self._engine = engine
        self._apart, self._engines = apart, engine.slos.get("default")
        self._classes: dict[str, Outcomes] = {}
        self._tallies: dict[str, ClassTally] = {}

    @property
    def default(self) -> SLO:
        return self.slos["default"]

    def changed(self) -> bool:
        """Whether the engine's SLOs, which may change at any time, differ from those of the last call."""
        slos = self._in_force()
        before, self.slos = self.slos, slos
        return slos != before

    def _in_force(self) -> dict[str, SLO]:
        slos = {"default": self.default, **self._engine.slos}
        if self._apart:
            self._apart = self._engine.slos.get("default") == self._engines
        return slos | {"default": self.default} if self._apart else slos

    def pass_slos(self, controller: object) -> None:
        """Give ``controller`` the SLOs in force, if it takes any."""
        if isinstance(controller, SLOAware):
            controller.set_slos(self.slos)

    def add(self, record: RequestRecord) -> None:
        """A request has ended. It is judged by the SLO that its class has now."""
        slos = self._in_force()
        name = record.request_class if record.request_class in slos else "default"
        slo = slos[name]
        self.all.add(record, slo)
        if name not in self._classes:
            self._classes[name] = Outcomes()
            self._tallies[name] = ClassTally(weight=self._engine.weights.get(name, 1.0))
        self._classes[name].add(record, slo)
        self._tallies[name].add(record, slo)

    def by_class(self) -> dict[str, ClassStatus]:
        """Attainment and latencies of each class."""
        none = Outcomes()
        by_class = {name: self._classes.get(name, none) for name in self.slos}
        return {name: ClassStatus(self.slos[name], v.attainment(), v.latencies_ms()) for name, v in by_class.items()}

    def copy(self) -> AttainmentTracker:
        """Their state as it is now. Quick: :meth:`add` may have to wait for it."""
        made = AttainmentTracker(self._engine, self.default)
        made.slos, made.all = self.slos, self.all.copy()
        made._classes = {name: outcomes.copy() for name, outcomes in self._classes.items()}
        return made

    def as_evidence(self) -> dict[str, dict[str, str]]:
        """Class → SLO, for the decision log."""
        return {"slos": {name: str(slo) for name, slo in sorted(self.slos.items())}}

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


class Outcomes:
    """How the last :data:`_WINDOW` requests ended: the targets each missed, and its latencies."""

    def __init__(self) -> None:
        self._missed: deque[tuple[str, ...] | None] = deque(maxlen=_WINDOW)  # None: cancelled
        self._latencies: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in METRICS}
        self._rejected: deque[str] = deque(maxlen=_WINDOW)  # the cause of those rejected, empty of others

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

    def copy(self) -> Outcomes:
        made = Outcomes()
        made._missed, made._rejected = self._missed.copy(), self._rejected.copy()
        made._latencies = {name: values.copy() for name, values in self._latencies.items()}
        return made

    def attainment(self) -> Attainment:
        missed = [m for m in self._missed if m is not None]
        met = sum(not m for m in missed)
        return Attainment(met, len(missed), len(self._missed) - len(missed), Counter(n for m in missed for n in m))

    def rejections(self) -> dict[str, int]:
        """Rejected requests by cause."""
        return dict(Counter(cause for cause in self._rejected if cause))

    def latencies_ms(self) -> dict[str, tuple[float, float]]:
        """(median, 99th percentile) of each metric that any of them has, ms."""
        found = {}
        for name, values in self._latencies.items():
            middle, high = percentile(values, 50), percentile(values, 99)
            if middle is not None and high is not None:
                found[name] = 1e3 * middle, 1e3 * high
        return found
