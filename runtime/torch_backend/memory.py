"""What running out of memory looks like, and how memory that is read all the time is laid out."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceMemory(Protocol):
    """What a device tells of its memory."""

    def free(self) -> int:
        """Bytes that nobody uses, once all that is queued is done and garbage is collected; what an allocator holds in reserve
        for no tensor counts."""
        ...

    def peak(self, call: Callable[[], object]) -> int:
        """Bytes that ``call`` takes at most beyond those that are taken before it."""
        ...


HUGE = 2 << 20  # bytes of a huge page on x86 and most others
_ADVISE_HUGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE of <sys/mman.h>


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out. PyTorch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in ("out of memory", "can't allocate memory")
    )


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


@cache
def _malloc_trim() -> Any:
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).malloc_trim  # of the GNU C library alone
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_size_t,), ctypes.c_int
    return found


def return_free_pages() -> bool:
    """Have the C library return to the system what it holds in free pieces of its heap; whether there was any.

    It does so by itself at the heap's end only. Steps free tensors of ever other sizes between objects that stay, so that free
    pieces add up over hours. Takes milliseconds for a heap of gigabytes.
    """
    release = _malloc_trim()
    return release is not None and release(0) == 1


def prefer_huge_pages(tensor: Tensor, now: bool = True) -> bool:
    """Ask the system to hold ``tensor``'s memory (on a CPU) in huge pages; returns whether it took that up.

    ``now``: at once, which copies what is there already; else as pages are touched, or when the system gets to it.

    Weights and keys are streamed through at every step, far more of them than the processor's address cache covers in pages
    of 4 KiB. It is advice only: where the system knows no huge pages, or has none to spare, nothing changes. The range is
    widened to whole huge pages, so that neighbours, often other weights, go along.
    """
    advise = _madvise()
    if advise is None or tensor.device.type != "cpu":
        return False
    size = int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes
    address = int(torch.ops.mkldnn.data_ptr(tensor)) if tensor.is_mkldnn else tensor.data_ptr()
    if size < HUGE // 4:
        return False
    begin, end = address // HUGE * HUGE, -(-(address + size) // HUGE) * HUGE
    taken = False
    for at in range(begin, end, HUGE):  # one by one: a range that reaches into unmapped memory is refused as a whole
        if advise(at, HUGE, _ADVISE_HUGE) == 0:
            taken = not now or advise(at, HUGE, _COLLAPSE) == 0 or taken
    return taken
