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

SWITCH: Final = "GPU_AUTOTUNE_CPU_KERNELS"
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
    if dtype not in _TYPES or not enabled():
        return None
    try:
        return Kernels(ctypes.CDLL(str(_built(dtype))))
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("no CPU kernels of our own, PyTorch's operations run instead, which are slower: %s", str(said).strip())
        return None


def enabled() -> bool:
    return os.environ.get(SWITCH, "") != "0"


def _built(dtype: torch.dtype) -> Path:
    """Where the library for ``dtype`` lies, once it is compiled. Raises OSError, ValueError or SubprocessError."""
    if sys.platform != "linux":
        raise ValueError(f"they are compiled on Linux only, not on {sys.platform}")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ValueError("there is no C compiler (gcc)")
    flags = [*_FLAGS, *_TYPES[dtype]]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mprefer-vector-width=512")  # or GCC halves what it takes some processors to be slow with
    openmp = _openmp()
    version = _run([compiler, "--version"]).splitlines()[0]
    depends = [_SOURCE.read_text(), version, *flags, str(openmp), _processor()]
    digest = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    folder = _cache()
    library = folder / f"cpu-kernels-{digest}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        _run([compiler, *flags, "-c", str(_SOURCE), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), str(openmp), "-o", str(linked)])
        linked.replace(library)
    log.info("CPU kernels for %s compiled by %s into %s", str(dtype).removeprefix("torch."), version, library)
    return library


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


def _cache() -> Path:
    """A folder of this user's that can be written to; a temporary one where there is no other."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-autotune"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="gpu-autotune-"))


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
