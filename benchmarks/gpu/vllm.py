"""Which Python has vLLM: the one that runs the parts, or in a dry run the one with vLLM's CPU build that is named for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Final

from benchmarks.gpu.place import LeftOutError, Place

PYTHON: Final = "AUTOTUNE_VLLM_PYTHON"
_ON_A_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def vllm_python(place: Place) -> str:
    """That of vLLM: the one that runs this, or in a dry run the one that is named. Sets what its processes need in this one's
    environment. Raises :class:`LeftOutError` where there is none."""
    python = _python(place)
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"} | (_ON_A_CPU if place.dry else {})
    return python


def _python(place: Place) -> str:
    if not place.dry:
        if importlib.util.find_spec("vllm") is None:
            raise LeftOutError("vLLM is not installed")
        return sys.executable
    named = os.environ.get(PYTHON, "")
    if not named:
        raise LeftOutError(f"a dry run starts vLLM only by a Python with its CPU build, named in {PYTHON}")
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        lacking = subprocess.run([named, "-c", looks]).returncode
    except OSError as error:
        raise LeftOutError(f"{PYTHON} is {named}: {error.strerror}") from None
    if lacking:
        raise LeftOutError(f"{PYTHON} is {named}, which has no vLLM")
    return named
