"""Products of few rows with a weight matrix, which take as long as the matrix takes to be read.

A program multiplies some outputs of the weights with all rows, so that every weight is read once, in whole cache lines; where
the outputs are too few for that to keep the chip busy, the inputs are in parts, whose sums the last program to arrive adds up in
their order (split-K with a counter, as in Stream-K, Osama et al. 2023). A gated product reads the weights of gate and up side by
side and writes ``silu(gate) · up``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.torch_backend.cuda.counters import MOST_COUNTED, counters_of
from runtime.torch_backend.cuda.language import dot, let_next_begin, prefetch, sigmoid, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch, stream_of
from runtime.torch_backend.cuda.tiles import MOST_ROWS, LinearTile, next_power_of_2

LINE = tl.constexpr(64)
"""Weights of 16 bits in a cache line."""

FEWEST = 16
"""Rows of a tile: the least that the matrix units take."""


@triton.jit
def _products(
    x, weight, first, end, n, m, rows,
    x_stride: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Of outputs ``n`` and, behind them by ``AHEAD`` weights (0: none), of their partners."""
    one = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    two = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    k = tl.arange(0, BLOCK_K)
    at = weight + n.to(tl.int64)[:, None] * IN + k[None, :]
    from_x = x + m[None, :] * x_stride + k[:, None]
    inside = (m < rows)[None, :]
    for begin in tl.range(first, end, BLOCK_K):
        inputs = tl.load(from_x + begin, mask=inside, other=0.0, eviction_policy="evict_last")
        one = dot(tl.load(at + begin, eviction_policy="evict_first"), inputs, one)
        if AHEAD:
            two = dot(tl.load(at + begin + AHEAD, eviction_policy="evict_first"), inputs, two)
    return one, two


@triton.jit
def _finished(one, two, bias, n, BIAS: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr):
    if BIAS:
        one += tl.load(bias + n).to(tl.float32)[:, None]
        if GATED:
            two += tl.load(bias + OUT + n).to(tl.float32)[:, None]
    if GATED:
        one = one * sigmoid(one) * two
    return one


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, partial, arrived, rows,
    x_stride: tl.constexpr, out_stride: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BEFORE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    nth = tl.program_id(0)
    part = tl.program_id(1)
    n = nth * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    each: tl.constexpr = (IN // BLOCK_K + PARTS - 1) // PARTS * BLOCK_K
    first = part * each
    end = min(first + each, IN)
    if EARLY and BEFORE > 0:  # weights are nobody's output
        line = tl.minimum(first + tl.arange(0, BEFORE) * LINE, IN - 1)
        first_read = weight + n.to(tl.int64)[:, None] * IN + line[None, :]
        prefetch(first_read)
        if GATED:
            prefetch(first_read + OUT * IN)
    wait_for_previous(EARLY)
    one, two = _products(
        x, weight, first, end, n, m, rows, x_stride, IN, BLOCK_M, BLOCK_N, BLOCK_K, OUT * IN if GATED else 0
    )  # fmt: skip
    to = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    written = (m < rows)[None, :] & (n >= 0)[:, None]
    if PARTS == 1:
        tl.store(to, _finished(one, two, bias, n, BIAS, GATED, OUT).to(out.dtype.element_ty), mask=written)
        return
    halves: tl.constexpr = 2 if GATED else 1
    size: tl.constexpr = BLOCK_M * OUT
    place = partial + part * (halves * size) + m[None, :] * OUT + n[:, None]
    tl.store(place, one, mask=written)
    if GATED:
        tl.store(place + size, two, mask=written)
    tl.debug_barrier()  # what every thread has stored is there before the program is counted
    before = tl.atomic_add(arrived + nth, 1, sem="acq_rel")
    if before == PARTS - 1:
        one = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        two = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(PARTS):
            there = partial + other * (halves * size) + m[None, :] * OUT + n[:, None]
            one += tl.load(there, mask=written, other=0.0, cache_modifier=".cg")
            if GATED:
                two += tl.load(there + size, mask=written, other=0.0, cache_modifier=".cg")
        tl.store(to, _finished(one, two, bias, n, BIAS, GATED, OUT).to(out.dtype.element_ty), mask=written)
        tl.store(arrived + nth, 0)  # for the next launch on this stream


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: LinearTile,
    *,
    silu_gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x · weightᵀ + bias``, or of the first and the second half of the outputs ``silu(first) · second``.

    ``x [rows, inputs]`` of 1 to ``MOST_ROWS`` rows; ``weight [outputs, inputs]`` contiguous, ``bias [outputs]``; all of them
    bfloat16 or float16. Sums are float32, rounded once. ``tile.inputs`` must divide the inputs, ``tile.outputs`` the outputs
    (half of them where gated). Returns ``out [rows, outputs]``, by default new. Raises ``ValueError`` for what does not fit.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if silu_gated else weight.shape[0]
    if weight.shape[1] != inputs or not weight.is_contiguous() or x.stride(1) != 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; they must be a contiguous [outputs, inputs] and "
            "[rows, inputs] with contiguous rows"
        )
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"x has {rows} rows; it must have 1 to {MOST_ROWS}")
    if inputs % tile.inputs or outputs % tile.outputs:
        raise ValueError(f"{tile} does not divide {inputs} inputs and {outputs} outputs")
    if tile.parts > 1 and outputs // tile.outputs > MOST_COUNTED:
        raise ValueError(
            f"{tile} makes {outputs // tile.outputs} tiles; inputs may be in parts for up to {MOST_COUNTED}"
        )
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; both must be bfloat16, or both float16")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; it must be a contiguous [{weight.shape[0]}] of {x.dtype}"
        )
    out = x.new_empty(rows, outputs) if out is None else out
    if out.shape != (rows, outputs) or out.stride(1) != 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be {(rows, outputs)} with contiguous rows")
    multiply(x, weight, bias, tile, silu_gated, out)
    return out


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile, silu_gated: bool, out: Tensor) -> None:
    """:func:`linear` without its checks, which take the host longer than the launch."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    block = max(FEWEST, next_power_of_2(rows))
    parts = min(tile.parts, inputs // tile.inputs)
    partial, arrived = out, out  # not used
    if parts > 1:
        partial = torch.empty(parts, 1 + silu_gated, block, outputs, dtype=torch.float32, device=x.device)
        arrived = counters_of(x.device, stream_of(x.device))
    launch(
        _linear, (outputs // tile.outputs, parts, 1), (x, weight, x if bias is None else bias, out, partial, arrived), (rows,),
        (
            x.stride(0), out.stride(0), inputs, outputs, silu_gated, bias is not None, parts, block, tile.outputs,
            tile.inputs, min(next_power_of_2(inputs // parts // LINE.value), tile.inputs * tile.ahead // LINE.value),
        ),
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
