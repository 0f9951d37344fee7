"""The arithmetic of a decoder layer on a CPU by kernels of our own, each one pass over memory.

Written out in PyTorch, a norm in bfloat16 is seven operations and a rotation five, which read and write their rows each time.
What the kernels do not take (another dtype, odd sizes, a missing compiler) PyTorch computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.torch_backend.cpu.compiled import kernels
from runtime.torch_backend.kv_pool import LayerKV
from runtime.torch_backend.operations import HeadNorm, Operations

GRAIN = 16  # elements that rows are multiples of
_SMALL = 1 << 15  # elements for which waking other threads is not worth it


def threads_for(elements: int) -> int:
    """CPU threads for work on so many elements."""
    return 1 if elements < _SMALL else torch.get_num_threads()


class CPUOperations(Operations):
    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        found = kernels(x.dtype)
        if found is None or not _rows(x) or not _scales(scale, x):
            return super().norm(x, scale, eps)
        out = torch.empty_like(x)
        rows, size = x.shape
        wide = scale.dtype == torch.float32
        found.norm(out.data_ptr(), x.data_ptr(), scale.data_ptr(), wide, eps, rows, size, threads_for(rows * size))
        return out

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        found = kernels(x.dtype)
        if (
            found is None
            or not _rows(x)
            or not _scales(scale, x)
            or residual.shape != x.shape
            or residual.dtype != x.dtype
            or not residual.is_contiguous()
        ):
            return super().add_norm(x, residual, scale, eps)
        out = torch.empty_like(x)
        rows, size = x.shape
        wide = scale.dtype == torch.float32
        found.add_norm(
            out.data_ptr(), x.data_ptr(), residual.data_ptr(), scale.data_ptr(), wide, eps, rows, size, threads_for(rows * size)
        )  # fmt: skip
        return out, x

    def rope_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norm: HeadNorm | None, layer: LayerKV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = kernels(qkv.dtype)
        tokens, dim = qkv.shape[0], cos.shape[-1]
        if found is None or not _rotates(qkv, cos, sin, kv_heads, norm, layer, slots):
            # this says what is wrong, if anything is
            return super().rope_write(qkv, cos, sin, kv_heads, norm, layer, slots)
        heads = qkv.view(tokens, -1, dim)
        count = heads.shape[1] - 2 * kv_heads
        query_scale, key_scale, wide, eps = None, None, False, 0.0
        if norm is not None:
            query_scale, key_scale = norm.query.data_ptr(), norm.key.data_ptr()
            wide, eps = norm.query.dtype == torch.float32, norm.eps
        failed = found.rope_write(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), query_scale, key_scale, wide, eps, layer.keys.data_ptr(),
            layer.values.data_ptr(), slots.data_ptr(), len(layer.keys), tokens, count, kv_heads, dim, threads_for(qkv.numel()),
        )  # fmt: skip
        if failed:
            raise IndexError(f"slots {slots.min()} to {slots.max()} of a pool of {len(layer.keys)}")
        return heads[:, :count], heads[:, count : count + kv_heads], heads[:, count + kv_heads :]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        found = kernels(gate_up.dtype)
        rows, size = gate_up.shape[0], gate_up.shape[-1] // 2
        if found is None or not _rows(gate_up) or size % GRAIN:
            return super().silu_mul(gate_up)
        out = gate_up.new_empty(rows, size)
        found.silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, size, threads_for(rows * size))
        return out


def _rows(x: Tensor) -> bool:
    """Whether ``x`` is rows, one behind the other, of a size that kernels take."""
    return x.dim() == 2 and x.shape[1] % GRAIN == 0 and x.is_contiguous()


def _scales(scale: Tensor, x: Tensor) -> bool:
    return scale.dtype in (torch.float32, x.dtype) and scale.is_contiguous() and scale.numel() == x.shape[-1]


def _rotates(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norm: HeadNorm | None, layer: LayerKV, slots: Tensor
) -> bool:
    """Whether the kernel takes these: it looks at no shape itself."""
    tokens, dim = qkv.shape[0], cos.shape[-1]
    if dim % (2 * GRAIN) or not _rows(qkv) or qkv.shape[1] % dim or qkv.shape[1] // dim <= 2 * kv_heads:
        return False
    if (
        layer.key_scale is not None
        or slots.dtype != torch.int64
        or slots.shape != (tokens,)
        or not slots.is_contiguous()
    ):
        return False
    if any(x.shape != (tokens, dim) or x.dtype != qkv.dtype or not x.is_contiguous() for x in (cos, sin)):
        return False
    for pool in (layer.keys, layer.values):
        if pool.shape != (len(layer.keys), kv_heads, dim) or pool.dtype != qkv.dtype or not pool.is_contiguous():
            return False
    if norm is None:
        return True
    scales = norm.query, norm.key
    return scales[0].dtype == scales[1].dtype and all(
        x.dtype in (torch.float32, qkv.dtype) and x.is_contiguous() and x.numel() == dim for x in scales
    )
