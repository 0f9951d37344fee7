"""The CUDA device that is current in a thread: kernels, events and graphs go there, wherever their tensors are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Placed(Protocol):
    """What has a device of its own."""

    device: torch.device


Owner = TypeVar("Owner", bound=Placed)


def made_current(device: torch.device) -> AbstractContextManager[None]:
    """Makes ``device`` current, where it is a CUDA device and another one is."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def on_its_device(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """``method``, run with the device of its object current."""

    @functools.wraps(method)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with made_current(self.device):
            return method(self, *args, **kwargs)

    return run
