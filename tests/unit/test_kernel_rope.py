"""Rotary embedding and the write to the pool against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiers import slow_but_for
from tests.unit.kernels import DEVICE, ROUNDING, close, poisoned, randn

from runtime.torch_backend.cuda.rope import rope_and_write  # isort: skip
from runtime.torch_backend.kv_pool import fp8_bytes

SLOTS = 40


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [tokens, heads, dim]`` in float64, pair by pair."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    out, half = x.clone(), cos.shape[-1] // 2
    for i in range(half):
        one, two = i, i + half
        out[..., one] = x[..., one] * cos[:, None, one] - x[..., two] * sin[:, None, one]
        out[..., two] = x[..., two] * cos[:, None, two] + x[..., one] * sin[:, None, two]
    return out


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def angles(tokens: int, rotary: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(tokens, device=DEVICE)[:, None] * 10.0 ** -torch.linspace(0, 3, rotary // 2, device=DEVICE)
    both = torch.cat([angle, angle], -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize(
    ("dtype", "norm"),
    slow_but_for(((torch.bfloat16, True),), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]),
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "value_dim"),
    [
        (4, 2, 16, 16, 16),
        (3, 1, 24, 8, 40),
        (2, 2, 2, 2, 1),
        (6, 2, 80, 80, 80),
    ],
    ids=str,
)
def test_rope_and_write_by_definition(
    dtype: torch.dtype, norm: bool, heads: int, kv_heads: int, dim: int, rotary: int, value_dim: int
) -> None:
    tokens = 4
    query, key = randn(tokens, heads, dim, seed=1, dtype=dtype), randn(tokens, kv_heads, dim, seed=2, dtype=dtype)
    value = randn(tokens, kv_heads, value_dim, seed=3, dtype=dtype)
    cos, sin = angles(tokens, rotary)
    keys, values = poisoned(SLOTS, kv_heads, dim, dtype=dtype), poisoned(SLOTS, kv_heads, value_dim, dtype=dtype)
    slots = torch.tensor([17, 3, -1, 39], device=DEVICE)
    out = poisoned(tokens, heads, dim, dtype=dtype)
    given: dict[str, Any] = {}
    wide_query, wide_key = query.double(), key.double()
    if norm:
        weights = randn(dim, seed=4, dtype=dtype), randn(dim, seed=5, dtype=dtype)
        given |= {"query_norm": weights[0], "key_norm": weights[1], "eps": 1e-6}
        wide_query, wide_key = normed(query, weights[0], 1e-6), normed(key, weights[1], 1e-6)
    before = query.clone()
    assert rope_and_write(query, key, value, cos, sin, keys, values, slots, out=out, **given) is out
    assert torch.equal(query, before)
    # one rounding of the result, and float32 products of the terms, which may cancel
    bounds = ROUNDING[dtype] + 1e-6, 4e-6
    close(out, rotated(wide_query, cos, sin), *bounds)
    written = [17, 3, 39]
    close(keys[written], rotated(wide_key, cos, sin)[[0, 1, 3]], *bounds)
    assert torch.equal(values[written], value[[0, 1, 3]])
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert keys[others].isnan().all()
    assert values[others].isnan().all()
    assert rope_and_write(query, key, value, cos, sin, keys, values, slots, **given) is query  # in place
    assert torch.equal(query, out)


def test_views_of_a_merged_projection() -> None:
    merged = randn(3, 6, 16, seed=6)
    given = merged.clone()
    cos, sin = angles(3, 16)
    keys, values = poisoned(SLOTS, 1, 16), poisoned(SLOTS, 1, 16)
    slots = torch.tensor([5, 4, 3], dtype=torch.int32, device=DEVICE)
    rope_and_write(merged[:, :4], merged[:, 4:5], merged[:, 5:], cos, sin, keys, values, slots)
    close(merged[:, :4], rotated(given[:, :4], cos, sin), 1e-6, 4e-6)
    assert torch.equal(merged[:, 4:], given[:, 4:])
    close(keys[[5, 4, 3]], rotated(given[:, 4:5], cos, sin), 1e-6, 4e-6)
    assert torch.equal(values[[5, 4, 3]], given[:, 5:])


def test_writing_8_bits_rounds_as_torch_does() -> None:
    """Every float16 number as a value: normal and subnormal, ties, beyond the largest, infinities (which become NaN) and NaN."""
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(torch.float16)
    value = torch.where(value.isnan(), torch.nan, value).view(1, 16, 4096)  # quiet ones, which raise no warning
    key = torch.zeros(1, 16, 2, device=DEVICE, dtype=torch.float16)
    cos, sin = angles(1, 2)
    scales = torch.tensor([1.0, 0.37] * 8, device=DEVICE), torch.tensor([1.0, 2.0**-9] * 8, device=DEVICE)
    keys = torch.zeros(2, 16, 2, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    values = torch.zeros(2, 16, 4096, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    rope_and_write(
        key.clone(),
        key,
        value,
        cos,
        sin,
        keys,
        values,
        torch.tensor([1], device=DEVICE),
        key_scale=scales[0],
        value_scale=scales[1],
    )
    scaled = value[0].float() / scales[1][:, None]
    expected = scaled.clamp(-448, 448).masked_fill(scaled.isinf(), torch.nan).to(torch.float8_e4m3fn).float()
    assert torch.equal(values[1].float().nan_to_num(1e9), expected.nan_to_num(1e9))
    ours = fp8_bytes(value, scales[1])[0].view(torch.float8_e4m3fn).float()
    assert torch.equal(ours.nan_to_num(1e9), expected.nan_to_num(1e9)), "the write of layers that are not fused"
    assert (values[0].float() == 0).all()


def test_keys_in_8_bits_are_scaled() -> None:
    key, value = randn(1, 2, 8, seed=8), randn(1, 2, 8, seed=9)
    cos, sin = angles(1, 4)
    scales = torch.tensor([0.01, 0.3], device=DEVICE), torch.tensor([0.02, 0.1], device=DEVICE)
    keys = torch.zeros(1, 2, 8, dtype=torch.uint8, device=DEVICE)
    values = keys.clone()
    rope_and_write(
        key.clone(), key, value, cos, sin, keys, values, torch.tensor([0], device=DEVICE), key_scale=scales[0],
        value_scale=scales[1]
    )  # fmt: skip
    kept = keys[0].view(torch.float8_e4m3fn).float() * scales[0][:, None]
    close(kept, key[0].double(), 2.0**-4, 1e-3)  # position 0 is not rotated; 3 bits of mantissa
    close(values[0].view(torch.float8_e4m3fn).float() * scales[1][:, None], value[0].double(), 2.0**-4, 1e-3)


def test_no_tokens_and_what_does_not_fit() -> None:
    cos, sin = angles(2, 8)
    query, key, keys = randn(2, 4, 8), randn(2, 2, 8), poisoned(SLOTS, 2, 8)
    slots = torch.tensor([0, 1], device=DEVICE)
    empty = rope_and_write(query[:0], key[:0], key[:0], cos[:0], sin[:0], keys, keys.clone(), slots[:0])
    assert empty.shape == (0, 4, 8)
    assert keys.isnan().all()
    with pytest.raises(ValueError, match=r"slots has shape \(1,\); it must be \(2,\)"):
        rope_and_write(query, key, key, cos, sin, keys, keys, slots[:1])
    with pytest.raises(ValueError, match=r"values has shape \(40, 2, 4\); it must be \(40, 2, 8\)"):
        rope_and_write(query, key, key, cos, sin, keys, poisoned(SLOTS, 2, 4), slots)
    with pytest.raises(ValueError, match="cos is 5 wide; it must be even and at most the head size, 8"):
        rope_and_write(query, key, key, cos[:, :5], sin[:, :5], keys, keys, slots)
    with pytest.raises(ValueError, match="query has 3 heads; it must be a multiple of the 2 KV heads"):
        rope_and_write(query[:, :3], key, key, cos, sin, keys, keys, slots)
    with pytest.raises(ValueError, match="query_norm and key_norm must be given together"):
        rope_and_write(query, key, key, cos, sin, keys, keys, slots, query_norm=randn(8))
    with pytest.raises(ValueError, match="an 8-bit pool needs key_scale and value_scale"):
        rope_and_write(query, key, key, cos, sin, keys.to(torch.float8_e4m3fn), keys.to(torch.float8_e4m3fn), slots)
