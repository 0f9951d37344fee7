"""Residual addition and RMS norm in one pass over memory."""

from __future__ import annotations

from torch import Tensor

from runtime.torch_backend.cuda.language import let_next_begin, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch
from runtime.torch_backend.cuda.tiles import next_power_of_2, row_warps

MAX_WIDTH = 32768
"""A row stays in the registers of one program."""


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride: tl.constexpr,
    residual_stride: tl.constexpr,
    out_stride: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + at
        total = value + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the next reader of the residual sees, too
    inverse = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + row * out_stride + at, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``y / sqrt(mean(y²) + eps) · weight`` over the last dimension (Zhang and Sennrich 2019).

    ``x [rows, width]``; ``y`` is ``x``, or with ``residual [rows, width]`` their sum, which is written back to ``residual``.
    The sum is rounded to the residual's dtype first, as when a model adds and norms in two operations; all else is float32
    with one rounding at the end. Returns ``out``, by default a new tensor like ``x``; it may be ``x`` itself. Raises
    ``ValueError`` for shapes that do not fit.
    """
    rows, width = _checked("x", x)
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be a contiguous [{width}], as wide as x")
    if residual is not None and _checked("residual", residual) != (rows, width):
        raise ValueError(f"residual has shape {tuple(residual.shape)}; it must be that of x, {tuple(x.shape)}")
    if out is None:
        out = x.new_empty(rows, width)
    elif _checked("out", out) != (rows, width):
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be that of x, {tuple(x.shape)}")
    if rows:
        normed(x, weight, eps, residual, out)
    return out


def normed(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor) -> None:
    """:func:`rms_norm` of one row or more, without its checks, which take the host as long as the launch."""
    rows, width = x.shape
    block = next_power_of_2(width)
    summed = x if residual is None else residual
    launch(
        _rms_norm, (rows, 1, 1), (x, summed, weight, out), (eps,),
        (x.stride(0), summed.stride(0), out.stride(0), width, residual is not None, block), warps=row_warps(block),
    )  # fmt: skip


def _checked(name: str, x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; it must be [rows, width] with contiguous rows"
        )
    rows, width = x.shape
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{name} is {width} wide; it must be between 1 and {MAX_WIDTH}")
    return rows, width
