"""Tile sizes, warps and pipeline stages, by chip and head size: the only place for numbers that are about speed.

Those of sm_90 are what an H200 was fastest with (``python -m benchmarks.gpu --part tiles --part products``); those of other chips
are guesses, made from shared memory and registers. Results do not depend on them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

ARCHITECTURES = (80, 89, 90, 100, 120)
"""Compute capabilities the kernels are compiled for in tests."""

OLDEST = ARCHITECTURES[0]
"""Chips before it have less shared memory than the tiles take, and compute no bfloat16."""

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Most shared memory of one block (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"); others have as
much as the next lower one."""

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
"""Of A100, H100 and B200: for how many programs to cut work when the device at hand is not asked."""


class AttentionTile(NamedTuple):
    """``keys`` taken at a time by a program of ``warps``, with ``stages`` of loads in flight."""

    keys: int
    warps: int
    stages: int


class LinearTile(NamedTuple):
    """A program of ``warps`` takes ``outputs`` of a product, ``inputs`` at a time, with ``stages`` of loads in flight; the inputs
    are in ``parts``. A program that begins early brings the weights of its first ``ahead`` times ``inputs`` to the cache."""

    outputs: int
    inputs: int
    parts: int
    warps: int
    stages: int
    ahead: int = 0


FEW_ROWS = 16
"""Fewest rows of queries (tokens × heads of one KV head) in a tile: the least that the matrix units take."""

MANY_ROWS = 64
"""Rows where prompts run."""

# (largest padded head size, bytes of an element) -> by a key of _TUNED: keys, warps and stages with few rows and with many
_ATTENTION: dict[tuple[int, int], dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]]] = {
    (64, 2): {80: ((64, 4, 3), (64, 4, 3)), 90: ((64, 2, 3), (128, 4, 3)), 100: ((64, 4, 4), (64, 4, 3))},
    (128, 2): {80: ((64, 4, 3), (64, 4, 2)), 90: ((64, 4, 2), (64, 4, 2)), 100: ((64, 4, 3), (64, 4, 3))},
    (256, 2): {80: ((32, 4, 3), (32, 8, 2)), 90: ((64, 4, 2), (32, 4, 2)), 100: ((32, 4, 3), (64, 8, 2))},
    # float32 products don't take the matrix units: with fewer warps the operands of a tile spill
    (64, 4): dict.fromkeys((80, 90, 100), ((32, 4, 2), (16, 8, 2))),
    (128, 4): dict.fromkeys((80, 90, 100), ((32, 8, 2), (16, 16, 2))),
    (256, 4): dict.fromkeys((80, 90, 100), ((16, 4, 2), (16, 16, 2))),
}

_TUNED = {80: 80, 86: 80, 89: 80, 90: 90, 100: 100, 120: 80}
"""Whose numbers a compute capability takes; others take those of the next lower one. sm_120 multiplies as sm_80 does, and has no
more shared memory a block than sm_86."""

_SMALL: dict[tuple[int, int, bool], AttentionTile] = {
    (256, 4, True): AttentionTile(16, 16, 1),  # does not fit
    (128, 2, True): AttentionTile(64, 8, 2),  # spills on sm_120
}
"""In place of those of sm_80 where a block has less shared memory, by padded head size, bytes of an element and whether there are
many rows."""

_CONVERTED = AttentionTile(16, 16, 1)
"""For float32 over a pool of 8 bits, on any chip: with loads in flight or fewer warps, what is converted spills."""


FEW_SEQUENCES = 16
"""So many decodes leave most of the chip free, and each program may take more keys at a time."""

_FEW_SEQUENCES: dict[tuple[int, int, int], AttentionTile] = {(90, 128, 2): AttentionTile(128, 4, 2)}


def attention_tile(
    architecture: int, head_dim: int, element_bytes: int, rows: int, sequences: int, fp8: bool
) -> AttentionTile:
    """The tile for heads of ``head_dim`` (the larger of key and value) whose products take ``element_bytes``, ``rows`` of
    queries, and at most so many ``sequences``. ``fp8``: over a pool of 8 bits.

    Raises ``ValueError`` for heads above 256 or more than 128 rows.
    """
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head size is {head_dim}; the attention kernel takes 1 to 256")
    if rows > 128:
        raise ValueError(f"{rows} query heads, padded, share a KV head; the attention kernel takes 1 to 128")
    size = next(limit for limit in (64, 128, 256) if head_dim <= limit)
    if fp8 and element_bytes == 4:
        return _CONVERTED
    small = _SMALL.get((size, element_bytes, rows > FEW_ROWS))
    if small is not None and shared_bytes(architecture) < SHARED_BYTES[80]:
        return small
    known = tuned_for(architecture)
    if (
        rows <= FEW_ROWS
        and sequences <= FEW_SEQUENCES
        and (few := _FEW_SEQUENCES.get((known, size, element_bytes))) is not None
    ):
        return few
    return AttentionTile(*_ATTENTION[size, element_bytes][known][rows > FEW_ROWS])


AHEAD = 4
"""How many times its inputs' width of weights a program of a product brings to the cache while it waits. With 16 an H200's cache
is too small for those of an 8B model, and a step takes a fifth longer."""

MOST_ROWS = 64
"""For more rows the product itself takes longer than its weights, and a library's is faster."""


def linear_tile(architecture: int, rows: int, inputs: int, outputs: int, gated: bool) -> LinearTile | None:
    """The tile for a product of ``rows`` with ``[outputs, inputs]`` weights (twice as many where ``gated``); None where a
    library's is faster, or nobody has measured. By themselves ours take 0.9 to 1.3 times as long as a library's; kernels that
    begin early behind them make up for that (``--part switches``)."""
    if tuned_for(architecture) != 90 or rows > MOST_ROWS:
        return None
    block = max(FEW_ROWS, next_power_of_2(rows))
    deep, wide, programs = (256, 64, 1) if block < 64 else (128, 64, 1)
    if gated:
        deep, wide = (256, 32) if block == 16 else (128, 64)
    elif outputs < 4096:
        wide, programs = 32, 264
    elif inputs > 8192:
        wide, programs = (32, 264) if block < 64 else (64, 264)
    if outputs % wide or inputs % deep:
        return None
    parts = max(1, min(inputs // deep, programs // (outputs // wide)))
    return LinearTile(wide, deep, parts, 4, 4, AHEAD)


def tuned_for(architecture: int) -> int:
    """The compute capability whose numbers serve ``architecture`` (major · 10 + minor)."""
    return _TUNED[max((known for known in _TUNED if known <= architecture), default=ARCHITECTURES[0])]


def shared_bytes(architecture: int) -> int:
    """Most shared memory of one block on ``architecture``."""
    return SHARED_BYTES[max((known for known in SHARED_BYTES if known <= architecture), default=ARCHITECTURES[0])]


def row_warps(block: int) -> int:
    """Warps of a program that holds one row of ``block`` float32 in registers: some 16 a thread."""
    return max(1, min(16, block // 512))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


@functools.cache
def architecture_of(device: torch.device) -> int:
    """Compute capability of ``device``, as major · 10 + minor; of a CPU, where kernels are interpreted, the first known."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS[ARCHITECTURES[0]]
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
