"""The gate of an MLP: SiLU of one half of a merged projection, times the other."""

from __future__ import annotations

from torch import Tensor

from runtime.torch_backend.cuda.language import let_next_begin, sigmoid, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch

BLOCK = 1024


@triton.jit
def _gated(
    gate_up, out, in_stride: tl.constexpr, out_stride: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (gate * sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor) -> Tensor:
    """``gate · sigmoid(gate) · up`` of ``gate_up [rows, 2 · width]``, the gate being the first half; returns ``[rows, width]``.

    In float32 with one rounding at the end. Raises ``ValueError`` for another shape.
    """
    if gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % 2 or not gate_up.shape[1]:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; it must be [rows, 2 · width] with contiguous rows")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        launch(
            _gated, (rows, -(-width // BLOCK), 1), (gate_up, out), (),
            (gate_up.stride(0), out.stride(0), width, BLOCK), warps=4,
        )  # fmt: skip
    return out
