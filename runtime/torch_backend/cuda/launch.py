"""Launching a kernel that has been compiled, without asking again how to compile it.

At each call Triton binds the arguments by name, looks at each for how it may be specialised, and makes a text of all that to
find the binary by. With fifteen tensors and thirty constants that takes a host longer than most kernels take the device: on the
host of an H200 a step of a 0.6B model with a prompt took 22 ms, of which the device worked 5. A binary is the same wherever
dtypes and constants are, and pointers are aligned; so it is found by these, and gets addresses, which Triton does not look up at
the driver one by one as it does tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.torch_backend.cuda.language import INTERPRETED, triton
from runtime.torch_backend.cuda.tiles import architecture_of

ALIGNED = 16
"""Bytes: Triton compiles pointers at multiples of it apart from others."""

EARLY = True
EARLY_FROM = 90
"""The compute capability that has programmatic dependent launch."""


class _Binary(NamedTuple):
    """What Triton calls to launch a binary, and what it gives along."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    early: bool


_known: dict[tuple[Any, ...], _Binary] = {}
_dtype = attrgetter("dtype")


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[int, ...],
    *,
    warps: int,
    stages: int = 3,
) -> None:
    """Queue ``kernel`` on the current stream of its tensors' device.

    Its parameters are pointers, then numbers, then constants, in this order; the numbers are floats, or whole ones that Triton
    does not specialise, below 2³¹. ``grid``: programs along each dimension. The last constant, EARLY, is ours: whether the
    kernel begins while those before it still run (see :func:`~.language.wait_for_previous`).
    """
    addresses = [*map(Tensor.data_ptr, tensors)]
    device = tensors[0].device
    key = (id(kernel), constants, warps, stages, EARLY, device, *map(_dtype, tensors))
    known = _known.get(key)
    if known is None or reduce(or_, addresses) % ALIGNED:
        early = begins_early(device)
        options = {"launch_pdl": True} if early else {}
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compiled = kernel[grid](
                *tensors, *numbers, *constants, early, num_warps=warps, num_stages=stages, **options
            )
        if not (INTERPRETED.value or reduce(or_, addresses) % ALIGNED or compiled is None):
            _known[key] = _Binary(compiled.run, compiled.function, compiled.packed_metadata, early)
        return
    run, function, metadata, early = known
    run(*grid, stream_of(device), function, metadata, None, None, None, *addresses, *numbers, *constants, early)


def begins_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` are told apart from those before them by what they wait for, and not by their end."""
    return EARLY and architecture_of(device) >= EARLY_FROM


def stream_of(device: torch.device) -> int:
    """The handle of the current stream of ``device``; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream
