"""What a CUDA device says of its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class CUDAMemory:
    """A :class:`~runtime.torch_backend.memory.DeviceMemory` of ``device``.

    Both figures are of memory that PyTorch's allocator has taken from the device, not of tensors: what is lost between them is
    in use, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        self._settle()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def peak(self, call: Callable[[], object]) -> int:
        self._settle()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - int(before)

    def _settle(self) -> None:
        """Wait for what is queued, and give back to the device what no tensor uses."""
        gc.collect()  # executors whose parts hold each other, with their pools
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
