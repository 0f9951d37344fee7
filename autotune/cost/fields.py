"""The kinds of fields that files are made of: numbers with their bounds. NaN and infinity are not figures.

Each carries its JSON schema, made from the same bounds, so that what an editor accepts is what loading accepts.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 1e15  # of any figure: far beyond a real one, and sums and products of such still are numbers
EXACT = 2**53  # up to here a whole number is the same in YAML, JSON and every reader's floating point


class Part(BaseModel):
    """A mapping with named fields and no others; NaN and infinity are not figures."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def check_order(part: Part, *pairs: tuple[str, str]) -> None:
    """Raise ``ValueError`` where the first field of a pair is above the second. A field that is None is not compared."""
    for small, large in pairs:
        below, above = getattr(part, small), getattr(part, large)
        if below is not None and above is not None and below > above:
            raise ValueError(f".{small} is {below:g}; it must be at most {large} ({above:g})")


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=EXACT)]
Positive = Annotated[int, Field(ge=1, le=EXACT)]
Amount = Annotated[float, Field(ge=0, le=MOST)]
"""A time, a rate, a size: zero or more. The field's name or description has the unit."""

AboveZero = Annotated[float, Field(gt=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=65536)]
"""Sequences in a step: no engine's ceiling is higher."""

Row = tuple[Number, ...]
Matrix = tuple[Row, ...]
