"""Files of JSON Lines that are appended to: whether one that exists holds lines of the same kind."""

from __future__ import annotations

from pathlib import Path

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
