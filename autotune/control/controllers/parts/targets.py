"""The targets a controller works towards: those of the request classes that are served, and what they say of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, Self

from autotune.control.controllers.parts.running_statistics import Recent
from runtime.records import RequestRecord
from runtime.slo import SLO, find_slo

_MEMORY = 0.01  # weight of the newest request in a class's share
_GONE = 0.005  # share below which a class no longer counts
_DECODING = 2 / 3  # share of an E2E target that decoding may take
_FEW = 4  # outputs of a class below which those of all say more of it
_LOOSER = 2.0  # times the tightest time until a first token: one that has more is in no such hurry
_AGAIN = 0.95  # how far the shortest step must fall for targets to count again: noise must not turn them off and on


def step_target(slos: Mapping[str, SLO]) -> float:
    """Seconds that a step with decodes may take on average for the tightest TPOT or ITL target; inf without either."""
    targets = (t for slo in slos.values() for t in (slo.tpot_ms, slo.itl_ms) if t is not None)
    return min(targets, default=math.inf) / 1e3


class Targets(NamedTuple):
    """The targets of an SLO, ms; inf where there is none, or no step is so short."""

    ttft: float
    tpot: float
    itl: float
    e2e: float

    @classmethod
    def of(cls, slo: SLO, left_out: Collection[str] = ()) -> Self:
        return cls(*(math.inf if ms is None or name in left_out else ms for name, ms in slo.targets_ms.items()))


assert Targets._fields == tuple(SLO(ttft_ms=1).targets_ms)
_NO_TARGETS = Targets(math.inf, math.inf, math.inf, math.inf)


class SLOTargets:
    """The SLO of each class, and the tightest targets among those that have had requests lately (all, before any had).

    ``step``: seconds a step may take on average (TPOT and ITL), ``mean``: for TPOT alone; ``gap``: at most (ITL); ``first``:
    until a first token (``firsts``: of each class); ``whole``: until the last (E2E); inf each where there is no target.
    ``mixed``: whether there are classes, served lately or not, whose first token has far more time than that of others.

    A TPOT or ITL target below ``floor``, the shortest step there can be (:meth:`no_step_below`, s), does not count: no setting
    meets it, and steps that went by it would leave prompts no room. Neither does an E2E that asks for such steps.
    ``left_out``: whether there are such targets; ``unmet`` names those of the classes served. There are none while steps as short
    as ``shortest`` are seen, s.
    """

    def __init__(self, slos: Mapping[str, SLO]) -> None:
        self._slos = dict(slos)
        self._shares: dict[str, float] = {}
        self._outputs: dict[str, Recent] = {}
        self.floor = 0.0
        self._count()

    def of(self, request_class: str) -> SLO | None:
        return find_slo(self._slos, request_class)

    def name_of(self, request_class: str) -> str:
        """The class whose SLO applies: its own name, or ``default``."""
        return request_class if request_class in self._slos else "default"

    def targets(self, request_class: str) -> Targets | None:
        """The targets of this class that count; None if it has no SLO."""
        return self._counted.get(self.name_of(request_class))

    def change(self, slos: Mapping[str, SLO]) -> bool:
        """Take ``slos`` from now on. False if they are the same as before."""
        if dict(slos) == self._slos:
            return False
        self._slos = dict(slos)
        self._count()
        return True

    def no_step_below(self, seconds: float) -> bool:
        """No step with decodes takes less than ``seconds``. True if that changes which targets count."""
        if _AGAIN * self.floor <= seconds <= self.floor:
            return False
        before, self.floor = self.unmet, seconds
        self._count()
        return self.unmet != before

    def saw(self, request_class: str, output_tokens: int | None = None) -> None:
        """A request of this class has ended, completed if its tokens are given."""
        name = self.name_of(request_class)
        if len(self._slos) == 1:
            return
        if output_tokens is not None:
            self._outputs.setdefault(name, Recent(256)).add(output_tokens)
        self._shares = {n: share * (1 - _MEMORY) for n, share in self._shares.items() if share > _GONE / 10}
        self._shares[name] = self._shares.get(name, 0.0) + _MEMORY
        served = self._now_served()
        if served != self._served:
            self._tighten(served)

    def _now_served(self) -> frozenset[str]:
        return frozenset(n for n, share in self._shares.items() if share > _GONE and n in self._slos)

    def _count(self) -> None:
        """The SLOs are others, or the shortest step is: which targets of each class count."""
        slos = self._slos
        self._places = {name: place for place, name in enumerate(slos)}
        self._left_out = {name: self._too_short(slo) for name, slo in slos.items()}
        self._counted = {name: Targets.of(slo, self._left_out[name]) for name, slo in slos.items()}
        self._all_firsts = {name: min(t.ttft, t.e2e) / 1e3 for name, t in self._counted.items()}
        firsts = [min(t.ttft, t.e2e) for t in self._counted.values()]
        self.mixed = "default" not in slos or max(firsts) > _LOOSER * min(firsts)  # those not named have no target
        self.left_out = any(self._left_out.values())
        unsure = self.left_out or any(slo.e2e_ms is not None for slo in slos.values())
        self.shortest = 0.0 if unsure else step_target(slos)
        self._tighten(self._now_served())

    def _tighten(self, served: frozenset[str]) -> None:
        """The tightest targets of the classes ``served``. With many classes these are others at every request, so that nothing is
        made anew of all."""
        self._served = served
        names = sorted(served or self._slos, key=self._places.__getitem__)
        counted = [self._counted[name] for name in names]
        tightest = Targets(*map(min, zip(_NO_TARGETS, *counted, strict=True)))
        self.step = min(tightest.tpot, tightest.itl) / 1e3
        self.mean = tightest.tpot / 1e3
        self.gap = tightest.itl / 1e3
        self.firsts = {name: self._all_firsts[name] for name in names}
        self.first = min(tightest.ttft, tightest.e2e) / 1e3
        self._wholes = {name: t.e2e / 1e3 for name, t in zip(names, counted, strict=True) if t.e2e < math.inf}
        self.whole = tightest.e2e / 1e3
        self.unmet = ", ".join(self._named(name, self._left_out[name]) for name in names if self._left_out[name])

    def _too_short(self, slo: SLO) -> tuple[str, ...]:
        """The metrics of token times that no step is short enough for."""
        times = {"tpot": slo.tpot_ms, "itl": slo.itl_ms}
        return tuple(name for name, ms in times.items() if ms is not None and ms / 1e3 < self.floor)

    def _named(self, name: str, metrics: Collection[str]) -> str:
        """These targets of a class, in words."""
        said = (f"{m.upper()} {ms:g} ms" for m, ms in self._slos[name].targets_ms.items() if m in metrics)
        return " and ".join(said) + ("" if name == "default" else f" of class {name}")

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
        own = self._outputs.get(name)
        lengths = outputs if own is None or len(own) < _FEW else own
        if name not in self._wholes or not len(lengths):
            return math.inf
        seconds = self._wholes[name] * _DECODING / max(1.0, lengths.quantile(0.9))
        return seconds if seconds >= self.floor else math.inf

    def met(self, record: RequestRecord) -> bool:
        """Whether ``record`` met every target of its class that counts."""
        slo = find_slo(self._slos, record.request_class)
        return record.completed and (slo is None or not set(slo.violated(record)).difference(self._too_short(slo)))

    def slow(self, record: RequestRecord, outputs: Recent) -> bool:
        """Whether the tokens of ``record`` took longer than its TPOT, or so long that its E2E was missed for them."""
        targets, tpot, e2e = self.targets(record.request_class), record.tpot, record.e2e
        if targets is None or tpot is None or e2e is None:
            return False
        if 1e3 * tpot > targets.tpot or 1e3 * e2e <= targets.e2e:
            return 1e3 * tpot > targets.tpot
        return tpot > self.step_time_for_class(self.name_of(record.request_class), outputs)
