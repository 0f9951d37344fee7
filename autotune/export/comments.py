"""The comments of a file: where its figures come from, and beside each setting what it was here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from autotune.export.source import Source
from autotune.export.target import Entry, ExportTarget, Fit
from runtime.version import __version__

MARK = "written by `autotune export`"
"""In the first line of every file, so that one written by hand is never overwritten."""

_WIDTH = 116


def one_line(text: str) -> str:
    """``text`` as part of a comment: whatever a profile holds, it cannot begin a line of its own."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def header(target: ExportTarget, source: Source, notes: Sequence[str], command: str) -> list[str]:
    """Where the settings come from, as lines without comment signs. The same profile gives the same lines."""
    lines = [f"Settings for {target.title} {target.version}, {MARK} {__version__}.", ""]
    lines += _wrapped(one_line(source.origin(target.title)))
    lines.append("")
    for name, text in source.facts().items():
        lines += _wrapped(f"{name:<10}{one_line(text)}", indent=10)
    if notes:
        lines.append("")
    for note in notes:
        lines += _wrapped(f"WARNING: {one_line(note)}")
    return [*lines, "", f"Start it with:  {one_line(command)}"]


def commented(lines: Sequence[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def comment(entry: Entry) -> str:
    """What ``entry`` was here, and what is to be said of it."""
    label = "approximate: " if entry.lossy and entry.written else ""
    note = f"; {label}{one_line(entry.note)}" if entry.note else ""
    return commented(_wrapped(f"{one_line(entry.source)}: {entry.doc}{note}", indent=2))


def note_of(fit: Fit, said: str, harmless: str, about: str) -> str:
    """What there is to say of a row: nothing for an exact one with nothing ``about`` it."""
    if fit is Fit.EXACT:
        return about
    reason = harmless if fit is Fit.APPROXIMATE and harmless else said + (f" ({harmless})" if harmless else "")
    return "; ".join(part for part in (about, reason) if part)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
