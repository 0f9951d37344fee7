"""What is wrong with a profile, in one line: the field, the value, and what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from runtime.errors import InputError, shortened
from runtime.knobs import KNOBS

ModelT = TypeVar("ModelT", bound=BaseModel)

_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text, not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "model_attributes_type": "a mapping (name: value)",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}

_Location = tuple[int | str, ...]


def checked(kind: type[ModelT], data: Mapping[str, Any], path: str | Path, schema: Mapping[str, Any]) -> ModelT:
    """The profile of ``kind`` in ``data``, which came from ``path``. Raises :class:`InputError` with the first complaint."""
    try:  # as JSON, in which a list may become a tuple though no type is converted into another
        return kind.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise InputError(f"{path}: {' '.join(explain(error, data, schema).split())}") from None


def explain(error: ValidationError, data: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The first complaint of pydantic as one line; ``schema``, the profile's JSON schema, knows what names there are."""
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return _sentence(first, data, schema) + more


def _sentence(first: Any, data: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    loc: _Location = first["loc"]
    key = loc[-1:] == ("[key]",)  # a name in a mapping whose names are values
    loc = loc[:-1] if key else loc
    where, kind = ".".join(map(str, loc)), first["type"]
    if kind == "extra_forbidden" or key:
        names = names_at(schema, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{_holder(loc)} has {', '.join(names)}"
        return f"{where} is not a field of a profile; {hint}"
    if kind == "missing":
        return f"{where} is missing"
    if kind == "value_error":
        message = str(first["ctx"]["error"])
        return f"{where}{_ceiling(loc, message, data) or message}"
    if kind in _MUST_BE:
        return f"{where} is {shortened(first['input'])}; it must be {_MUST_BE[kind].format(**first.get('ctx', {}))}"
    text = first["msg"][0].lower() + first["msg"][1:]
    return f"{where} is {shortened(first['input'])}; {text}"


def _holder(loc: _Location) -> str:
    return ".".join(map(str, loc[:-1])) or "a profile"


def names_at(schema: Mapping[str, Any], loc: Sequence[int | str]) -> list[str]:
    """The names that the mapping at ``loc`` may hold; none where the schema has no mapping."""
    node = _resolved(schema, schema)
    for part in loc:
        if isinstance(part, int):
            node = _resolved(schema, node.get("items", {}))
        else:
            node = _resolved(schema, node.get("properties", {}).get(part) or node.get("additionalProperties") or {})
    return [*node.get("properties", {}), *node.get("propertyNames", {}).get("enum", ())]


def _resolved(schema: Mapping[str, Any], node: Any) -> Mapping[str, Any]:
    """``node`` with a reference followed; of ``X | null`` the X."""
    while isinstance(node, Mapping) and ("$ref" in node or "anyOf" in node):
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        else:
            node = next(choice for choice in node["anyOf"] if choice.get("type") != "null")
    return node if isinstance(node, Mapping) else {}


def _ceiling(loc: _Location, message: str, data: Mapping[str, Any]) -> str | None:
    """The complaint about a knob below its lower bound, told against the engine's own ceiling when that is known."""
    name = message.partition(" ")[0].lstrip(".")
    spec = next((s for s in KNOBS if s.name == name), None)
    try:
        top = data["engine"]["limits"][name]
        value: Any = data
        for part in loc:
            value = value[part]
        if spec is None or loc[-1:] == ("limits",):
            return None
        spec.check(value[name], high=spec.check(top))
    except ValueError as error:
        return f".{error} (the engine's ceiling)"
    except (KeyError, TypeError, IndexError):
        return None
    return None
