"""What kind of file a report is made of, by its content."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.profile import find_profile, shipped_profiles
from autotune.profile.text import LARGEST, first_object, is_decision
from autotune.writing import replaceable, writable
from runtime.errors import InputError


def find(name: str) -> Path:
    """The file ``name``, or the shipped profile of that name. Raises :class:`InputError`."""
    path = find_profile(name)
    if os.path.isdir(path):  # false of a name too long, of which Path.is_dir raises
        raise InputError(f"{name}: is a directory; name a profile, such as {name.rstrip('/')}/tiny-cpu.yaml")
    return path


def is_decision_log(path: Path) -> bool:
    """Whether the first line of ``path`` is a controller's decision. Raises :class:`InputError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST).decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    return is_decision(first_object(text))


def place(profile: Path, out: Path | None) -> Path:
    """Where the page goes: ``out``, else beside the profile, or here for one that is shipped. Raises :class:`InputError`."""
    if out is None:
        here = Path() if profile in shipped_profiles().values() else profile.parent
        out = here / f"{profile.stem}.html"
    elif out.suffix not in (".html", ".htm"):
        raise InputError(f"--out: {out} must end in .html, or no browser shows it")
    writable("--out", out)
    replaceable("--out", out, lambda begin: b'<meta name="generator" content="autotune' in begin, "is no report")
    return out
