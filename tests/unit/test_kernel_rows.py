"""RMS norm and gated activations against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels import DEVICE, ROUNDING, close, poisoned, randn

from runtime.torch_backend.cuda.activation import gated  # isort: skip
from runtime.torch_backend.cuda.norm import rms_norm  # isort: skip

DTYPES = list(ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (5, 64), (2, 300), (1, 4096)])
def test_rms_norm_by_its_definition(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = randn(rows, width, seed=1, dtype=dtype), randn(width, seed=2, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = poisoned(rows, width, dtype=dtype)
    assert rms_norm(x, weight, 1e-5, out=out) is out
    # one rounding, and float32 sums of up to 4096 squares
    close(out, expected, ROUNDING[dtype] + 1e-5, 1e-6)
    close(rms_norm(x, weight, 1e-5, out=x), expected, ROUNDING[dtype] + 1e-5, 1e-6)  # in place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_adds_to_the_residual(dtype: torch.dtype) -> None:
    wide = randn(4, 2 * 96, seed=3, dtype=dtype)
    x, residual = wide[:, 96:], randn(4, 96, seed=4, dtype=dtype)  # rows that don't lie end to end
    total = x.double() + residual.double()
    out = poisoned(4, 96, dtype=dtype)
    weight = randn(96, seed=5, dtype=dtype)
    rms_norm(x, weight, 1e-6, residual=residual, out=out)
    close(residual, total, ROUNDING[dtype], 1e-6)
    # the norm is of the rounded sum, so by what is there now
    kept = residual.double()
    close(
        out, kept / (kept.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(), ROUNDING[dtype] + 1e-5, 1e-6
    )


def test_rms_norm_where_eps_decides() -> None:
    x = torch.full((1, 8), 1e-4, device=DEVICE)
    expected = x.double() / math.sqrt(1e-8 + 1e-2)
    close(rms_norm(x, torch.ones(8, device=DEVICE), 1e-2), expected, 1e-5, 0)
    assert rms_norm(x[:0], torch.ones(8, device=DEVICE), 1e-2).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (2, 1024), (2, 1500)])
def test_gated_by_its_definition(dtype: torch.dtype, rows: int, width: int) -> None:
    both = randn(rows, 2 * width, seed=6, dtype=dtype) * 4
    gate, up = both.double().split(width, -1)
    close(gated(both), torch.nn.functional.silu(gate) * up, ROUNDING[dtype] + 1e-5, 1e-6)


def test_gated_at_the_ends() -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]], device=DEVICE)
    both = torch.cat([gate, torch.ones_like(gate)], -1)
    close(gated(both), torch.tensor([[0.0, 0, 0, 90, 200]], dtype=torch.float64), 1e-6, 1e-30)
    assert gated(both[:0]).shape == (0, 5)


def test_what_does_not_fit_is_named() -> None:
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must be a contiguous \[8\]"):
        rms_norm(x, weight[:7], 1e-5)
    with pytest.raises(ValueError, match="residual has shape"):
        rms_norm(x, weight, 1e-5, residual=randn(3, 8))
    with pytest.raises(ValueError, match="out has shape"):
        rms_norm(x, weight, 1e-5, out=randn(1, 8))
    with pytest.raises(ValueError, match="x is 40000 wide; it must be between 1 and 32768"):
        rms_norm(randn(1, 40000), randn(40000), 1e-5)
    with pytest.raises(ValueError, match="contiguous rows"):
        rms_norm(x.T, weight, 1e-5)
    with pytest.raises(ValueError, match="gate_up has shape"):
        gated(randn(2, 7))
