"""The page of the results, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DEEP: Final = 2000  # characters of an answer that the page shows; the JSON has all of it


def page(results: Mapping[str, Any]) -> str:
    """Markdown: how each part ended, and then a section a part."""
    lines = ["# What the GPU says", ""]
    if any(one["dry"] for one in results.values()):
        lines += [
            "**A dry run on a CPU with tiny shapes: it shows that the script runs, and no figure means anything.**",
            "",
        ]
    by_code: dict[str, list[str]] = {}
    for name, one in results.items():
        by_code.setdefault(one["code"] or "unknown", []).append(name)
    if len(by_code) > 1:
        each = "; ".join(f"{', '.join(names)} ({code})" for code, names in by_code.items())
        lines += [f"**Not all parts are of the same code: {each}.**", ""]
    lines += ["| part | how it ended | seconds | why |", "|---|---|---|---|"]
    for name, one in results.items():
        lines.append(f"| {name} | {one['state']} | {one['seconds']:.0f} | {_cell(one['why'])} |")
    for name, one in results.items():
        lines += ["", f"## {one['title']}", ""]
        if one["state"] != "done":
            lines += [f"**{one['state']}**: {_cell(one['why'])}" if one["why"] else f"**{one['state']}**", ""]
        lines += _section(one["found"]) if one["found"] else [f"{name} has found nothing."]
    return "\n".join(lines) + "\n"


def _section(found: Mapping[str, Any]) -> list[str]:
    """Answers that are alike in a table, the others in a list."""
    tables: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    others: dict[str, Any] = {}
    for name, value in found.items():
        if (
            isinstance(value, dict)
            and value
            and not any(isinstance(v, dict | list) and len(str(v)) > 200 for v in value.values())
        ):
            tables.setdefault(tuple(value), {})[name] = value
        else:
            others[name] = value
    lines: list[str] = []
    for columns, rows in tables.items():
        if len(rows) < 2:
            others |= rows
            continue
        lines += ["| |" + "|".join(columns) + "|", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {_cell(name)} | " + " | ".join(_cell(row[c]) for c in columns) + " |" for name, row in rows.items()
        ]
        lines.append("")
    lines += [f"- **{name}**: {_cell(value)}" for name, value in others.items()]
    return lines


def _cell(value: Any) -> str:
    text = " ".join(_words(value).split()).replace("|", "\\|")
    return text if len(text) <= _DEEP else f"{text[:_DEEP]}…"


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return str(value)
