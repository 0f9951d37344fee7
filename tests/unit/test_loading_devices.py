"""The device and the dtype a model is loaded for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.errors import InputError
from runtime.torch_backend.cuda import tiles
from runtime.torch_backend.loading import (
    cpu_has_bfloat16,
    resolve_device,
    resolve_dtype,
)


def test_devices() -> None:
    cuda = torch.cuda.is_available()
    assert resolve_device("auto").type == ("cuda" if cuda else "cpu")
    assert resolve_device("cpu") == torch.device("cpu")
    for bad in ("gpu", "mps", "", "cuda:999" if cuda else "cuda"):
        with pytest.raises(InputError, match="device is"):
            resolve_device(bad)


@pytest.mark.parametrize(
    ("architecture", "dtype"), [(70, torch.float16), (75, torch.float16), (80, torch.bfloat16), (120, torch.bfloat16)]
)
def test_a_gpu_computes_bfloat16_from_compute_capability_8_on(
    architecture: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "architecture_of", lambda device: architecture)
    assert resolve_dtype("auto", torch.device("cuda")) == dtype


def test_dtypes() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == (torch.bfloat16 if cpu_has_bfloat16() else torch.float32)
    assert resolve_dtype("float16", cpu) == resolve_dtype(torch.float16, cpu) == torch.float16
    for bad in ("int8", "fp8", torch.int8, torch.float64):
        with pytest.raises(InputError, match=r"dtype is '.*'; it must be auto, float32"):
            resolve_dtype(bad, cpu)


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("flags\t: sse avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t: sse amx_bf16\n", True),
        ("Features\t: asimd sve bf16\n", True),
        ("flags\t: sse avx2 avx512f\n", False),
        ("model name : bf16\n", False),
    ],
)
def test_bfloat16_by_cpu_flags(tmp_path: Path, cpuinfo: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + cpuinfo)
    assert cpu_has_bfloat16(str(tmp_path / "cpuinfo")) is has


def test_no_cpuinfo_no_bfloat16(tmp_path: Path) -> None:
    assert not cpu_has_bfloat16(str(tmp_path / "absent"))
