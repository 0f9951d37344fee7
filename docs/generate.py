"""Writes the pages of docs/reference that follow from the code: ``python docs/generate.py``. A test holds them to it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from autotune.cli.main import app
from autotune.control import controllers
from autotune.control.controllers.registry import CONTROLLERS, OF_BATCHERS
from runtime.knobs import KNOBS, KnobLimits, Knobs

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `python docs/generate.py` from the code; edit the code instead. -->"


def command_line() -> str:
    """Every verb of ``autotune`` with its arguments and options."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        NOTE,
        "",
        "Every verb has `--help`. Exit codes: 0 done; 1 ran and fell short (the SLO cannot be",
    ]
    lines += [
        "met, a profile is stale); 2 bad input, in one line; 130 stopped by Ctrl-C, with what was found kept.",
        "",
    ]
    lines += ["| verb | |", "|---|---|"]
    lines += [f"| [`{name}`](#autotune-{name}) | {_cell(verb.short_help)} |" for name, verb in group.commands.items()]
    for name, verb in group.commands.items():
        lines += ["", f"## autotune {name}", "", _text(verb.help), "", _text(verb.epilog), "", "| | |", "|---|---|"]
        lines += [f"| {_name(parameter)} | {_cell(_help(parameter))} |" for parameter in verb.params]
    return "\n".join(lines) + "\n"


def knobs() -> str:
    """The knobs and the controllers."""
    lines = ["# Knobs and controllers", "", NOTE, "", "## Knobs", ""]
    lines += [
        "| knob | unit | least | most | default | ceiling unless given | what it bounds |",
        "|---|---|---|---|---|---|---|",
    ]
    limits = KnobLimits()
    for spec in KNOBS:
        figures = (spec.low, spec.high, getattr(Knobs(), spec.name), getattr(limits, spec.name))
        lines.append(f"| `{spec.name}` | {spec.unit} | {' | '.join(f'{n:,.10g}' for n in figures)} | {spec.doc} |")
    lines += ["", "## Controllers", "", "| name | for | what it does |", "|---|---|---|"]
    for names, kind in ((CONTROLLERS, "engines"), (OF_BATCHERS, "batchers")):
        for name in names:
            about = str(import_module(f"{controllers.__name__}.{name}").__doc__).partition("\n\n")[0]
            lines.append(f"| `{name}` | {kind} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


PAGES = {"cli.md": command_line, "knobs.md": knobs}


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
