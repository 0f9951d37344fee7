"""An environment with what reads exported files, but for vLLM: SGLang's Python, Triton's client and Ray Serve.

``python -m tests.integration.export_environment`` makes it: some 600 MB. torch and what else this project has is taken from the
environment that runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.environments import BUILD, install, kept, new, reach_outer, unpack

SGLANG, RAY, TRITON = "0.5.23", "2.60.0", "2.60.0"
FOR_SGLANGS_PARSER = ("aiohttp", "ipython", "msgspec", "orjson", "pillow", "pybase64", "pyzmq", "requests")


def export_python() -> Path:
    """Its Python; skips where it is neither there nor to be made."""
    return kept(f"export-{SGLANG}-{RAY}-{TRITON}", _build, reach_outer)


def _build(folder: Path) -> None:
    new(folder)
    unpack(folder, ("sglang",), SGLANG, "sglang")
    reach_outer(folder)  # before pip looks what is there
    install(folder, *FOR_SGLANGS_PARSER)
    install(folder, f"tritonclient[grpc]=={TRITON}", f"ray[serve]=={RAY}")


if __name__ == "__main__":
    os.environ[BUILD] = "1"
    try:
        print(export_python())
    except pytest.skip.Exception as why:
        sys.exit(f"error: {why}")
