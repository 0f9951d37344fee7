"""The gate of an MLP: SiLU or GELU of one half of a merged projection, times the other."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from runtime.torch_backend.cuda.language import let_next_begin, sigmoid, tanh, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch

BLOCK = 1024


@triton.jit
def _gated(
    gate_up, out, in_stride: tl.constexpr, out_stride: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        active = gate * sigmoid(gate)
    tl.store(out + row * out_stride + at, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, kind: Literal["silu", "gelu_tanh"] = "silu", out: Tensor | None = None) -> Tensor:
    """``act(gate) · up`` of ``gate_up [rows, 2 · width]``, the gate being the first half; returns ``[rows, width]``.

    ``silu`` is x · sigmoid(x); ``gelu_tanh`` is 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel 2016). In
    float32 with one rounding at the end. Raises ``ValueError`` for another ``kind`` or shape.
    """
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"kind is {kind!r}; it must be 'silu' or 'gelu_tanh'")
    if gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % 2 or not gate_up.shape[1]:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; it must be [rows, 2 · width] with contiguous rows")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(rows, width)
    elif out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be [{rows}, {width}] with contiguous rows")
    if rows:
        launch(
            _gated, (rows, -(-width // BLOCK), 1), (gate_up, out), (),
            (gate_up.stride(0), out.stride(0), width, kind == "gelu_tanh", BLOCK), warps=4,
        )  # fmt: skip
    return out
