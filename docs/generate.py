"""Writes the pages of docs/reference that follow from the code: ``python docs/generate.py``. A test holds them to it."""

from __future__ import annotations

import inspect
import json
import re
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import typer

import autotune
import runtime
from autotune.cli.main import app
from autotune.control import controllers
from autotune.control.controllers.registry import CONTROLLERS, OF_BATCHERS
from autotune.profile.schema import profile_schema
from runtime.knobs import KNOBS, KnobLimits, Knobs

FOLDER = Path(__file__).parent / "reference"
_NO_BOUND = 1e15  # of what is only kept from being absurd
NOTE = "<!-- Written by `python docs/generate.py` from the code; edit the code instead. -->"


def command_line() -> str:
    """Every verb of ``autotune`` with its arguments and options."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        NOTE,
        "",
        "Every command has `--help`. Exit codes: 0 done; 1 the command ran but fell short (the SLO cannot be",
    ]
    lines += [
        "met, a profile is stale); 2 bad input, reported in one line; 130 stopped by Ctrl-C, with the results so far stored.",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#autotune-{name}) | {_cell(verb.short_help)} |" for name, verb in group.commands.items()]
    for name, verb in group.commands.items():
        lines += ["", f"## autotune {name}", "", _text(verb.help), "", _text(verb.epilog), ""]
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {_name(parameter)} | {_cell(_help(parameter))} |" for parameter in verb.params]
    return "\n".join(lines) + "\n"


def knobs() -> str:
    """The knobs and the controllers."""
    lines = ["# Knobs and controllers", "", NOTE, "", "## Knobs", ""]
    lines += [
        "| knob | unit | min | max | default | default ceiling | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    limits = KnobLimits()
    for spec in KNOBS:
        figures = (spec.low, spec.high, getattr(Knobs(), spec.name), getattr(limits, spec.name))
        lines.append(f"| `{spec.name}` | {spec.unit} | {' | '.join(f'{n:,.10g}' for n in figures)} | {spec.doc} |")
    lines += ["", "## Controllers", "", "| name | controls | what it does |", "|---|---|---|"]
    for names, kind in ((CONTROLLERS, "engines, batchers"), (OF_BATCHERS, "batchers")):
        for name, make in names.items():
            module = make.__module__.removeprefix(f"{controllers.__name__}.").partition(".")[0]
            about = str(import_module(f"{controllers.__name__}.{module}").__doc__).partition("\n\n")[0]
            lines.append(f"| `{name}` | {kind} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def profile_fields() -> str:
    """Every field of a profile, and of the parts it is made of, from the JSON schema that editors are given."""
    schema = profile_schema()
    lines = ["# Fields of a profile", "", NOTE, ""]
    lines += [
        "[profile-file.md](profile-file.md) explains the parts. A field without a default is required.",
        "",
    ]
    parts = {"the profile": schema, **schema["$defs"]}
    for name, part in parts.items():
        if "properties" not in part:
            continue
        about = str(part.get("description", "")).partition("\n\n")[0]
        lines += [f"## {name}", "", *([_text(about), ""] if about else [])]
        lines += ["| field | kind | meaning |", "|---|---|---|"]
        for field, facts in part["properties"].items():
            default = f" (default: {json.dumps(facts['default'])})" if "default" in facts else ""
            lines.append(
                f"| `{field}` | {_cell(_kind(facts))} | {_cell(str(facts.get('description', '')) + default)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _kind(facts: dict[str, Any]) -> str:
    """What a field of such a JSON schema holds, with its bounds."""
    if "$ref" in facts:
        name = str(facts["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in facts:
        return " or ".join(dict.fromkeys(map(_kind, facts["anyOf"])))
    if "const" in facts:
        return f"`{facts['const']}`"
    if "enum" in facts:
        return ", ".join(f"`{value}`" for value in facts["enum"])
    kind = str(facts.get("type", "any"))
    if kind == "array":
        if "prefixItems" in facts:
            return "list: " + ", ".join(map(_kind, facts["prefixItems"]))
        return f"list of: {_kind(facts.get('items', {}))}"
    if kind == "object":
        of = facts.get("additionalProperties")
        return f"mapping to: {_kind(of)}" if isinstance(of, dict) else "mapping"
    words = {"integer": "whole number", "string": "text", "boolean": "true or false", "null": "null"}
    bounds = [
        f"{sign} {facts[name]:.10g}"
        for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if name in facts and facts[name] < _NO_BOUND
    ]
    return ", ".join([words.get(kind, kind), *bounds])


def python() -> str:
    """The public names of ``runtime`` and ``autotune``: signatures and docstrings."""
    lines = ["# Python", "", NOTE, ""]
    lines += [
        "The names that `runtime` and `autotune` export. [examples/](../../examples) has programs that use them.",
        "",
    ]
    for package in (runtime, autotune):
        names = [name for name in package.__all__ if not name.startswith("_")]
        found = {name: getattr(package, name) for name in names}
        errors = {
            name: value for name, value in found.items() if isinstance(value, type) and issubclass(value, Exception)
        }
        for name, value in found.items():
            if name not in errors:
                lines += _public(f"{package.__name__}.{name}", value)
        if errors:
            lines += [f"## Errors of {package.__name__}", "", "| error | raised |", "|---|---|"]
            lines += [f"| `{name}` | {_cell(_plain(inspect.getdoc(value)))} |" for name, value in errors.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _public(name: str, value: Any) -> list[str]:
    """A function, a class with its public methods and properties, or the values of an enumeration or a ``Literal``."""
    lines, about = [f"## {name}", ""], _paragraphs(inspect.getdoc(value))
    if values := get_args(value):
        return [*lines, "One of " + ", ".join(f"`{one}`" for one in values) + ".", ""]
    if isinstance(value, type) and issubclass(value, Enum):
        return [*lines, *about, "", "One of " + ", ".join(f"`{one.value}`" for one in value) + ".", ""]
    if not getattr(value, "_is_protocol", False):
        lines += ["```text", _signature(name.rpartition(".")[2], value), "```", ""]
    members = _members(value) if isinstance(value, type) else []
    return [*lines, *about, "", *(["| | |", "|---|---|", *members, ""] if members else [])]


def _members(value: type) -> list[str]:
    """Those of the class and of the classes of ours that it derives from."""
    kept: dict[str, Any] = {}
    for one in value.__mro__:
        if one.__module__.split(".")[0] in ("runtime", "autotune"):
            kept = {**vars(one), **kept}
    found = []
    for name, what in kept.items():
        if name.startswith("_") or not (
            isinstance(what, property | classmethod | staticmethod) or inspect.isfunction(what)
        ):
            continue
        shown = name if isinstance(what, property) else _signature(name, getattr(value, name), wide=1000)
        if about := inspect.getdoc(what):
            found.append(f"| `{_cell(shown)}` | {_cell(_plain(about))} |")
    return found


def _paragraphs(text: str | None) -> list[str]:
    return "\n\n".join(map(_plain, (text or "").split("\n\n"))).split("\n")


def _signature(name: str, value: Any, wide: int = 100) -> str:
    """As it is written in the source, a parameter to a line where it is longer than ``wide`` characters."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return name
    parts, keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            parts, keyword = [*parts, "*"], True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword = keyword or stars == "*"
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    given = signature.return_annotation
    returns = "" if given in (signature.empty, "None", None) or isinstance(value, type) else f" -> {_annotation(given)}"
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= wide else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _annotation(given: Any) -> str:
    given = getattr(given, "__forward_arg__", given)
    return given if isinstance(given, str) else getattr(given, "__name__", str(given))


def _default(value: Any) -> str:
    """None of an address in memory, such as that of a factory."""
    text = repr(value)
    return "…" if " at 0x" in text or text.startswith("<") else text


def _plain(text: str | None) -> str:
    """Without roles and double backticks of reStructuredText."""
    return _text(re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text or "")).replace("``", "`")


PAGES = {"cli.md": command_line, "knobs.md": knobs, "profile-fields.md": profile_fields, "python.md": python}


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{option}{value}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _help(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if parameter.param_type_name == "option" and not parameter.is_flag and isinstance(default, int | float | str):
        text += f" (default: {default})"
    return text


def _cell(text: str | None) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    for page, make in PAGES.items():
        (FOLDER / page).write_text(make(), encoding="utf-8")
