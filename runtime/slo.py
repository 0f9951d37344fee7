"""Service-level objectives (SLOs): the latency targets of requests, and how many requests met them.

The one spelling is ``ttft=500ms,tpot=50ms@99%``: targets joined by commas, each with a unit (ms or s), and after an
``@`` the share of requests that must meet them all (99% unless said). The objective used everywhere is goodput (requests
per second that met every target); the share is the verdict.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, DecimalException
from typing import Final, Protocol

from runtime.clock import Clock
from runtime.records import RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2e")
_TARGET = re.compile(r"^\s*([A-Za-z0-9_]+)\s*=\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*)\s*$")
_UNITS = {"ms": 1, "s": 1000}
_MOST_MS: Final = 1e15  # as of any figure of a profile
_BOUNDS = f"above 0 and at most {_MOST_MS:g} ms"
_EXAMPLE = "ttft=500ms,tpot=50ms@99%"
_PERIODS: Final = 64  # changes of the SLOs that are remembered
_MOST_DIGITS: Final = 9  # behind the point of a percentage


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets in milliseconds (None: no target) and the share of requests that must meet them all jointly.

    ``ttft_ms`` bounds the time to first token, ``tpot_ms`` the time per output token, ``e2e_ms`` that to the last one;
    ``attainment``, above 0 and at most 1, is the share: 0.99 is 99%. ``itl_ms`` bounds the request's own 99th percentile gap
    between tokens. A request with one output token has no TPOT and no ITL and cannot violate them. Raises ``ValueError``
    without a target, or with one that is not above 0 and at most 1e15.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.99

    def __post_init__(self) -> None:
        if all(target is None for target in self.targets_ms.values()):
            raise ValueError(f"an SLO needs at least one of {', '.join(METRICS)}; for example {_EXAMPLE}")
        for name, target in self.targets_ms.items():
            if target is not None and not 0 < target <= _MOST_MS:
                raise ValueError(f"{name}_ms is {target}; it must be {_BOUNDS}")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment is {self.attainment}; it must be above 0 and at most 1 (0.99 is 99%)")

    @property
    def targets_ms(self) -> dict[str, float | None]:
        return {name: getattr(self, f"{name}_ms") for name in METRICS}

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Read ``text`` such as ``ttft=500ms,tpot=50ms@99%``. Raises ``ValueError`` that quotes the part it could not read."""
        body, at, share = text.partition("@")
        attainment = 0.99
        if at:
            try:
                fraction = Decimal(share.strip().removesuffix("%"))  # in decimal, or 99.9% would not be 0.999
                attainment = float(fraction / 100 if share.strip().endswith("%") else fraction)
            except (DecimalException, ValueError):
                raise ValueError(f'"@{share}" is not a share; write @99% or @0.99') from None
            if not 0 < attainment <= 1:
                raise ValueError(f'"@{share}" is not a share; it must be above 0% and at most 100%, like @99% or @0.99')
        targets: dict[str, float] = {}
        for part in body.split(","):
            match = _TARGET.match(part)
            if match is None:
                raise ValueError(f'"{part.strip()}" is not a target; write {_EXAMPLE}')
            name, number, unit = match.groups()
            if name not in METRICS:
                raise ValueError(f'"{name}" is not a metric; the metrics are {", ".join(METRICS)}')
            if name in targets:
                raise ValueError(f'"{name}" is given twice')
            try:
                value, exact = float(number), Decimal(number)  # in decimal, or 1.001s would not be 1001ms
            except (DecimalException, ValueError):
                raise ValueError(f'"{part.strip()}": {number} is not a number') from None
            if not unit:
                raise ValueError(f'"{part.strip()}" has no unit; write {name}={number}ms or {name}={value / 1000:g}s')
            if unit not in _UNITS:
                raise ValueError(f'"{part.strip()}": {unit} is not a unit; the units are {", ".join(_UNITS)}')
            if not 0 < value * _UNITS[unit] <= _MOST_MS:
                raise ValueError(f'"{part.strip()}" must be {_BOUNDS}')
            targets[name] = float(exact * _UNITS[unit])
        return cls(**{f"{name}_ms": value for name, value in targets.items()}, attainment=attainment)

    @classmethod
    def of(cls, value: SLO | str) -> SLO:
        """``value`` if it is an SLO, or parsed from text. Raises ``ValueError`` for anything else."""
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, cls):
            raise ValueError(f"slo is {value!r}; it must be an SLO or text such as {_EXAMPLE}")
        return value

    def __str__(self) -> str:
        """The spelling that :meth:`parse` reads back to an equal SLO, to the last digit."""
        targets = ",".join(f"{name}={_digits(value)}ms" for name, value in self.targets_ms.items() if value is not None)
        percent = (Decimal(repr(float(self.attainment))) * 100).normalize()
        return f"{targets}@{percent:f}%"

    def violated(self, record: RequestRecord) -> tuple[str, ...]:
        """The metrics of ``record`` that missed their target. A request that did not complete misses ``completion``."""
        if not record.completed:
            return ("completion",)
        missed = []
        if self.ttft_ms is not None and _missed(record.ttft, self.ttft_ms):
            missed.append("ttft")
        if self.tpot_ms is not None and _missed(record.tpot, self.tpot_ms):
            missed.append("tpot")
        if self.itl_ms is not None and _missed(record.itl_p99, self.itl_ms):
            missed.append("itl")
        if self.e2e_ms is not None and _missed(record.e2e, self.e2e_ms):
            missed.append("e2e")
        return tuple(missed)

    def met(self, record: RequestRecord) -> bool:
        """Whether ``record`` completed and met every target."""
        return not self.violated(record)


def _missed(seconds: float | None, target_ms: float) -> bool:
    return seconds is not None and not seconds * 1000 <= target_ms  # so that a time that is no number is a miss


def first_target(slo: SLO) -> float:
    """Seconds from its arrival by which a request's first token must have come (TTFT, or E2E if that is less); inf if never."""
    return min((t for t in (slo.ttft_ms, slo.e2e_ms) if t is not None), default=math.inf) / 1e3


def _digits(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A kind of request: its ``name``, its own ``slo`` (or the spelling of one), and ``weight``, its worth relative to others.

    Raises ``ValueError`` for an empty name, an SLO that cannot be read and a weight that is not above 0.
    """

    name: str
    slo: SLO
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a request class needs a name")
        object.__setattr__(self, "slo", SLO.of(self.slo))
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight of class {self.name} is {self.weight}; it must be above 0")

    @classmethod
    def parse(cls, text: str, *, where: str = "class") -> RequestClass:
        """Read ``text`` such as ``chat:ttft=300ms,tpot=30ms@95%*2``: name, SLO, weight (1 unless given). Raises ``ValueError``;
        ``where`` says who gave it."""
        name, colon, rest = text.partition(":")
        name = name.strip()
        slo, star, weight = rest.partition("*")
        if not colon or not name or not slo:
            raise ValueError(
                f"{where} is {text!r}; it must be NAME:SLO or NAME:SLO*WEIGHT, as chat:ttft=300ms,tpot=30ms*2"
            )
        if name == "default":
            raise ValueError(f"{where} {name}: its SLO is that of all other requests")
        try:
            worth = float(weight.replace("_", "?")) if star else 1.0  # only Python takes 1_0 for a number
        except ValueError:
            raise ValueError(f'{where} {name}: weight is "{weight}"; it must be a number above 0, as *0.2') from None
        try:
            return cls(name, SLO.parse(slo), worth)
        except ValueError as error:
            raise ValueError(f"{where} {name}: {error}") from None

    def __str__(self) -> str:
        """The spelling that :meth:`parse` reads back to an equal class."""
        return f"{self.name}:{self.slo}" + ("" if self.weight == 1 else f"*{_digits(self.weight)}")


def find_slo(slos: Mapping[str, SLO], request_class: str) -> SLO | None:
    """The SLO of ``request_class`` among ``slos``: its own, or that of ``default``; None where there is neither."""
    return slos.get(request_class) or slos.get("default")


def slo_for(slos: SLO | Mapping[str, SLO], request_class: str) -> SLO:
    """As :func:`find_slo`, or the one SLO there is for all classes. Raises ``ValueError`` where there is none."""
    slo = slos if isinstance(slos, SLO) else find_slo(slos, request_class)
    if slo is None:
        known = ", ".join(slos) if isinstance(slos, Mapping) else ""
        raise ValueError(
            f"no SLO for class {request_class}, and no default; the classes with one are {known or 'none'}"
        )
    return slo


def slos_of(slo: SLO | Mapping[str, SLO], classes: Iterable[RequestClass]) -> SLO | Mapping[str, SLO]:
    """The SLO of each class, ``slo`` being that of all others (or those of some); without classes ``slo`` as it is."""
    own = {one.name: one.slo for one in classes}
    if not own:
        return slo
    return ({"default": slo} if isinstance(slo, SLO) else dict(slo)) | own


def engine_slos(slo: SLO | str | None, classes: Iterable[RequestClass]) -> dict[str, SLO]:
    """What an engine is built with: the SLO of each class, and ``slo``, or its spelling, for all other requests, if there is one.
    Raises ``ValueError`` for a spelling that cannot be read."""
    found = {one.name: one.slo for one in classes}
    if slo is not None:
        found["default"] = SLO.of(slo)
    return found


def request_classes(texts: Iterable[str], *, where: str) -> list[RequestClass]:
    """Each as :meth:`RequestClass.parse` reads it. Raises ``ValueError``; ``where`` says who gave them."""
    made: dict[str, RequestClass] = {}
    for text in texts:
        one = RequestClass.parse(text, where=where)
        if one.name in made:
            raise ValueError(f"{where} {one.name}: it is given twice")
        made[one.name] = one
    return list(made.values())


class SLOHistory:
    """The SLO of each class over time: a request is judged by that of when it came. Any thread may change it, and read it."""

    __slots__ = ("_lock", "_periods")

    def __init__(self, slos: Mapping[str, SLO]) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt a change by another one
        self._periods: tuple[tuple[float, Mapping[str, SLO]], ...] = ((-math.inf, slos),)

    @property
    def periods(self) -> tuple[tuple[float, Mapping[str, SLO]], ...]:
        """(from when on, s; the SLOs), the latest last; the very same object until they change."""
        return self._periods

    @property
    def latest(self) -> Mapping[str, SLO]:
        return self._periods[-1][1]

    @property
    def since(self) -> float:
        """From when on the latest have been in force, s; -inf: from the beginning."""
        return self._periods[-1][0]

    def change(self, slos: Mapping[str, SLO], since: float) -> None:
        """Requests that come from ``since`` on are held to ``slos``."""
        with self._lock:
            self._periods = (*self._periods[-_PERIODS:], (since, slos))

    def follow(self, slos: Mapping[str, SLO], clock: Clock) -> None:
        """Where ``slos`` have changed, requests that come from now on are held to them as they are now."""
        with self._lock:
            while (made := dict(slos)) != self.latest:
                self.change(made, clock.now())

    def at(self, time: float) -> Mapping[str, SLO]:
        """Those of requests that came then; of a time long past, the oldest known."""
        return next((slos for since, slos in reversed(self._periods) if since <= time), self._periods[0][1])


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of the offered requests met every target. Cancelled ones are left out and counted apart.

    ``low`` and ``high`` are the 95% Wilson score interval of the share (Wilson 1927): a few hundred requests do not pin
    a 99% share, and the interval says how far off it may be.
    """

    met: int
    offered: int
    cancelled: int
    violations: Mapping[str, int]

    @property
    def share(self) -> float:
        return self.met / self.offered if self.offered else 0.0

    @property
    def low(self) -> float:
        return wilson_interval(self.met, self.offered)[0]

    @property
    def high(self) -> float:
        return wilson_interval(self.met, self.offered)[1]


def attainment(records: Iterable[RequestRecord], slo: SLO | Mapping[str, SLO]) -> Attainment:
    """Attainment of ``records`` under one SLO, or under one for each class (``default`` for classes not named)."""
    met = offered = cancelled = 0
    violations: dict[str, int] = {}
    for record in records:
        if not record.offered:
            cancelled += 1
            continue
        offered += 1
        missed = slo_for(slo, record.request_class).violated(record)
        met += not missed
        for name in missed:
            violations[name] = violations.get(name, 0) + 1
    return Attainment(met, offered, cancelled, violations)


class Counted(Protocol):
    """Requests offered and met, and the attainment they make."""

    @property
    def offered(self) -> int: ...
    @property
    def met(self) -> int: ...
    @property
    def attainment(self) -> float: ...


class CountedClass(Counted, Protocol):
    """Those of one class, and what each of them weighs."""

    @property
    def weight(self) -> float: ...


class CountedByClass(Counted, Protocol):
    """Those of all classes; ``classes`` is empty where there is one SLO for all."""

    @property
    def classes(self) -> Mapping[str, CountedClass]: ...


def share_met(counted: Counted) -> float:
    """Attainment to the last digit, 0 where none was offered; in profiles of earlier versions ``attainment`` is rounded."""
    return counted.met / counted.offered if counted.offered else 0.0


def in_percent(share: float, digits: int = 1, *, target: float | None = None) -> str:
    """``share`` as people read it, ``98.7%``: with more than so many ``digits`` behind the point where rounding would hide the
    last misses (99.98%, not 100.0%) or show the ``target`` met that is missed, or the other way round; – for NaN."""
    if math.isnan(share):
        return "–"
    for more in range(digits, _MOST_DIGITS):
        text = f"{100 * share:.{more}f}"
        whole = share < 1 and Decimal(text) >= 100
        crosses = target is not None and (Decimal(text) >= 100 * Decimal(repr(float(target)))) != (share >= target)
        if not (whole or crosses):
            return f"{text}%"
    return f"{100 * share:.{digits}f}%"  # nearer than any count of requests comes: an error of arithmetic


def common_target(shares: Iterable[float | None]) -> float | None:
    """The attainment that all classes are to have; None where ``shares``, those of each, differ or are not known."""
    named = {*shares}
    return named.pop() if len(named) == 1 else None


def weighted_attainment(counted: CountedByClass) -> float:
    """Weight of the requests that met their SLO, as a share of that of all offered: goodput over what there was to gain."""
    classes = counted.classes.values()
    offered = math.fsum(c.weight * c.offered for c in classes)
    return math.fsum(c.weight * c.met for c in classes) / offered if offered else share_met(counted)


def attained(counted: CountedByClass, slo: SLO, classes: Iterable[RequestClass] = ()) -> bool:
    """Whether each of ``classes`` has the attainment of its own SLO, and all other requests that of ``slo``.

    False if none was offered.
    """
    targets = {one.name: one.slo.attainment for one in classes}
    if not counted.classes:
        return share_met(counted) >= slo.attainment
    offered = [(name, c) for name, c in counted.classes.items() if c.offered]
    return bool(offered) and all(share_met(c) >= targets.get(name, slo.attainment) for name, c in offered)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """The 95% Wilson score interval of a share, (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share, z = successes / trials, 1.959964
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


__all__ = [
    "METRICS",
    "SLO",
    "Attainment",
    "RequestClass",
    "SLOHistory",
    "attained",
    "attainment",
    "common_target",
    "engine_slos",
    "find_slo",
    "first_target",
    "in_percent",
    "request_classes",
    "share_met",
    "slo_for",
    "slos_of",
    "weighted_attainment",
    "wilson_interval",
]
assert {f.name for f in fields(SLO)} == {*(f"{m}_ms" for m in METRICS), "attainment"}
