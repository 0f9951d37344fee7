"""What the tests of the GPU kernels share. They run interpreted where there is no GPU, and on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from runtime.torch_backend.cuda.language import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip(
        "a GPU driver is there, but PyTorch sees no device; TRITON_INTERPRET=1 tests without", allow_module_level=True
    )

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Largest relative error of one rounding. The interpreter cuts bfloat16 off instead of rounding it, so twice a half step."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def close(found: Tensor, expected: Tensor, relative: float, absolute: float) -> None:
    """``found`` is finite and near the float64 ``expected``."""
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), rtol=relative, atol=absolute)
