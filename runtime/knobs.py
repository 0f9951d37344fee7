"""The live knobs and their start-up ceilings.

``Knobs`` change while the engine runs; ``KnobLimits`` do not (buffers, KV pool and graphs are sized by them).
Both are frozen, and neither is ever written back into the other. Everything that handles knobs, from the command
line to the exporters, is derived from ``fields(Knobs)`` and the :class:`KnobSpec` beside each field. A further knob is a
field here and a ceiling in ``KnobLimits``; tests/contract/test_further_knob.py says what else it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any

from runtime.errors import shortened


@dataclass(frozen=True, slots=True)
class KnobSpec:
    """What there is to know about one knob.

    ``log``: ratios matter, not differences. ``short``: its title where room is short. ``usual``: (low, high) between which
    settings worth trying lie. ``batcher``: it means something to a batcher too. ``required``: every file that holds knobs
    names it; a knob that came later is at its default where a file from before lacks it, so its default must change nothing.
    ``searched``: a search tries its values unasked; else it stays at its default unless a range is named.
    """

    name: str
    unit: str
    low: float
    high: float
    log: bool
    integer: bool
    doc: str
    short: str
    usual: tuple[float, float]
    batcher: bool = False
    required: bool = False
    searched: bool = True

    def check(self, value: object, high: float | None = None, *, where: str = "") -> float:
        """Return ``value`` as the knob's type, or raise ``ValueError`` naming field, value and bounds.

        ``high`` lowers the upper bound to an engine's ceiling.
        """
        top = self.high if high is None else high
        if not isinstance(value, (int, float)) or isinstance(value, bool):  # a tuple: a union takes thrice as long
            raise self._wrong(value, top, where)
        if not self.low <= value <= top or (self.integer and value != int(value)):  # NaN and inf are outside
            raise self._wrong(value, top, where)
        return int(value) if self.integer else float(value)

    def read(self, text: str, high: float | None = None, *, where: str = "") -> float:
        """The same of the number that ``text`` is. ``1_000``, which only Python takes for one, is none."""
        try:
            value = float(text) if "_" not in text else inf
        except ValueError:
            value = inf
        # an error quotes what was written
        written = int(value) if value.is_integer() else value if isfinite(value) else text
        return self.check(written, high, where=where)

    def _wrong(self, value: object, top: float, where: str) -> ValueError:
        kind = "a whole number " if self.integer else ""
        allowed = f"it must be {kind}between {self.low:.10g} and {top:.10g} {self.unit}"
        return ValueError(f"{where}{self.name} is {shortened(value)}; {allowed}")


def _knob(default: float, **spec: Any) -> Any:
    """A field with what :class:`KnobSpec` holds besides its name."""
    return field(default=default, metadata=spec)


@dataclass(frozen=True, slots=True)
class Knobs:
    """One setting of the knobs; passed to every ``schedule()`` call, so a change holds from the next step on."""

    max_batch_size: int = _knob(
        256,
        unit="sequences",
        low=1,
        high=65536,
        log=True,
        integer=True,
        doc="most sequences (or items) in one step",
        short="max_batch",
        usual=(2, 512),
        batcher=True,
        required=True,
    )
    max_wait_ms: float = _knob(
        0.0,
        unit="ms",
        low=0,
        high=60000,
        log=False,
        integer=False,
        doc="hold new prompts until the oldest has waited this long, or they fill the budget or the slots",
        short="wait",
        usual=(0, 10),  # in continuous batching it belongs at 0; a few ms may fill a step better
        batcher=True,
        required=True,
    )
    token_budget: int = _knob(
        2048,
        unit="tokens",
        low=1,
        high=1048576,
        log=True,
        integer=True,
        doc="most tokens (decode + prefill) in a step",
        short="budget",
        usual=(16, 8192),
        batcher=True,
        required=True,
    )
    chunk_size: int = _knob(
        2048,
        unit="tokens",
        low=1,
        high=1048576,
        log=True,
        integer=True,
        doc="most prompt tokens of one sequence in one step",
        short="chunk",
        usual=(16, 8192),
        required=True,
    )
    draft_tokens: int = _knob(
        0,
        unit="tokens",
        low=0,
        high=64,
        log=False,
        integer=True,
        doc="most tokens drafted for one decoding sequence and verified in the same step; 0: none",
        short="drafts",
        usual=(0, 8),
        searched=False,  # synthetic prompts and random weights repeat themselves otherwise than real traffic does
    )

    def __post_init__(self) -> None:
        for spec in KNOBS:
            value = getattr(self, spec.name)
            if type(value) is not (int if spec.integer else float) or not spec.low <= value <= spec.high:  # rarely
                object.__setattr__(self, spec.name, spec.check(value))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], *, where: str = "knobs.") -> Knobs:
        """Knobs from ``values`` by name, as a parsed file has them; missing names take the default.

        Raises ``ValueError`` for an unknown name, listing the valid ones, and for a value out of bounds; ``where`` stands
        before the name in it.
        """
        known = {spec.name: spec for spec in KNOBS}
        for name in values:
            if name not in known:
                raise ValueError(f"{where}{name} is not a knob; the knobs are {', '.join(known)}")
        return cls(**{name: known[name].check(value, where=where) for name, value in values.items()})  # type: ignore[arg-type]  # checked by each spec

    def with_(self, /, **changes: float) -> Knobs:
        """A copy with ``changes``: values by name. Raises ``ValueError`` for an unknown name and a value out of bounds."""
        known = [spec.name for spec in KNOBS]
        for name in changes:
            if name not in known:
                raise ValueError(f"{name} is not a knob; the knobs are {', '.join(known)}")
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ checks types

    def as_dict(self) -> dict[str, float]:
        """The value of each knob, by name."""
        return {spec.name: getattr(self, spec.name) for spec in KNOBS}

    @property
    def shown(self) -> list[KnobSpec]:
        """The knobs to tell people of: all but those that came later and are at their default, as if they were not there."""
        return [s for s in KNOBS if s.required or getattr(self, s.name) != getattr(_USUAL, s.name)]

    def __str__(self) -> str:
        return " ".join(f"{spec.name}={getattr(self, spec.name):.10g}" for spec in self.shown)


KNOBS: tuple[KnobSpec, ...] = tuple(KnobSpec(name=f.name, **f.metadata) for f in fields(Knobs))
"""The spec of every knob, in the order of the fields."""

_USUAL = Knobs()


@dataclass(frozen=True, slots=True)
class KnobLimits:
    """Start-up ceilings, one for each knob. Knobs move below them, never above."""

    max_batch_size: int = 1024
    max_wait_ms: float = 10000.0
    token_budget: int = 8192
    chunk_size: int = 8192
    draft_tokens: int = 16

    def __post_init__(self) -> None:
        for spec in KNOBS:
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name), where="limits."))

    def check(self, knobs: Knobs) -> Knobs:
        """Return ``knobs``, or raise ``ValueError`` naming the first one above its ceiling."""
        for spec in KNOBS:
            try:
                spec.check(getattr(knobs, spec.name), high=getattr(self, spec.name))
            except ValueError as error:
                raise ValueError(f"{error} (the engine's ceiling)") from None
        return knobs

    def clamp(self, knobs: Knobs) -> Knobs:
        """``knobs`` with every value above its ceiling lowered to it."""
        return Knobs(**{s.name: min(getattr(knobs, s.name), getattr(self, s.name)) for s in KNOBS})

    def as_dict(self) -> dict[str, float]:
        """The ceiling of each knob, by name."""
        return {spec.name: getattr(self, spec.name) for spec in KNOBS}
