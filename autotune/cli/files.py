"""Where a profiling run writes, checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.writing import writable
from runtime.errors import InputError


@dataclass(frozen=True)
class Files:
    """The profile, its raw runs, and the study behind them."""

    profile: Path
    points: Path
    journal: Path

    @classmethod
    def of(cls, out: Path, study: Path | None) -> Files:
        """Paths from ``--out`` and ``--study``. Raises :class:`InputError` when one of them cannot be written."""
        try:
            str(out).encode()
        except UnicodeEncodeError:  # its stem becomes the profile's name, which is text
            raise InputError(f"--out: {str(out)!r} is not UTF-8; a profile's name is text") from None
        if out.suffix not in (".yaml", ".yml"):
            raise InputError(f"--out: {out} must end in .yaml")
        files = cls(out, out.with_suffix(".points.jsonl"), study or out.with_suffix(".journal"))
        for option, path in (("--out", files.profile), ("--out", files.points), ("--study", files.journal)):
            writable(option, path)
        return files
