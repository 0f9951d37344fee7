"""A bare PyTorch module as a function of a list of items."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class BatchedModule:
    """Stacks items (tensors, arrays, numbers; or tuples of them, for a module of several inputs), runs the module without
    gradients on the device of its weights, waits for a GPU to be done, and gives each item its row of the output (of each
    output, if there are several).

    Tensors of different lengths are padded with zeros at the end to the longest; a module that must know the lengths needs
    a ``collate`` of its own, or a function around it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module.eval()
        tensor = next(iter([*module.parameters(), *module.buffers()]), None)
        self._device = torch.device("cpu") if tensor is None else tensor.device

    def __call__(self, items: Any) -> list[Any]:
        if isinstance(items, Tensor):  # collated already
            columns = [items.to(self._device)]
        elif isinstance(items[0], tuple):
            columns = [self._stack(list(column)) for column in zip(*items, strict=True)]
        else:
            columns = [self._stack(items)]
        with torch.inference_mode():
            found = self._module(*columns)
        if self._device.type == "cuda":  # or the call would seem to take no longer than launching it
            torch.cuda.current_stream(self._device).synchronize()
        if isinstance(found, Tensor):
            return list(found)
        if isinstance(found, tuple | list):
            return [tuple(row) for row in zip(*found, strict=True)]
        if isinstance(found, dict):
            return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        raise TypeError(
            f"{type(self._module).__name__} returned {type(found).__name__}; a tensor, tuple or dict is needed"
        )

    def _stack(self, items: list[Any]) -> Tensor:
        tensors = [torch.as_tensor(item) for item in items]
        if len({t.shape for t in tensors}) > 1:
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(self._device)
        return torch.stack(tensors).to(self._device)
