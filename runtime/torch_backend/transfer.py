"""Between host and device in few copies, the host waiting for none but what it reads.

A copy from pageable memory makes the host wait for the device, and so does every value that is looked at. So what a step
needs goes over in one copy from pinned memory, and what it yields comes back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.clock import Clock


class Mark(Protocol):
    """A place in what a device has queued."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...

    def passed(self) -> bool:
        """Whether the device has come there."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """From ``earlier``, a mark of the same kind, to this one on the device's clock; both have been passed."""
        ...


class _Event:
    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        self._event.synchronize()

    def passed(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: _Event) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


MARKS: dict[str, Callable[[torch.device], Mark]] = {"cuda": _Event}
"""What marks the end of what is queued now, by kind of device; those of other kinds copy when their values are asked for."""

_ALIGNED = 16  # bytes: GPU kernels load more at once from addresses that are a multiple of it


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of ``arrays``, which all have one dtype, on ``device``. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    grain = _ALIGNED // arrays[0].itemsize
    ends = list(accumulate(-(-array.size // grain) * grain for array in arrays))
    begins = [0, *ends[:-1]]
    flat = np.zeros(ends[-1], arrays[0].dtype)
    for begin, array in zip(begins, arrays, strict=True):
        flat[begin : begin + array.size] = array.reshape(-1)
    # the allocator of pinned memory keeps it until the copy is done
    there = torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
    return [there[begin : begin + a.size].view(a.shape) for begin, a in zip(begins, arrays, strict=True)]


class Readback:
    """Tensors of one device that the host is going to read, put together where they are.

    Where the device has events, the copy to pinned memory is queued at once, and so runs before whatever is queued next; to read
    is then to wait for this copy, not for all that the device has been given since.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._here: list[Tensor] | None = None
        self._bytes: Tensor | None = None
        self.mark: Mark | None = None
        """Behind what the tensors hold; None on a CPU, and for devices without."""
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._here = list(tensors)
            return
        self._bytes = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        if (mark := MARKS.get(tensors[0].device.type)) is not None:
            there, self._bytes = self._bytes, torch.empty(self._bytes.shape, dtype=torch.uint8).pin_memory()
            self._bytes.copy_(there, non_blocking=True)
            self.mark = mark(there.device)

    def wait(self) -> list[Tensor]:
        """The tensors in the host's memory; waits until the device has computed them, and copies once."""
        if self._here is not None:
            return self._here
        assert self._bytes is not None
        if self.mark is not None:
            self.mark.synchronize()
        found, at, host = [], 0, self._bytes.cpu()
        for dtype, shape in self._kinds:
            end = at + shape.numel() * dtype.itemsize
            # a copy begins at an address that suits the dtype
            found.append(host[at:end].clone().view(dtype).view(shape))
            at = end
        return found


class DeviceEnds:
    """When steps ended on a device, by the host's clock.

    The host often looks late: it was launching the next step. Such a step ended as long after the last one that the host has
    waited for as the device says; a step that it waits for ends when the wait does. The two clocks do not run at quite the same
    rate, so after ``SPAN_S`` without a wait the host is believed once.
    """

    SPAN_S = 5.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited: tuple[Mark, float] | None = None

    def forget(self) -> None:
        """What comes next is behind steps whose end is not known."""
        self._waited = None

    def read(self, values: Readback) -> tuple[list[Tensor], float]:
        """The tensors of ``values``, a step's last, and when the device had computed them."""
        mark = values.mark
        late = mark is not None and mark.passed()
        found, now = values.wait(), self._clock.now()
        if mark is None:
            return found, now
        if late and self._waited is not None:
            earlier, at = self._waited
            since = mark.seconds_since(earlier)
            if since <= self.SPAN_S:
                return found, min(now, at + since)
        self._waited = mark, now
        return found, now
