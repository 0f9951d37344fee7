"""What kind of file a report is made of, by its content."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autotune.profile import find_profile, shipped_profiles
from autotune.writing import writable
from runtime.errors import InputError

_SNIFFED = 65536


def find(name: str) -> Path:
    """The file ``name``, or the shipped profile of that name. Raises :class:`InputError`."""
    path = find_profile(name)
    if os.path.isdir(path):  # false of a name too long, of which Path.is_dir raises
        raise InputError(f"{name}: is a directory; name a profile, such as {name.rstrip('/')}/tiny-cpu.yaml")
    return path


def is_decision_log(path: Path) -> bool:
    """Whether the first line of ``path`` is a controller's decision. Raises :class:`InputError` if it cannot be read."""
    first = _object(_begin(path).lstrip().partition(b"\n")[0])
    return first is not None and "action" in first and "cause" in first


def _begin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_SNIFFED)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object a line of a log is; None where it is none (a profile is YAML of many lines)."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def place(profile: Path, out: Path | None) -> Path:
    """Where the page goes: ``out``, else beside the profile, or here for one that is shipped. Raises :class:`InputError`."""
    if out is None:
        here = Path() if profile in shipped_profiles().values() else profile.parent
        out = here / f"{profile.stem}.html"
    elif out.suffix not in (".html", ".htm"):
        raise InputError(f"--out: {out} must end in .html, or no browser shows it")
    writable("--out", out)
    if out.exists() and not _ours(out):
        raise InputError(f"--out: {out} exists and is no report; name another file")
    return out


def _ours(page: Path) -> bool:
    try:
        with page.open("rb") as file:
            return b'<meta name="generator" content="autotune' in file.read(_SNIFFED)
    except OSError:
        return False
