"""What an engine's classes are promised, and how they have fared."""

from __future__ import annotations

from autotune.control.controllers.protocol import Promised
from autotune.control.status import Fared
from autotune.control.verdicts import Verdicts
from runtime.records import RequestRecord
from runtime.slo import SLO
from runtime.tunable import Tunable


class Kept:
    """``slos``: the promise of each class as of the last :meth:`changed`; ``default`` is for classes not named."""

    def __init__(self, engine: Tunable, slo: SLO) -> None:
        self.slos: dict[str, SLO] = {"default": slo}
        self.all = Verdicts()
        self._engine = engine
        self._classes: dict[str, Verdicts] = {}

    @property
    def default(self) -> SLO:
        return self.slos["default"]

    def changed(self) -> bool:
        """Whether the engine's promises, which may change at any time, are no longer those of the last time."""
        slos = {"default": self.default, **self._engine.slos}
        before, self.slos = self.slos, slos
        return slos != before

    def tell(self, controller: object) -> None:
        """``controller`` goes by these promises from now on, if it goes by any."""
        if isinstance(controller, Promised):
            controller.promise(self.slos)

    def add(self, record: RequestRecord) -> None:
        """A request has ended; it is judged by what its class is promised now."""
        slos = self._engine.slos
        name = record.request_class if record.request_class in slos else "default"
        slo = slos.get(name, self.default)
        self.all.add(record, slo)
        if name not in self._classes:
            self._classes[name] = Verdicts()
        self._classes[name].add(record, slo)

    def fared(self) -> dict[str, Fared]:
        """How each class has fared lately."""
        none = Verdicts()
        by_class = {name: self._classes.get(name, none) for name in self.slos}
        return {name: Fared(self.slos[name], v.attainment(), v.latencies_ms()) for name, v in by_class.items()}

    def as_evidence(self) -> dict[str, dict[str, str]]:
        """The promises, for the log: a class and its SLO."""
        return {"slos": {name: str(slo) for name, slo in sorted(self.slos.items())}}

    def as_text(self) -> str:
        """The same in words."""
        return ", ".join(f"{name} {slo}" for name, slo in sorted(self.slos.items()))
