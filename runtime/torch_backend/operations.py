"""The arithmetic of a decoder layer around its matrix products and its attention.

Plain PyTorch here. A device with kernels of its own overrides what they compute; each method is one kernel there. Matrix products
are modules (``nn.Linear``, or a packed one on a CPU), which a device may multiply in its own way; attention is an
:class:`~runtime.torch_backend.attention.AttentionBackend`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.torch_backend.kv_pool import LayerKV
from runtime.torch_backend.norm import rms_norm


class HeadNorm(NamedTuple):
    """RMS norm of each head: ``query`` and ``key [dim]``, and ``each [heads + kv_heads, dim]``, the same for every head."""

    query: Tensor
    key: Tensor
    each: Tensor
    eps: float


class Operations:
    """Stateless. They may overwrite ``x``, ``residual``, ``qkv`` and ``gate_up``; rows are tokens."""

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x²) + eps) · scale`` over the last dimension of ``x [tokens, hidden]``, which stays as it is."""
        return rms_norm(x, scale, eps)

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual`` and the sum, each ``[tokens, hidden]``."""
        total = x.add_(residual)
        return self.norm(total, scale, eps), total

    def rope_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norm: HeadNorm | None, layer: LayerKV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate query and key, and write key and value to ``slots [tokens]`` of ``layer``.

        ``qkv [tokens, (heads + 2 · kv_heads) · dim]``: query, key and value heads in this order. ``cos``/``sin [tokens, dim]``,
        whose halves may differ; the halves of a head are the pairs. Returns query ``[tokens, heads, dim]``, rotated key and value
        ``[tokens, kv_heads, dim]``, with any strides; where attention reads the pool alone, key and value are nobody's.
        """
        tokens, dim = qkv.shape[0], cos.shape[-1]
        heads = qkv.view(tokens, -1, dim)
        split = heads.shape[1] - kv_heads
        both, value = heads[:, :split], heads[:, split:]
        if norm is not None:
            both = F.rms_norm(both, (dim,), None, norm.eps).mul_(norm.each)
        both = _rotated(both, cos, sin)
        query, key = both[:, : split - kv_heads], both[:, split - kv_heads :]
        layer.write(slots, key, value)
        return query, key, value

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) · up`` of ``gate_up [tokens, 2 · intermediate]``, gate first."""
        half = gate_up.shape[-1] // 2
        return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """``layer`` of ``x [tokens, inputs]``."""
        out: Tensor = layer(x)
        return out

    def silu_mul_linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """:meth:`silu_mul` of ``layer``, a merged gate and up projection, of ``x [tokens, inputs]``."""
        return self.silu_mul(layer(x))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [tokens, heads, dim]`` by ``cos``/``sin [tokens, dim]``."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
