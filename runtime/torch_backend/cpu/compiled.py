"""Kernels of our own for a CPU, compiled on the machine when they are first needed.

``kernels.c`` is a few hundred lines that any GCC from 9 on compiles in some seconds for the very processor it runs on. What comes
out is kept in the user's cache, by everything that it depends on. Where there is no compiler, or anything else is in the way,
PyTorch's own operations run, and the log says why.
"""

from __future__ import annotations

import contextlib
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
import torch.nn.functional as F

log = logging.getLogger(__name__)

SWITCH: Final = "AUTOTUNE_CPU_KERNELS"
"""The environment variable that keeps PyTorch's operations where it is 0."""

OUT_OF_MEMORY: Final = 1
"""What functions return then, as in ``kernels.c``."""

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
        ("pool_blocks", _INT64),
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
        self.rope_write = function("rope_write", p, p, p, p, p, _INT, _FLOAT, p, p, p, n, n, n, n, n, _INT, result=_INT)
        self.attend = function("attend", ctypes.POINTER(Layer), ctypes.POINTER(Step), _INT, result=_INT)


@cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for ``dtype``; None for another than float32 and bfloat16, and where they cannot be compiled, are switched off,
    or compute something else than PyTorch does. Takes seconds the first time on a machine."""
    if dtype not in _TYPES or os.environ.get(SWITCH) == "0":
        return None
    try:
        found = Kernels(library(*_TYPES[dtype]))
        check(found, dtype)
        return found
    except Exception as error:  # whatever a compiler or a loader does: there is another way
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        log.warning(
            "there are no CPU kernels of our own, so PyTorch's operations run, which take longer: %s",
            "\n".join(said[:4]),
        )
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
    openmp, version = _openmp(), _run([compiler, "--version"]).partition("\n")[0]
    depends = "\0".join([_SOURCE.read_text(), version, *flags, str(openmp), _processor()])
    stem, folder = f"cpu-kernels-{_digest(depends.encode())}", _cache()
    for kept in [] if folder is None else sorted(folder.glob(f"{stem}-*.so")):
        with contextlib.suppress(
            OSError
        ):  # of a file that cannot be read, or a folder from which nothing may be executed
            if (
                kept.stem == f"{stem}-{_digest(kept.read_bytes())}"
            ):  # else it is damaged, and loading it might end the process
                return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as scratch:
        item, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        _run([compiler, *flags, "-c", str(_SOURCE), "-o", str(item)])
        _run([compiler, "-shared", str(item), str(openmp), "-o", str(linked)])
        content = linked.read_bytes()
        if folder is not None:
            with contextlib.suppress(OSError):  # a folder that cannot be written to, a full disk
                _keep(folder / f"{stem}-{_digest(content)}.so", content)
        log.info("CPU kernels compiled by %s", version)
        return ctypes.CDLL(str(linked))


def check(found: Kernels, dtype: torch.dtype) -> None:
    """Raise ValueError unless attention over a few blocks is what PyTorch makes of them.

    What else there is in a fused layer is tried with each model (:mod:`runtime.torch_backend.fused_layer`).
    """
    heads, kv_heads, dim, size, new, context = 4, 2, 64, 16, 5, 150  # more than a tile, and some of another
    generator = torch.Generator().manual_seed(0)
    blocks = -(-context // size)
    keys, values = (torch.randn(blocks * size, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(new, heads, dim, generator=generator).to(dtype)
    out = torch.empty_like(query)
    fresh, ends, table = (torch.tensor(each) for each in ([new], [context], [list(range(blocks))]))
    layer = Layer(
        query.data_ptr(), keys.data_ptr(), values.data_ptr(), None, out.data_ptr(), heads * dim, heads, kv_heads, dim, dim, 0,
        dim**-0.5, 0.0,
    )  # fmt: skip
    step = Step(fresh.data_ptr(), ends.data_ptr(), table.data_ptr(), 1, blocks, size, blocks)
    failed = found.attend(ctypes.byref(layer), ctypes.byref(step), torch.get_num_threads())
    seen = torch.ones(new, context, dtype=torch.bool).tril(context - new)
    across, along = (
        x[:context].float().transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (keys, values)
    )
    expected = F.scaled_dot_product_attention(query.float().transpose(0, 1), across, along, attn_mask=seen).transpose(
        0, 1
    )
    if failed or not torch.allclose(out.float(), expected, rtol=0.02, atol=0.02):
        raise ValueError("what this compiler makes of them computes something else")


def _keep(path: Path, content: bytes) -> None:
    """Write ``path`` whole or not at all. All may read it: a cache may be shared."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # a temporary file is its owner's alone
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S
    ).stdout


def _cache() -> Path | None:
    """Where this user keeps what can be made again; None where there is no such place."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        folder = (named if named.is_absolute() else Path.home() / ".cache") / "gpu-autotune"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # or there is no home
        return None
    return folder


def _openmp() -> Path:
    """The OpenMP library that PyTorch computes with: kernels share its threads, or twice as many would compete for the cores.

    A process may have loaded others (scikit-learn brings one), so PyTorch's own is asked where it finds ``GOMP_parallel``.
    """
    places: list[tuple[int, int, Path]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            places.append((begin, end, Path(fields[5])))
    torch_cpu = next((path for _, _, path in places if path.name.startswith("libtorch_cpu.so")), None)
    if torch_cpu is not None:
        with contextlib.suppress(OSError, AttributeError):
            at = ctypes.cast(ctypes.CDLL(str(torch_cpu)).GOMP_parallel, ctypes.c_void_p).value or 0
            return next(path for begin, end, path in places if begin <= at < end)
    raise ValueError("PyTorch was built without GNU's or Intel's OpenMP")


def _processor() -> str:
    """What ``-march=native`` goes by."""
    wanted = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return "\n".join(sorted({f"{name.strip()}:{value.strip()}" for name, _, value in fields if name.strip() in wanted}))
