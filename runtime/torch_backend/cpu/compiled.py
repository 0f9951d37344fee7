"""Kernels of our own for a CPU, compiled on the machine when they are first needed.

``kernels.c`` is a few hundred lines that any GCC from 9 on compiles in some seconds for the very processor it runs on. What comes
out is kept in the user's cache, by everything that it depends on. Where there is no compiler, or anything else is in the way,
PyTorch's own operations run, and the log says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

SWITCH: Final = "AUTOTUNE_CPU_KERNELS"
"""The environment variable that keeps PyTorch's operations where it is 0."""

_SOURCE: Final = Path(__file__).with_name("kernels.c")
_TYPES: Final = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_FLAGS: Final = (
    "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-Wno-psabi",
)  # fmt: skip
_TIMEOUT_S: Final = 120.0

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class Layer(ctypes.Structure):
    """As in ``kernels.c``."""

    _fields_ = (
        ("query", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("sinks", _POINTER),
        ("out", _POINTER),
        ("query_stride", _INT64),
        ("heads", _INT64),
        ("kv_heads", _INT64),
        ("key_dim", _INT64),
        ("value_dim", _INT64),
        ("window", _INT64),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


class Step(ctypes.Structure):
    """As in ``kernels.c``."""

    _fields_ = (
        ("fresh", _POINTER),
        ("context", _POINTER),
        ("table", _POINTER),
        ("sequences", _INT64),
        ("blocks", _INT64),
        ("block_size", _INT64),
    )


class Kernels:
    """The functions of ``kernels.c`` for one element type; arguments as there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, result
            return found  # type: ignore[no-any-return]

        p, n = _POINTER, _INT64
        self.norm = function("norm", p, p, p, _INT, _FLOAT, n, n, _INT)
        self.add_norm = function("add_norm", p, p, p, p, _INT, _FLOAT, n, n, _INT)
        self.silu_mul = function("silu_mul", p, p, n, n, _INT)
        self.rope_write = function("rope_write", p, p, p, p, p, _INT, _FLOAT, p, p, p, n, n, n, n, _INT)
        self.attend = function("attend", ctypes.POINTER(Layer), ctypes.POINTER(Step), _INT, result=_INT)


@cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for ``dtype``; None for another than float32 and bfloat16, and where they cannot be compiled or are switched
    off. Takes seconds the first time on a machine."""
    if dtype not in _TYPES or os.environ.get(SWITCH) == "0":
        return None
    try:
        return Kernels(library(*_TYPES[dtype]))
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        log.warning("there are no CPU kernels of our own, so PyTorch's operations run, which take longer: %s", said)
        return None


def library(*flags: str) -> ctypes.CDLL:
    """``kernels.c`` as compiled with ``flags``, from the cache if it is there.

    Raises ValueError if something that this takes is missing, OSError or SubprocessError if it fails.
    """
    if sys.platform != "linux":
        raise ValueError(f"they are compiled on Linux only, not on {sys.platform}")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ValueError("there is no C compiler: install gcc")
    flags = (*_FLAGS, *flags)
    if platform.machine() == "x86_64":
        flags = ("-mprefer-vector-width=512", *flags)  # or GCC makes two halves of what is written for 512 bits
    openmp, version = _openmp(), _run([compiler, "--version"]).splitlines()[0]
    depends = "\0".join([_SOURCE.read_text(), version, *flags, str(openmp), _processor()])
    name, folder = f"cpu-kernels-{hashlib.sha256(depends.encode()).hexdigest()[:16]}.so", _cache()
    if folder is not None and (folder / name).exists():
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError as error:
            log.info("%s is damaged and compiled anew: %s", folder / name, error)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        item, linked = Path(scratch) / "kernels.o", Path(scratch) / name
        _run([compiler, *flags, "-c", str(_SOURCE), "-o", str(item)])
        _run([compiler, "-shared", str(item), str(openmp), "-o", str(linked)])
        if folder is not None:
            linked = linked.replace(folder / name)
        log.info("CPU kernels compiled by %s: %s", version, linked)
        return ctypes.CDLL(str(linked))


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


def _cache() -> Path | None:
    """Where this user keeps what can be made again; None where that cannot be written to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-autotune"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # or there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _openmp() -> Path:
    """The OpenMP library that PyTorch has loaded: kernels share its threads, or twice as many would compete for the cores."""
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libgomp", "libiomp5")):
            return path
    raise ValueError("PyTorch was built without GNU's or Intel's OpenMP")


def _processor() -> str:
    """What ``-march=native`` goes by."""
    wanted = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return "\n".join(sorted({f"{name.strip()}:{value.strip()}" for name, _, value in fields if name.strip() in wanted}))
