"""Which errors of PyTorch mean that the device is lost to this process."""

from __future__ import annotations

from typing import Final

import torch

from runtime.errors import DeviceError
from runtime.torch_backend.memory import is_out_of_memory

_LOST: Final = (
    "device-side assert",
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "invalid program counter",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable",  # ECC and NVLink errors
    "context is destroyed",
    "context has been destroyed",
    "gpu is lost",
    "unknown error",
)
"""Words of the errors after which every later call on the device fails as well, until the process ends."""


def device_error(error: BaseException, device: torch.device) -> DeviceError | None:
    """What to raise if ``error`` says that ``device`` is lost; None if a next step may succeed.

    CUDA names the errors that stay (:data:`_LOST`). Other errors of a GPU are settled by asking it: one that is lost fails at
    every call.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return None
    text = str(error).strip().lower()
    named = isinstance(error, torch.AcceleratorError) or text.startswith(("cuda error", "hip error"))
    if named and any(words in text for words in _LOST):
        return _made(error, device)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as still:
            if not is_out_of_memory(still):
                return _made(still, device)
    return None


def _made(error: RuntimeError, device: torch.device) -> DeviceError:
    first = str(error).strip().partition("\n")[0]
    return DeviceError(f"{device} cannot be used any more: {first}; start the process again")
