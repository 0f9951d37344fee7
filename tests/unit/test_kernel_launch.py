"""Launches of kernels that have been compiled: by dtypes, constants and alignment, on a device that is not there."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from runtime.torch_backend.cuda import launch as module  # isort: skip
from runtime.torch_backend.cuda.launch import launch  # isort: skip


class Compiled:
    """As Triton hands it out: what launches, and what that wants along."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self._name = log, name

    def run(self, *given: Any) -> None:
        grid, (stream, function, metadata, *hooks), arguments = given[:3], given[3:9], given[9:]
        assert (function, metadata, hooks) == ("function", "metadata", [None] * 3)
        self._log.append((self._name, grid, stream, arguments))


class Kernel:
    """Compiles at each call, as Triton's does where it has not yet."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.log: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Compiled:
            self.compiled.append(options)
            return Compiled(self.log, f"binary {len(self.compiled)}")

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "INTERPRETED", type("Off", (), {"value": False}))
    monkeypatch.setattr(module, "stream_of", lambda device: 77)
    return Kernel()


def call(kernel: Kernel, tensor: Tensor, *, constant: int = 5, number: float = 0.5, warps: int = 4) -> None:
    launch(kernel, (3, 2, 1), (tensor, tensor), (number,), (constant,), warps=warps)


def test_a_binary_is_looked_up_once_and_then_launched_with_all_arguments(kernel: Kernel) -> None:
    x = torch.zeros(64)
    call(kernel, x)
    assert len(kernel.compiled) == 1 and kernel.log == []  # which has launched it, too
    call(kernel, x, number=0.25)  # numbers are arguments, not part of a binary
    assert len(kernel.compiled) == 1
    there = x.data_ptr()
    assert kernel.log == [("binary 1", (3, 2, 1), 77, (there, there, 0.25, 5, False))]


@pytest.mark.parametrize("change", [{"constant": 6}, {"warps": 8}])
def test_another_constant_or_option_is_another_binary(kernel: Kernel, change: dict[str, int]) -> None:
    x = torch.zeros(64)
    call(kernel, x)
    call(kernel, x, **cast(Any, change))
    call(kernel, x, **cast(Any, change))
    assert len(kernel.compiled) == 2
    assert [name for name, *_ in kernel.log] == ["binary 2"]


def test_another_dtype_is_another_binary(kernel: Kernel) -> None:
    call(kernel, torch.zeros(64))
    call(kernel, torch.zeros(64, dtype=torch.bfloat16))
    assert len(kernel.compiled) == 2


def test_pointers_that_are_not_aligned_are_left_to_triton(kernel: Kernel) -> None:
    aligned = torch.zeros(64)
    call(kernel, aligned[1:])
    call(kernel, aligned[1:])
    assert len(kernel.compiled) == 2 and kernel.log == []
    call(kernel, aligned)  # nor is a binary for others taken for these
    assert len(kernel.compiled) == 3
    call(kernel, aligned[1:])
    assert len(kernel.compiled) == 4 and kernel.log == []


def test_a_chip_that_has_it_lets_kernels_begin_early(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    call(kernel, torch.zeros(64))
    assert "launch_pdl" not in kernel.compiled[0]
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "architecture_of", lambda device: 90)
    call(kernel, torch.zeros(64))
    assert kernel.compiled[1]["launch_pdl"] is True
    call(kernel, torch.zeros(64))
    assert kernel.log[-1][3][2:] == (0.5, 5, True)
