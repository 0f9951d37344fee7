"""``autotune VERB … --json``, as a person would start it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any, Final

from benchmarks.gpu.place import LeftOutError, Place
from benchmarks.gpu.server import ROOT

_NEEDED: Final = ("pydantic", "typer", "rich", "optuna", "scipy", "plotly")
_INTERRUPTED: Final = 130
_PATIENCE_S: Final = 60.0
"""For what is stopped to end a turn, and the engine to close."""


def autotune(place: Place, *words: str, python: str = sys.executable, within_s: float | None = None) -> dict[str, Any]:
    """What it says, run by ``python``. Its progress goes to this process's output. Raises ``RuntimeError`` where it fails; that
    the SLO cannot be met (exit code 1) is no failure. After ``within_s`` it gets Ctrl-C, and what it then says counts."""
    for package in _NEEDED if python == sys.executable else ():
        if importlib.util.find_spec(package) is None:
            raise LeftOutError(f"it needs {package}, which is not installed (benchmarks/gpu/wheels.txt)")
    command = [python, "-m", "autotune.cli.main", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    usual = {0, 1}
    with subprocess.Popen(command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            print(f"autotune {words[0]} takes longer than {within_s:.0f} s, and is stopped", flush=True)
            usual.add(_INTERRUPTED)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=_PATIENCE_S)
        finally:
            process.kill()  # if it still runs
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if process.returncode not in usual or not lines:
        raise RuntimeError(f"autotune {words[0]} ended with {process.returncode}: {said[-500:] or 'it said nothing'}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
