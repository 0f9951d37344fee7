"""What stands between a proposal and the knobs: bounds, pins, ceilings, how far one decision may go, and what is too little.

They wrap every controller, so an algorithm need not know them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.knobs import KNOBS, KnobLimits, Knobs, KnobSpec


@dataclass(frozen=True)
class Guardrails:
    """``bounds``: (low, high) the operator allows for a knob. ``pinned``: knobs that stay at a value.

    ``slew``: the largest factor by which one decision may change a knob. ``dead_band``: relative changes below it are not
    worth a new epoch. Knobs measured on a linear scale (``max_wait_ms``) move freely within their bounds.
    """

    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pinned: Mapping[str, float] = field(default_factory=dict)
    slew: float = 4.0
    dead_band: float = 0.1

    def __post_init__(self) -> None:
        specs = {spec.name: spec for spec in KNOBS}
        for where, names in (("bounds", self.bounds), ("pinned", self.pinned)):
            for name in names:
                if name not in specs:
                    raise ValueError(f"{where}.{name} is not a knob; the knobs are {', '.join(specs)}")
        for name, value in self.pinned.items():
            specs[name].check(value, where="pinned.")
            if name in self.bounds:
                raise ValueError(f"{name} is both pinned and bounded; choose one")
        for name, pair in self.bounds.items():
            try:
                low, high = pair
            except (TypeError, ValueError):
                raise ValueError(f"bounds.{name} is {pair!r}; it must be a pair (lowest, highest)") from None
            specs[name].check(low, where="bounds.")
            specs[name].check(high, where="bounds.")
            if low > high:
                raise ValueError(f"bounds.{name} is ({low:g}, {high:g}); the first must not exceed the second")
        if not self.slew > 1:
            raise ValueError(f"slew is {self.slew}; it must be a factor above 1")
        if not 0 <= self.dead_band < 1:
            raise ValueError(f"dead_band is {self.dead_band}; it must be at least 0 and below 1")

    def check(self, limits: KnobLimits) -> None:
        """Raise ``ValueError`` if a pin or a lower bound lies above the engine's ceiling."""
        for spec in KNOBS:
            ceiling = getattr(limits, spec.name)
            for where, value in (
                ("pinned", self.pinned.get(spec.name)),
                ("bounds", self.bounds.get(spec.name, (None,))[0]),
            ):
                if value is not None:
                    spec.check(value, high=ceiling, where=f"{where}.")

    def apply(self, wanted: Knobs, current: Knobs, limits: KnobLimits) -> Knobs:
        """The setting to put in force: ``current`` itself if nothing is worth changing."""
        values: dict[str, Any] = {
            s.name: self._one(s, getattr(wanted, s.name), getattr(current, s.name)) for s in KNOBS
        }
        return limits.clamp(Knobs(**values))

    def holds(self, wanted: Knobs, limits: KnobLimits) -> dict[str, str]:
        """Knobs that a pin or a bound keeps from what ``wanted`` would make of them under ``limits``, each with a sentence that
        says so."""
        found = {}
        free, held = limits.clamp(wanted), self.at_once.apply(wanted, wanted, limits)
        for spec in KNOBS:
            if getattr(free, spec.name) == getattr(held, spec.name):
                continue
            unit = f" {spec.unit}" if spec.unit == "ms" else ""
            if (pin := self.pinned.get(spec.name)) is not None:
                least, why = pin, f"{spec.name} is pinned at {pin:.10g}{unit}"
            else:
                least, high = self.bounds.get(spec.name, (spec.low, spec.high))
                why = f"{spec.name} is bounded to {least:.10g}–{high:.10g}{unit}"
            if least > (ceiling := getattr(limits, spec.name)):
                why += f" (the ceiling is {ceiling:.10g}{unit} now)"
            found[spec.name] = why
        return found

    @property
    def at_once(self) -> Guardrails:
        """The same bounds and pins, for changes of any size."""
        return replace(self, slew=math.inf, dead_band=0.0)

    def _one(self, spec: KnobSpec, wanted: float, current: float) -> float:
        if spec.name in self.pinned:
            return self.pinned[spec.name]
        low, high = self.bounds.get(spec.name, (spec.low, spec.high))
        value = wanted if math.isfinite(wanted) else current
        if spec.log:
            value = min(max(value, current / self.slew), current * self.slew)
        value = min(max(value, low), high)
        inside = low <= current <= high
        if inside and abs(value - current) <= self.dead_band * max(current, 1 if spec.integer else 0):
            return current
        return int(value) if spec.integer else value
