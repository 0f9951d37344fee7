"""The promises a controller keeps: those of the request classes that are served, and what they say of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autotune.controllers.recent import Recent
from runtime.slo import SLO, first_target

_MEMORY = 0.01  # weight of the newest request in a class's share
_GONE = 0.005  # share below which a class no longer counts
_DECODING = 2 / 3  # share of an E2E target that decoding may take


def step_target(slos: Mapping[str, SLO]) -> float:
    """Seconds that a step with decodes may take on average for the tightest TPOT or ITL promised; inf without either."""
    targets = (t for slo in slos.values() for t in (slo.tpot_ms, slo.itl_ms) if t is not None)
    return min(targets, default=math.inf) / 1e3


class Promises:
    """The SLO of each class, and the tightest targets among those that have had requests lately (all, before any had).

    ``step``: seconds a step may take on average (TPOT and ITL); ``gap``: at most (ITL); ``first``: until a first token
    (``firsts``: of each class); ``whole``: until the last (E2E, where no TPOT is promised); inf each where nothing is promised.
    """

    def __init__(self, slos: Mapping[str, SLO]) -> None:
        self._slos = dict(slos)
        self._shares: dict[str, float] = {}
        self._tighten()

    def of(self, request_class: str) -> SLO | None:
        return self._slos.get(request_class) or self._slos.get("default")

    def name_of(self, request_class: str) -> str:
        """The name under which its promise goes."""
        return request_class if request_class in self._slos else "default"

    def change(self, slos: Mapping[str, SLO]) -> bool:
        """Promise ``slos`` from now on. False if that is what was promised."""
        if dict(slos) == self._slos:
            return False
        self._slos = dict(slos)
        self._tighten()
        return True

    def saw(self, request_class: str) -> None:
        """A request of this class has ended."""
        name = self.name_of(request_class)
        if len(self._slos) == 1:
            return
        before = self._served()
        self._shares = {n: share * (1 - _MEMORY) for n, share in self._shares.items() if share > _GONE / 10}
        self._shares[name] = self._shares.get(name, 0.0) + _MEMORY
        if self._served() != before:
            self._tighten()

    def _served(self) -> frozenset[str]:
        return frozenset(n for n, share in self._shares.items() if share > _GONE and n in self._slos)

    def _tighten(self) -> None:
        served = self._served()
        slos = {name: slo for name, slo in self._slos.items() if not served or name in served}
        self.step = step_target(slos)
        self.gap = min((s.itl_ms for s in slos.values() if s.itl_ms is not None), default=math.inf) / 1e3
        self.firsts = {name: first_target(slo) for name, slo in slos.items()}
        self.first = min(self.firsts.values(), default=math.inf)
        whole = (s.e2e_ms for s in slos.values() if s.e2e_ms is not None and s.tpot_ms is None)
        self.whole = min(whole, default=math.inf) / 1e3
        self._said = sorted(_said(slos))

    def tightest(self, seconds: float) -> str:
        """The promise because of which a step may take no more than ``seconds``, in words."""
        named = next((text for ms, text in self._said if ms / 1e3 <= seconds * (1 + 1e-9)), "")
        return named or f"E2E {1e3 * self.whole:g} ms"

    def pace_of(self, outputs: Recent) -> float:
        """Seconds a step may take so that nine outputs in ten are whole in time, with a third of it left for the queue and the
        prompt; inf where nothing but first tokens and gaps is promised, or no output has been seen."""
        if self.whole == math.inf or not len(outputs):
            return math.inf
        return self.whole * _DECODING / max(1.0, outputs.quantile(0.9))


def _said(slos: Mapping[str, SLO]) -> Iterator[tuple[float, str]]:
    for name, slo in slos.items():
        of = "" if name == "default" else f" of class {name}"
        for metric, ms in (("TPOT", slo.tpot_ms), ("ITL", slo.itl_ms)):
            if ms is not None:
                yield ms, f"{metric} {ms:g} ms{of}"
