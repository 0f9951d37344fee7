"""Files of JSON Lines that are appended to: whether one that exists holds lines of the same kind, and lines that were cut off.

A writer that dies leaves the beginning of a line. Who goes on behind it takes that away first, and readers leave it out. While
one writes, it holds a lock, or another would take its line away.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

_TAIL = 1 << 16  # bytes that are looked at at a time, for the end of a line
_FIRST_LINE = 1 << 20  # bytes of it that are looked at
_LOCK_TIMEOUT_S, _LOCK_POLL_S = 1.0, 0.01


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


def drop_cut_line(path: str | Path) -> None:
    """Take away what is behind the last whole line of the file at ``path``; of what is no regular file, or not there, nothing."""
    if not os.path.isfile(path):
        return
    with suppress(OSError), open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _TAIL)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            end = begin + found + 1
            if found >= 0:
                break
        file.truncate(end)


def lock(file: IO[Any]) -> bool:
    """Have ``file`` locked until it is closed, or :func:`unlock`. False if somebody else holds it, and does so for a second more.

    Devices and pipes are for many, and some file systems have no locks.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return True
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:  # a file system without locks
            return True


def unlock(file: IO[Any]) -> None:
    """For processes that were forked meanwhile, too: the lock is not theirs."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def append(file: FileIO, text: str) -> None:
    """Write ``text``, whole lines. Raises ``OSError`` where not all of it can be written, and leaves a regular file as it was."""
    left = memoryview(text.encode())
    before = os.fstat(file.fileno()).st_size
    try:
        while left:
            left = left[file.write(left) or 0 :]
    except OSError:
        with suppress(OSError):  # a pipe
            file.truncate(before)
        raise


def whole_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of those in ``text`` that were written to their end and are not blank."""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        if line.strip():
            yield number, line
