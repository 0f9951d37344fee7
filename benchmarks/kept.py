"""Parts of a benchmark that are done, in a file: a run of an hour may be made in pieces, and goes on from what a kill left."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Kept:
    """One JSON object a line; what was ``requested`` of a part is its key. ``path`` None: nothing is known or kept."""

    def __init__(self, path: Path | None, requested: Mapping[str, object]) -> None:
        self._path, self._requested = path, json.loads(json.dumps(requested))

    def known(self) -> list[dict[str, Any]]:
        """The parts of whom the same was requested, in order. A line that a kill cut short is passed over."""
        if self._path is None or not self._path.exists():
            return []
        found = []
        for line in self._path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                part = json.loads(line)
                if part.pop("requested", None) == self._requested:
                    found.append(part)
        return found

    def add(self, part: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("\n" * self._cut_short() + json.dumps({"requested": self._requested, **part}) + "\n")

    def _cut_short(self) -> bool:
        assert self._path is not None
        return self._path.exists() and not self._path.read_bytes().endswith(b"\n")
