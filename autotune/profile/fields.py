"""The kinds of fields a profile has beside plain figures: knobs, ceilings and SLO as people write them, moments, file names.

Each carries its JSON schema, so that what an editor accepts is what loading accepts.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from runtime.errors import shortened
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import METRICS, SLO, RequestClass

LEAST_RATE: Final = 1e-6
"""Requests/s. Beyond these figures nothing is a machine or a load, in options and in profiles alike."""

MOST_RATE: Final = 1e6
MOST_KV_TOKENS: Final = 2**30
"""In a KV pool: far more than the memory of any machine of today holds."""

Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
"""Requests/s that are offered."""


ObjectiveName = Literal["goodput", "mean-e2e"]
"""What settings are compared by."""


def _moment(text: str) -> str:
    try:
        dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f" is {text!r}; it must be a date and time such as 2026-03-01T12:00:00+00:00") from None
    return text


def _file_name(text: str) -> str:
    if text in (".", "..") or "/" in text or "\\" in text or not text.isprintable():
        raise ValueError(f" is {text!r}; it must be the name of a file in the profile's own folder")
    return text


Moment = Annotated[
    str, AfterValidator(_moment), WithJsonSchema({"type": "string", "pattern": r"^\d{4}-?(\d{2}|W\d{2}).*$"})
]
"""A date and time by ISO 8601."""

FileName = Annotated[
    str, Field(min_length=1), AfterValidator(_file_name), WithJsonSchema({"type": "string", "pattern": r"^[^/\\]+$"})
]


def _knobs(value: object) -> Knobs:
    return value if isinstance(value, Knobs) else Knobs(**_values(value, "knobs"))


def _limits(value: object) -> KnobLimits:
    return value if isinstance(value, KnobLimits) else KnobLimits(**_values(value, "limits"))


def _values(value: object, what: str) -> dict[str, Any]:
    """A mapping of knob names to checked values; a profile leaves none to a default but those that are newer than it."""
    names = [spec.name for spec in KNOBS]
    if not isinstance(value, Mapping):
        raise ValueError(f" is {shortened(value)}; it must hold {', '.join(names)}")
    for name in value:
        if name not in names:
            raise ValueError(f".{name} is not a knob; the knobs are {', '.join(names)}")
    for spec in KNOBS:
        if spec.required and spec.name not in value:
            raise ValueError(f".{spec.name} is missing; {what} hold {', '.join(names)}")
    try:
        return {spec.name: spec.check(value[spec.name]) for spec in KNOBS if spec.name in value}
    except ValueError as error:
        raise ValueError(f".{error}") from None


def _slo(value: object) -> SLO:
    if isinstance(value, SLO):
        return value
    if not isinstance(value, str):
        raise ValueError(f" is {shortened(value)}; write ttft=500ms,tpot=50ms@99%")
    try:
        return SLO.parse(value)
    except ValueError as error:
        raise ValueError(f": {error}") from None


def _request_class(value: object) -> RequestClass:
    if isinstance(value, RequestClass):
        return value
    if not isinstance(value, str):
        raise ValueError(f" is {shortened(value)}; write chat:ttft=300ms,tpot=30ms@99%, or batch:e2e=60s*0.2")
    try:
        return RequestClass.parse(value, where="")
    except ValueError as error:
        raise ValueError(f": {str(error).strip()}") from None


def _as_numbers(value: Knobs) -> dict[str, int | float]:
    """Without knobs that came later and are at their default: as a profile from before holds them."""
    return {spec.name: getattr(value, spec.name) for spec in value.shown}


def _knobs_schema(what: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "object",
            "description": what,
            "properties": {
                spec.name: {
                    "type": "integer" if spec.integer else "number",
                    "minimum": spec.low,
                    "maximum": spec.high,
                    "description": f"{spec.doc}, {spec.unit}",
                }
                for spec in KNOBS
            },
            "required": [spec.name for spec in KNOBS if spec.required],
            "additionalProperties": False,
        }
    )


_TARGET = rf"\s*({'|'.join(METRICS)})\s*=\s*\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*(ms|s)\s*"
_SLO_PATTERN = rf"{_TARGET}(,{_TARGET})*(@\s*(\d+\.?\d*|\.\d+)\s*%?\s*)?"
_SLO_SCHEMA = WithJsonSchema(
    {
        "type": "string",
        "pattern": rf"^{_SLO_PATTERN}$",
        "examples": ["ttft=500ms,tpot=50ms@99%"],
    }
)

KnobsField = Annotated[
    Knobs, BeforeValidator(_knobs), PlainSerializer(_as_numbers), _knobs_schema("a setting of the knobs")
]
LimitsField = Annotated[
    KnobLimits,
    BeforeValidator(_limits),
    PlainSerializer(KnobLimits.as_dict),
    _knobs_schema("the engine's start-up ceilings; no knob of this profile is above them"),
]
SLOField = Annotated[SLO, BeforeValidator(_slo), PlainSerializer(str), _SLO_SCHEMA]
ClassField = Annotated[
    RequestClass,
    BeforeValidator(_request_class),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^[^:]+:{_SLO_PATTERN}(\*\s*(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*)?$",
            "examples": ["batch:e2e=60s@99%*0.2"],
        }
    ),
]
"""A request class with its SLO and weight."""
