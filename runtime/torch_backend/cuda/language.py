"""Triton, and the two differences between a compiled kernel and an interpreted one that kernels must know of.

With ``TRITON_INTERPRET=1`` in the environment before Triton is first imported, kernels run in NumPy on the CPU, one program
after the other: slow, but the same source. Kernel modules import ``triton`` and ``tl`` from here, so that all fail alike
without Triton.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from runtime.errors import MissingTritonError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingTritonError(
        f"the GPU kernels need Triton 3.6 or newer ({error}); PyTorch's CUDA builds bring it, and on Linux so does "
        "pip install 'triton>=3.6,<3.8'"
    ) from error

__all__ = [
    "INTERPRETED",
    "LOG2_E",
    "dot",
    "let_next_begin",
    "need_driver",
    "prefetch",
    "scalar",
    "sigmoid",
    "tanh",
    "tl",
    "triton",
    "wait_for_previous",
]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in NumPy. True or false for the life of the process."""

LOG2_E = tl.constexpr(1.4426950408889634)


def need_driver() -> None:
    """Start Triton's driver, which else starts at the first launch. It is compiled on the machine, once for each user.

    Raises :class:`MissingTritonError` where it does not start: without a C compiler or Python's headers. Interpreted kernels need
    none.
    """
    if INTERPRETED.value:
        return
    try:
        triton.runtime.driver.active  # noqa: B018  # compiled when it is first asked for
    except Exception as error:  # whatever a compiler or a loader does
        raise MissingTritonError(
            f"Triton does not start ({_brief(error)}); it needs a C compiler and Python's headers: install gcc and python3-dev"
        ) from error


def _brief(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):  # its text is the whole command
        return f"{Path(str(error.cmd[0])).name} ended with {error.returncode}"
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


if INTERPRETED.value:

    def scalar(x: Any) -> int:
        """``x``, a whole number read from memory, as the bound of a loop.

        Python's ``range`` asks for an integer, and NumPy 2.4 no longer makes one of an array with one element, which is what
        the interpreter holds.
        """
        return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)

else:

    @tl.core.builtin
    def scalar(x: Any, _semantic: Any = None) -> Any:
        """``x``: a compiled loop takes a bound from memory as it is."""
        return x


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The kernel behind this one may begin once all programs of this one have: it waits for what it reads (programmatic
    dependent launch)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """All that the kernels before this one have written is there. A kernel that may begin early calls this before it reads what
    they write and before it writes anything, and in one program at least: so one kernel's end is the end of all before it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address):
    """Bring the lines of pointers ``address`` to the cache of the device."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32, products of float32 included.

    The interpreter keeps bfloat16 as bit patterns, which it would multiply as whole numbers.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """Without an exponential of a positive number, which could overflow."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def sigmoid(x):
    """Without an exponential of a positive number, which could overflow."""
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    return tl.where(x < 0, e, 1.0) / (1.0 + e)
