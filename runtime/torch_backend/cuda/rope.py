"""Rotary embedding of queries and keys, and writing keys and values to the block pool, in one pass.

Between the merged QKV projection and attention nothing else is left to do: the norms of query and key that some models have
are here, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.torch_backend.cuda.fp8 import encoded
from runtime.torch_backend.cuda.language import let_next_begin, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch
from runtime.torch_backend.cuda.tiles import next_power_of_2


@triton.jit
def _rotated(
    x, rows, cos, sin, weight, eps, stride: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Heads ``rows`` (a mask) of ``x``: the first and second of each pair, rotated, and what is behind the rotary
    dimensions."""
    one = tl.arange(0, BLOCK_P)
    paired = one < ROTARY // 2
    two = one + ROTARY // 2
    rest = ROTARY + tl.arange(0, BLOCK_R)
    behind = rest < DIM
    at = x + tl.arange(0, rows.shape[0])[:, None] * stride
    a = tl.load(at + one[None, :], mask=rows[:, None] & paired[None, :], other=0.0).to(tl.float32)
    b = tl.load(at + two[None, :], mask=rows[:, None] & paired[None, :], other=0.0).to(tl.float32)
    c = tl.load(at + rest[None, :], mask=rows[:, None] & behind[None, :], other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        a = a * inverse * tl.load(weight + one, mask=paired, other=0.0).to(tl.float32)[None, :]
        b = b * inverse * tl.load(weight + two, mask=paired, other=0.0).to(tl.float32)[None, :]
        c = c * inverse * tl.load(weight + rest, mask=behind, other=0.0).to(tl.float32)[None, :]
    cos_one = tl.load(cos + one, mask=paired, other=0.0).to(tl.float32)[None, :]
    cos_two = tl.load(cos + two, mask=paired, other=0.0).to(tl.float32)[None, :]
    sin_one = tl.load(sin + one, mask=paired, other=0.0).to(tl.float32)[None, :]
    sin_two = tl.load(sin + two, mask=paired, other=0.0).to(tl.float32)[None, :]
    return a * cos_one - b * sin_one, b * cos_two + a * sin_two, c


@triton.jit
def _rope_write(
    query, key, value, query_out, keys, values, slots, cos, sin, query_weight, key_weight, key_scale, value_scale, eps,
    query_stride: tl.constexpr, query_head_stride: tl.constexpr, key_in_stride: tl.constexpr,
    key_in_head_stride: tl.constexpr,
    value_in_stride: tl.constexpr, value_in_head_stride: tl.constexpr, out_stride: tl.constexpr,
    out_head_stride: tl.constexpr,
    key_stride: tl.constexpr, key_head_stride: tl.constexpr, value_stride: tl.constexpr, value_head_stride: tl.constexpr,
    angle_stride: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, VALUE_DIM: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    one = tl.arange(0, BLOCK_P)
    paired = one < ROTARY // 2
    two = one + ROTARY // 2
    rest = ROTARY + tl.arange(0, BLOCK_R)
    behind = rest < DIM
    cos += token * angle_stride
    sin += token * angle_stride

    nth = tl.arange(0, BLOCK_G)
    rows = nth < GROUP
    first, second, passed = _rotated(
        query + token * query_stride + kv_head * GROUP * query_head_stride, rows, cos, sin, query_weight, eps,
        query_head_stride,
        DIM, ROTARY, NORM, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    tl.debug_barrier()  # every thread has read before one writes: the queries may be rotated in place
    to = query_out + token * out_stride + (kv_head * GROUP + nth)[:, None] * out_head_stride
    dtype = query_out.dtype.element_ty
    tl.store(to + one[None, :], first.to(dtype), mask=rows[:, None] & paired[None, :])
    tl.store(to + two[None, :], second.to(dtype), mask=rows[:, None] & paired[None, :])
    tl.store(to + rest[None, :], passed.to(dtype), mask=rows[:, None] & behind[None, :])

    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    single = tl.arange(0, 1) == 0
    first, second, passed = _rotated(
        key + token * key_in_stride + kv_head * key_in_head_stride, single, cos, sin, key_weight, eps, key_in_head_stride,
        DIM, ROTARY, NORM, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    dv = tl.arange(0, BLOCK_V)
    kept = tl.load(
        value + token * value_in_stride + kv_head * value_in_head_stride + dv, mask=dv < VALUE_DIM, other=0.0
    ).to(tl.float32)  # fmt: skip
    if FP8:
        scale = 1.0 / tl.load(key_scale + kv_head)
        first = encoded(first * scale)
        second = encoded(second * scale)
        passed = encoded(passed * scale)
        kept = encoded(kept * (1.0 / tl.load(value_scale + kv_head)))
    else:
        stored = keys.dtype.element_ty
        first = first.to(stored)
        second = second.to(stored)
        passed = passed.to(stored)
        kept = kept.to(stored)
    to = keys + slot * key_stride + kv_head * key_head_stride
    tl.store(to + one[None, :], first, mask=paired[None, :])
    tl.store(to + two[None, :], second, mask=paired[None, :])
    tl.store(to + rest[None, :], passed, mask=behind[None, :])
    tl.store(values + slot * value_stride + kv_head * value_head_stride + dv, kept, mask=dv < VALUE_DIM)


def rope_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values to the pool (Su et al. 2021).

    ``query [tokens, heads, dim]``, ``key [tokens, kv_heads, dim]`` and ``value [tokens, kv_heads, value_dim]`` may be views
    of one merged projection. ``cos`` and ``sin [tokens, rotary]`` hold a number for each dimension, as transformers makes
    them; dimensions from ``rotary`` on pass as they are. Pairs are (i, i + rotary/2).
    ``query_norm`` and ``key_norm [dim]``: RMS norms over each head, first. ``keys [slots, kv_heads, dim]`` and ``values
    [slots, kv_heads, value_dim]``: one layer of the pool; token t goes to ``slots[t]``, and nowhere if that is negative. For
    a pool of bytes (uint8 or float8_e4m3fn) keys and values are divided by ``key_scale`` and ``value_scale [kv_heads]``
    (float32) and saturate at ±448; what is not finite becomes NaN.

    Returns the rotated queries: ``out``, by default ``query`` itself. All in float32 with one rounding. Raises
    ``ValueError`` for shapes that do not fit.
    """
    tokens, heads, dim = query.shape
    kv_heads, value_dim, rotary = key.shape[1], value.shape[2], cos.shape[-1]
    out = query if out is None else out
    fp8 = keys.dtype in (torch.uint8, torch.float8_e4m3fn)
    expected = {
        "key": (key, (tokens, kv_heads, dim)), "value": (value, (tokens, kv_heads, value_dim)), "cos": (cos, (tokens,
        rotary)),
        "sin": (sin, (tokens, rotary)), "keys": (keys, (len(keys), kv_heads, dim)),
        "values": (values, (len(keys), kv_heads, value_dim)), "slots": (slots, (tokens,)), "out": (out, (tokens, heads, dim)),
        "query_norm": (query_norm, (dim,)), "key_norm": (key_norm, (dim,)), "key_scale": (key_scale, (kv_heads,)),
        "value_scale": (value_scale, (kv_heads,)),
    }  # fmt: skip
    for name, (tensor, shape) in expected.items():
        if tensor is not None and (tensor.shape != shape or (tensor.numel() and tensor.stride(-1) != 1)):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be {shape}, its last dimension contiguous"
            )
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads; it must be a multiple of the {kv_heads} KV heads")
    if not 0 < rotary <= dim or rotary % 2:
        raise ValueError(f"cos is {rotary} wide; it must be even and at most the head size, {dim}")
    if cos.stride(0) != sin.stride(0):
        raise ValueError(f"cos and sin have row strides {cos.stride(0)} and {sin.stride(0)}; they must be equal")
    if fp8 and (key_scale is None or value_scale is None):
        raise ValueError("an 8-bit pool needs key_scale and value_scale")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm must be given together")
    if not tokens:
        return out
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    rotate(
        query, key, value, cos, sin, keys, values, slots, query_norm=query_norm, key_norm=key_norm, eps=eps,
        key_scale=key_scale, value_scale=value_scale, out=out,
    )  # fmt: skip
    return out


def rotate(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *,
    query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 0.0,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    """:func:`rope_and_write` of one token or more, without its checks, which take the host longer than the launch. A pool of
    bytes must be uint8 here."""
    (tokens, heads, dim), kv_heads, value_dim, rotary = query.shape, key.shape[1], value.shape[2], cos.shape[-1]
    group = heads // kv_heads
    strides = (
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2], cos.stride(0),
    )  # fmt: skip
    launch(
        _rope_write, (tokens, kv_heads, 1),
        (
            query, key, value, out, keys, values, slots, cos, sin, query if query_norm is None else query_norm,
            query if key_norm is None else key_norm, query if key_scale is None else key_scale,
            query if value_scale is None else value_scale,
        ),
        (eps,),
        (
            *strides, group, dim, rotary, value_dim, query_norm is not None, key_scale is not None,
            next_power_of_2(group), next_power_of_2(rotary // 2), next_power_of_2(max(1, dim - rotary)),
            next_power_of_2(value_dim),
        ),
        warps=warps(group, dim),
    )  # fmt: skip


def warps(group: int, dim: int) -> int:
    return 1 if group * dim <= 512 else 4
