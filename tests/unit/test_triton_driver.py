"""Triton where nothing can be compiled: who asks for the GPU's backend hears what to install, and gets PyTorch's operations."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from runtime.errors import InputError, MissingTritonError
from runtime.torch_backend import backends
from runtime.torch_backend.backends import PLAIN, backend_for, check_kv_cache_dtype
from runtime.torch_backend.cuda import language, tiles
from runtime.torch_backend.cuda.backend import CUDA
from runtime.torch_backend.cuda.language import need_driver

GPU = torch.device("cuda")
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADERS = subprocess.CalledProcessError(1, ["gcc", "main.c", "-O3", "-shared", "-o", "utils.so"])


class Driver:
    """As Triton's: compiled when it is first asked for. ``error``: what that raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, 0

    @property
    def active(self) -> object:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As when a process begins, on a GPU that the kernels are made for."""
    monkeypatch.setattr(tiles, "architecture_of", lambda device: 80)
    backends._cuda.cache_clear()
    yield
    backends._cuda.cache_clear()


def compiled(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Driver:
    """As on a GPU, where kernels are not interpreted."""
    driver = Driver(error)
    here: Any = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setattr(language, "triton", here)
    monkeypatch.setattr(language, "INTERPRETED", SimpleNamespace(value=False))
    return driver


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NO_COMPILER, "Failed to find C compiler. Please specify via CC environment variable"),
        (NO_HEADERS, "gcc ended with 1"),
        (AssertionError("libcuda.so cannot found!\nPlease run ldconfig"), "libcuda.so cannot found!"),
        (ImportError(), "ImportError"),
    ],
)
def test_a_driver_that_cannot_be_compiled_is_one_line(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(monkeypatch, error)
    with pytest.raises(MissingTritonError) as told:
        need_driver()
    assert str(told.value) == (
        f"Triton does not start ({why}); it needs a C compiler and Python's headers: install gcc and python3-dev"
    )


def test_the_backend_is_then_pytorchs_own_and_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = compiled(monkeypatch, NO_COMPILER)
    with caplog.at_level(logging.WARNING):
        assert backend_for(GPU) is PLAIN and backend_for(torch.device("cuda", 1)) is PLAIN
        with pytest.raises(InputError, match="only the Triton kernels, on CUDA, read a KV pool of 8 bits"):
            check_kv_cache_dtype("fp8", GPU)
    (said,) = caplog.messages
    assert "install gcc and python3-dev; until then PyTorch's own operations run" in said and "\n" not in said
    assert driver.asked == 1


def test_a_driver_that_starts_leaves_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = compiled(monkeypatch)
    assert backend_for(GPU) is CUDA and driver.asked == 1 and not caplog.messages


def test_neither_interpreted_kernels_nor_a_cpu_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = compiled(monkeypatch, NO_COMPILER)
    assert backend_for(torch.device("cpu")) is backends.CPU
    monkeypatch.setattr(language, "INTERPRETED", SimpleNamespace(value=True))
    assert backend_for(GPU) is CUDA and driver.asked == 0


@pytest.mark.parametrize(("architecture", "said"), [(75, "7.5"), (70, "7.0")])
def test_a_gpu_that_is_too_old_for_the_kernels_has_pytorchs_own_and_one_line_says_so(
    architecture: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = compiled(monkeypatch)
    monkeypatch.setattr(tiles, "architecture_of", lambda device: architecture)
    assert backend_for(GPU) is PLAIN and backend_for(torch.device("cuda", 1)) is PLAIN and driver.asked == 0
    assert caplog.messages == [
        f"the GPU has compute capability {said}, and the GPU kernels need 8.0 or newer; PyTorch's own operations run, at "
        "several times the cost"
    ]
    monkeypatch.setattr(tiles, "architecture_of", lambda device: 80)
    assert backend_for(GPU) is CUDA, "another GPU of the same machine"
