"""The kernels' own tests, those of ``tests/unit`` that run on a GPU where there is one; without the plugins of the test suite."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.gpu.place import LeftOutError, Place

_ROOT: Final = Path(__file__).parents[3]
FILES: Final = ("rope", "rows", "sampling", "sampler", "plan", "attention", "linear", "launch")
"""Of the kernels, by their names in ``tests/unit/test_kernel_*.py``. A dry run has the norms of one, to see that pytest starts:
interpreted they all take minutes, and ``make test`` runs them."""
ON_GPU: Final = ("models", "decode_graphs", "pool_size", "batched_module")
"""Of ``tests/gpu``, without the one of the profile command, which parts of their own run."""
_LIMIT_S: Final = 500


def run(place: Place, argument: str) -> None:
    for package in ("pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            raise LeftOutError(f"it needs {package}, which is not installed (benchmarks/gpu/wheels.txt)")
    files = [f"tests/unit/test_kernel_{name}.py" for name in (("rows",) if place.dry else FILES)]
    if not place.dry:
        files += [f"tests/gpu/test_{name}.py" for name in ON_GPU]
    settings = place.folder / "pytest.ini"
    settings.write_text(
        "[pytest]\nmarkers =\n  slow: long\n  unit: of one module\n  gpu: needs a GPU\n", encoding="utf-8"
    )
    command = [
        sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(_ROOT), "--import-mode=importlib", "-q", "-p",
        "no:cacheprovider", "--tb=short", *(["-k", "norm", "-m", "not slow"] if place.dry else []), *files,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    print(done.stdout[-20_000:], done.stderr[-4000:], flush=True)
    lines = done.stdout.strip().splitlines()
    place.keep("summary", lines[-1] if lines else "nothing was said")
    place.keep("failed", [line for line in lines if line.startswith(("FAILED", "ERROR"))])
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}")
