"""The targets a controller works towards: those of the request classes that are served, and what they say of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from autotune.control.controllers.running_statistics import Recent
from runtime.records import RequestRecord
from runtime.slo import SLO

_MEMORY = 0.01  # weight of the newest request in a class's share
_GONE = 0.005  # share below which a class no longer counts
_DECODING = 2 / 3  # share of an E2E target that decoding may take
_FIRST = 32  # requests before which a class that had none may only be slower to end
_FEW = 4  # outputs of a class below which those of all say more of it


def step_target(slos: Mapping[str, SLO]) -> float:
    """Seconds that a step with decodes may take on average for the tightest TPOT or ITL target; inf without either."""
    targets = (t for slo in slos.values() for t in (slo.tpot_ms, slo.itl_ms) if t is not None)
    return min(targets, default=math.inf) / 1e3


class Targets(NamedTuple):
    """The feasible targets of an SLO, ms; inf where there is none, or it is infeasible."""

    ttft: float
    tpot: float
    itl: float
    e2e: float

    @classmethod
    def of(cls, slo: SLO, lost: Collection[str] = ()) -> Self:
        return cls(*(math.inf if ms is None or name in lost else ms for name, ms in slo.targets_ms.items()))


assert Targets._fields == tuple(SLO(ttft_ms=1).targets_ms)


class SLOTargets:
    """The SLO of each class, and the tightest targets among those that have had requests lately (all, before any had).

    ``step``: seconds a step may take on average (TPOT and ITL); ``gap``: at most (ITL); ``first``: until a first token
    (``firsts``: of each class); ``whole``: until the last (E2E); inf each where there is no target.

    A class with an infeasible target (:meth:`give_up`) is left out of all of them: its requests are lost whatever
    is done, and those of others would be lost for it. Only where no other is served do its other targets count.
    ``lost``: infeasible targets of the classes served; ``left_out``: targets for token times, s, that steps do not go by.
    """

    def __init__(self, slos: Mapping[str, SLO]) -> None:
        self._slos = dict(slos)
        self._shares: dict[str, float] = {}
        self._outputs: dict[str, Recent] = {}
        self._given_up: Mapping[str, frozenset[str]] = {}
        self._seen = 0
        self._tighten()

    def of(self, request_class: str) -> SLO | None:
        return self._slos.get(request_class) or self._slos.get("default")

    def name_of(self, request_class: str) -> str:
        """The class whose SLO applies: its own name, or ``default``."""
        return request_class if request_class in self._slos else "default"

    def targets(self, request_class: str) -> Targets | None:
        """The feasible targets of this class; None if it is left out, or has no SLO."""
        return self._counted.get(self.name_of(request_class))

    def change(self, slos: Mapping[str, SLO]) -> bool:
        """Take ``slos`` from now on. False if they are the same as before."""
        if dict(slos) == self._slos:
            return False
        self._slos = dict(slos)
        self._given_up = {}
        self._tighten()
        return True

    def give_up(self, metrics: Mapping[str, frozenset[str]]) -> bool:
        """These metrics of these classes are infeasible, for now. False if that was known."""
        if metrics == self._given_up:
            return False
        self._given_up = dict(metrics)
        self._tighten()
        return True

    def saw(self, request_class: str, output_tokens: int | None = None) -> None:
        """A request of this class has ended, completed if its tokens are given."""
        name = self.name_of(request_class)
        if len(self._slos) == 1:
            return
        if output_tokens is not None:
            self._outputs.setdefault(name, Recent(256)).add(output_tokens)
        before = self._served()
        self._seen += 1
        self._shares = {n: share * (1 - _MEMORY) for n, share in self._shares.items() if share > _GONE / 10}
        self._shares[name] = self._shares.get(name, 0.0) + _MEMORY
        if self._served() != before or self._seen == _FIRST:
            self._tighten()

    def _served(self) -> frozenset[str]:
        return frozenset(n for n, share in self._shares.items() if share > _GONE and n in self._slos)

    def _tighten(self) -> None:
        served, given_up = self._served(), self._given_up
        slos = {name: slo for name, slo in self._slos.items() if not served or name in served}
        if self._seen < _FIRST and given_up.keys() >= slos.keys():
            slos = self._slos
        self.lost = {name: given_up[name] for name in slos if name in given_up}
        self.all_lost = len(self.lost) == len(slos) > 0
        counted_slos = slos if self.all_lost else {name: slo for name, slo in slos.items() if name not in given_up}
        self._counted = {name: Targets.of(slo, given_up.get(name, ())) for name, slo in counted_slos.items()}
        counted = self._counted.values()
        self.step = min((min(t.tpot, t.itl) for t in counted), default=math.inf) / 1e3
        self.gap = min((t.itl for t in counted), default=math.inf) / 1e3
        self.firsts = {name: min(t.ttft, t.e2e) / 1e3 for name, t in self._counted.items()}
        self.first = min(self.firsts.values(), default=math.inf)
        self._wholes = {name: t.e2e / 1e3 for name, t in self._counted.items() if t.e2e < math.inf}
        self.whole = min(self._wholes.values(), default=math.inf)
        self.left_out = _token_times(Targets.of(self._slos[n]) for n in given_up) - _token_times(counted)
        self._said = sorted(_said(self._counted))

    def tightest(self, seconds: float) -> str:
        """The target because of which a step may take no more than ``seconds``, in words."""
        named = next((text for ms, text in self._said if ms / 1e3 <= seconds * (1 + 1e-9)), "")
        return named or f"E2E {1e3 * self.whole:g} ms"

    def step_time_for_e2e(self, outputs: Recent) -> float:
        """Seconds a step may take so that of each class nine outputs in ten are whole in time, with a third of it left for the
        queue and the prompt; inf where there is no E2E target, or no output has been seen. ``outputs``: those of all classes.

        It holds beside a TPOT as well, for targets are met jointly: a loose TPOT says nothing of the answer's end, and one
        that is tighter than this is what steps go by anyway.
        """
        if not self._wholes:  # it is asked for every step
            return math.inf
        return min(self.step_time_for_class(name, outputs) for name in self._wholes)

    def step_time_for_class(self, name: str, outputs: Recent) -> float:
        """The same for the class of this name alone."""
        if name not in self._wholes or not len(lengths := self._lengths(name, outputs)):
            return math.inf
        return _step_time(self._wholes[name], lengths)

    def _lengths(self, name: str, outputs: Recent) -> Recent:
        own = self._outputs.get(name)
        return outputs if own is None or len(own) < _FEW else own

    def met(self, record: RequestRecord) -> bool:
        """Whether ``record`` met every feasible target of its class."""
        slo, lost = self.of(record.request_class), self._given_up.get(self.name_of(record.request_class), frozenset())
        return record.completed if slo is None else lost.issuperset(slo.violated(record))

    def slow(self, record: RequestRecord, outputs: Recent) -> bool:
        """Whether the tokens of ``record`` took longer than its TPOT, or so long that its E2E was missed for them."""
        targets, tpot, e2e = self.targets(record.request_class), record.tpot, record.e2e
        if targets is None or tpot is None or e2e is None:
            return False
        if 1e3 * tpot > targets.tpot or 1e3 * e2e <= targets.e2e:
            return 1e3 * tpot > targets.tpot
        return tpot > self.step_time_for_class(self.name_of(record.request_class), outputs)

    def step_times(self, outputs: Recent) -> Iterator[tuple[str, str, float]]:
        """Class, metric, and the seconds a step may take for it, of all targets for token times and ends."""
        for name, slo in self._slos.items():
            targets = Targets.of(slo)
            yield name, "tpot", targets.tpot / 1e3
            yield name, "itl", targets.itl / 1e3
            if len(lengths := self._lengths(name, outputs)) >= _FEW:
                yield name, "e2e", _step_time(targets.e2e / 1e3, lengths)

    def first_targets(self) -> Iterator[tuple[str, str, float]]:
        """Class, metric, and the seconds until which a first token must have come for it, of all targets."""
        for name, slo in self._slos.items():
            targets = Targets.of(slo)
            yield name, "ttft", targets.ttft / 1e3
            yield name, "e2e", targets.e2e / 1e3

    def named(self, name: str, metrics: Collection[str]) -> str:
        """These targets of a class, in words."""
        said = (f"{m.upper()} {ms:g} ms" for m, ms in Targets.of(self._slos[name])._asdict().items() if m in metrics)
        return " and ".join(said) + _of(name)


def _step_time(whole: float, outputs: Recent) -> float:
    return whole * _DECODING / max(1.0, outputs.quantile(0.9))


def _token_times(targets: Iterable[Targets]) -> frozenset[float]:
    return frozenset(ms / 1e3 for t in targets for ms in (t.tpot, t.itl) if ms < math.inf)


def _of(name: str) -> str:
    return "" if name == "default" else f" of class {name}"


def _said(counted: Mapping[str, Targets]) -> Iterator[tuple[float, str]]:
    for name, targets in counted.items():
        for metric, ms in (("TPOT", targets.tpot), ("ITL", targets.itl)):
            if ms < math.inf:
                yield ms, f"{metric} {ms:g} ms{_of(name)}"
