"""PyTorch's own scaled dot-product attention, on CUDA without cuDNN."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SWITCHES: Any = torch.backends.cuda  # whose functions have no types


class _WithoutCuDNN:
    """Has PyTorch leave out cuDNN's attention within. The switch is the process's, so the last thread to leave puts it back as
    the first one found it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _SWITCHES.cudnn_sdp_enabled()
                _SWITCHES.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _SWITCHES.enable_cudnn_sdp(self._before)


_WITHOUT_CUDNN = _WithoutCuDNN()


def chosen(device: torch.device) -> AbstractContextManager[None]:
    """Within, PyTorch chooses among the attentions that suit ``device``: on CUDA not cuDNN's, which makes a plan for each shape
    (stalls of 0.4 s are reported on Hopper), where nearly every step is of another."""
    return _WITHOUT_CUDNN if device.type == "cuda" else nullcontext()


def attended(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """``scaled_dot_product_attention``, with its ``options``."""
    with chosen(query.device):
        return F.scaled_dot_product_attention(query, keys, values, **options)
