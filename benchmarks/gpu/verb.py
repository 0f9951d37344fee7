"""``autotune VERB … --json``, as a person would start it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, Final

from benchmarks.gpu.place import LeftOutError, Place
from benchmarks.gpu.server import ROOT

_NEEDED: Final = ("pydantic", "typer", "rich", "optuna", "scipy", "plotly")


def autotune(place: Place, *words: str, python: str = sys.executable) -> dict[str, Any]:
    """What it says, run by ``python``. Its progress goes to this process's output. Raises ``RuntimeError`` where it fails; that
    the SLO cannot be met (exit code 1) is no failure."""
    for package in _NEEDED if python == sys.executable else ():
        if importlib.util.find_spec(package) is None:
            raise LeftOutError(f"it needs {package}, which is not installed (benchmarks/gpu/wheels.txt)")
    command = [python, "-m", "autotune.cli.main", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode not in (0, 1) or not lines:
        raise RuntimeError(
            f"autotune {words[0]} ended with {done.returncode}: {done.stdout[-500:] or 'it said nothing'}"
        )
    found: dict[str, Any] = json.loads(lines[-1])
    return found
