"""``key=value`` options of a workload's spelling, read once, with errors that list the choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import overload

from runtime.errors import InputError


class Options:
    """Values by name. Numbers may be fractions (``1/8``). Every reader names field, value and what is allowed."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    @classmethod
    def parse(cls, parts: list[str], allowed: tuple[str, ...]) -> Options:
        """Read ``["rate=2", "length=1/8"]``; only ``allowed`` names, each once."""
        values: dict[str, str] = {}
        for part in parts:
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in allowed:
                raise InputError(f"{name!r} is no option of it; the options are {', '.join(allowed)}")
            if not equals or not value:
                raise InputError(f"{name} has no value; write {name}=…")
            if name in values:
                raise InputError(f"{name} is given twice")
            values[name] = value
        return cls(values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @overload
    def text(self, name: str, default: str) -> str: ...
    @overload
    def text(self, name: str, default: None) -> str | None: ...
    def text(self, name: str, default: str | None) -> str | None:
        return self._values.get(name, default)

    @overload
    def number(self, name: str, default: float, *, zero: bool = False) -> float: ...
    @overload
    def number(self, name: str, default: None, *, zero: bool = False) -> float | None: ...
    def number(self, name: str, default: float | None, *, zero: bool = False) -> float | None:
        """A finite number above 0 (or at least 0)."""
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            top, slash, bottom = text.partition("/")
            value = float(top) / float(bottom) if slash else float(top)
        except (ValueError, ZeroDivisionError):
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise InputError(
                f"{name} is {text!r}; it must be a number {'at least' if zero else 'above'} 0, such as 2, 0.5 or 1/8"
            )
        return value

    @overload
    def whole(self, name: str, default: int, *, low: int = 1) -> int: ...
    @overload
    def whole(self, name: str, default: None, *, low: int = 1) -> int | None: ...
    def whole(self, name: str, default: int | None, *, low: int = 1) -> int | None:
        if name not in self._values:
            return default
        text = self._values[name]
        if not text.isdecimal() or int(text) < low:
            raise InputError(f"{name} is {text!r}; it must be a whole number, at least {low}")
        return int(text)


def fraction(scale: float) -> str:
    """A scale in the spelling that :meth:`Options.number` reads: 0.125 is 1/8."""
    simple = Fraction(scale).limit_denominator(1024)
    return f"{scale:g}" if simple.denominator in (1, 1024) else str(simple)
