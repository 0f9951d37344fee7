"""The essentials of a report for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.report import profile_table as table
from autotune.report.page import Report

_STYLE = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow"}
_LEFT_OUT = ("provenance", "points")


def show(report: Report, console: Console) -> None:
    """The headline, the settings, and what each section found."""
    head = report.headline
    console.print(Text.assemble((head.title, "bold"), "   ", (head.status, _STYLE.get(head.tone, "bold"))))
    facts = Table.grid(padding=(0, 2))
    for name, value in head.facts:
        facts.add_row(Text(name, style="dim"), Text(value))
    console.print(facts)
    table.show(report.evidence.profile, console)
    if report.evidence.profile.confidence is None:  # else the table has said it
        console.print(escape(head.sure), highlight=False)
    console.print()
    found = Table.grid(padding=(0, 2))
    for section in report.sections:
        if section.key not in _LEFT_OUT:
            missing = section.absent is not None
            said = section.absent if section.absent is not None else section.title
            found.add_row(Text(section.topic, style="dim"), Text(said, style="dim" if missing else ""))
    console.print(found)
    for note in head.notes:
        console.print(escape(note), highlight=False, style="yellow")
