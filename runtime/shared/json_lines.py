"""Files of JSON Lines that are appended to: whether one that exists holds lines of the same kind, and lines that were cut off.

A writer that dies, or whose disk is full, leaves the beginning of a line. Who goes on behind it ends that line with
:data:`CUT`, and readers leave it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CUT: Final = "\x18\n"  # "cancel", which JSON never holds as it is
_FIRST_LINE = 1 << 20  # bytes of it that are looked at


def holds_something_else(path: str | Path, *keys: str) -> bool:
    """Whether the first line of the file at ``path`` is no JSON object with these ``keys``.

    False for an empty file, a pipe and a device, and for one that cannot be read: such a file may be of the right kind.
    """
    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            first = file.readline(_FIRST_LINE)
    except OSError:
        return False
    return bool(first) and not (first.startswith(b"{") and all(f'"{key}":'.encode() in first for key in keys))


def cut_off(path: str | Path) -> bool:
    """Whether the file at ``path`` ends within a line. False for an empty file, and for what is no file or cannot be read."""
    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of those in ``text`` that were written to their end and are not blank."""
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        if line.strip() and not line.endswith(CUT[0]):
            yield number, line
