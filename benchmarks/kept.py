"""Parts of a benchmark that are done, in a file: a run of an hour may be made in pieces, and goes on from what a kill left.

A part counts for the code that made it, :func:`code_digest`; what other code made stays in the file, and is said to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.command import say

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = tuple(
    f"{folder}/**/*.{kind}" for folder in ("autotune", "runtime", "benchmarks") for kind in ("py", "c")
)
DATA: Final = (
    "autotune/workload/*.json",
    "benchmarks/gpu_truth/tables/*.npz",
    "benchmarks/data/controller_rivals.json",
    "benchmarks/data/two_cores.yaml",
    "profiles/*.yaml",
)
"""What results depend on beside the source. What benchmarks themselves find and keep is not among it."""


def code_digest(*more: Path) -> str:
    """Of :data:`SOURCE` and :data:`DATA`, and of the files ``more``, in short: what is of one digest may stand together."""
    paths = {path.relative_to(ROOT).as_posix(): path for pattern in (*SOURCE, *DATA) for path in ROOT.glob(pattern)}
    digest = hashlib.sha256()
    for name, path in sorted((paths | {path.name: path for path in more}).items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


class Kept:
    """One JSON object a line; what was ``requested`` of a part, and the ``code`` that made it, are its key. ``path`` None:
    nothing is known or kept. ``code`` None: :func:`code_digest`."""

    def __init__(self, path: Path | None, requested: Mapping[str, object], code: str | None = None) -> None:
        self._path, self._requested = path, json.loads(json.dumps(requested))
        self._code = code_digest() if path is not None and code is None else code

    def known(self) -> list[dict[str, Any]]:
        """The parts of whom the same was requested, in order. A line that a kill cut short is passed over; so is what other code
        made, which is said."""
        if self._path is None or not self._path.exists():
            return []
        found, others = list[dict[str, Any]](), 0
        for line in self._path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                part = json.loads(line)
                if part.pop("requested", None) != self._requested:
                    continue
                if part.pop("code", None) == self._code:
                    found.append(part)
                else:
                    others += 1
        if others:
            say(f"{self._path}: {others} of the parts there are of other code; they stay, and are not counted")
        return found

    def add(self, part: Mapping[str, Any]) -> None:
        if self._path is not None:
            line = json.dumps({"requested": self._requested, "code": self._code, **part})
            begin = "\n" if self._cut_short() else ""
            with self._path.open("a") as file:
                file.write(f"{begin}{line}\n")

    def _cut_short(self) -> bool:
        assert self._path is not None
        return self._path.exists() and not self._path.read_bytes().endswith(b"\n")
