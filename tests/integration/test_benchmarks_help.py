"""Every benchmark that a person can start says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.beside]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
STARTED_BY_OTHERS = {
    "batcher.load",
    "batcher.serve_bento",
    "batcher.serve_lit",
    "batcher.serve_ours",
    "batcher.serve_ray",
    "controller_live.thief",
}
"""Processes that a benchmark starts for itself: they read from stdin, or take a port and nothing else."""


def started() -> set[str]:
    """Modules with a main of their own, and packages that can be run."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            parts = path.relative_to(FOLDER).with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return found


def test_those_that_nobody_starts_by_hand_are_still_there() -> None:
    assert started() > STARTED_BY_OTHERS


@pytest.mark.parametrize("name", sorted(started() - STARTED_BY_OTHERS))
def test_it_answers_help(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:") and done.stderr == ""
