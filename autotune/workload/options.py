"""``key=value`` options of a workload's spelling, read once, with errors that list the choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import overload

from runtime.errors import InputError

_LEAST, _MOST = 1e-9, 10**9  # of numbers that have no bound of their own: nothing overflows


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
    def number(self, name: str, default: float, *, least: float = _LEAST, most: float = _MOST) -> float: ...
    @overload
    def number(self, name: str, default: None, *, least: float = _LEAST, most: float = _MOST) -> float | None: ...
    def number(self, name: str, default: float | None, *, least: float = _LEAST, most: float = _MOST) -> float | None:
        """A number from ``least`` to ``most``."""
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            top, slash, bottom = text.partition("/")
            value = plain_float(top) / plain_float(bottom) if slash else plain_float(top)
        except (ValueError, ZeroDivisionError):
            value = math.nan
        if not least <= value <= most:  # NaN is not
            raise InputError(f"{name} is {text!r}; it must be a number from {least:g} to {most:g}, such as 0.5 or 1/8")
        return value

    @overload
    def whole(self, name: str, default: int, *, low: int = 1, most: int = _MOST) -> int: ...
    @overload
    def whole(self, name: str, default: None, *, low: int = 1, most: int = _MOST) -> int | None: ...
    def whole(self, name: str, default: int | None, *, low: int = 1, most: int = _MOST) -> int | None:
        """A whole number from ``low`` to ``most``."""
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            value = plain_int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= most:
            raise InputError(f"{name} is {text!r}; it must be a whole number from {low} to {most}")
        return value


def plain_float(text: str) -> float:
    """``float(text)``, but for ``1_000``: only Python takes that for a number. Raises ValueError."""
    if "_" in text:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def plain_int(text: str) -> int:
    """``int(text)``, but for ``1_000``. Raises ValueError."""
    if "_" in text:
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def fraction(scale: float) -> str:
    """A scale in the spelling that :meth:`Options.number` reads: 0.125 is 1/8."""
    simple = Fraction(scale).limit_denominator(1024)
    return f"{scale:g}" if simple.denominator in (1, 1024) else str(simple)
