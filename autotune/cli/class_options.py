"""``--class NAME:SLO[*WEIGHT]``: request classes on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import InputError
from runtime.slo import RequestClass


def request_classes(texts: Sequence[str]) -> list[RequestClass]:
    """``chat:ttft=300ms,tpot=30ms*2``: name, SLO, and weight relative to others (1). Raises :class:`InputError`."""
    made: dict[str, RequestClass] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        slo, _, weight = rest.partition("*")
        if not colon or not name or not slo:
            raise InputError(
                f"--class is {text!r}; it must be NAME:SLO or NAME:SLO*WEIGHT, as chat:ttft=300ms,tpot=30ms*2"
            )
        if name == "default" or name in made:
            taken = "its SLO is --slo" if name == "default" else "it is given twice"
            raise InputError(f"--class {name}: {taken}")
        try:
            made[name] = RequestClass(name, slo, float(weight or 1))  # type: ignore[arg-type]  # it takes a spelling, too
        except ValueError as error:
            raise InputError(f"--class {name}: {error}") from None
    return list(made.values())
