"""Counting what a step asks of a device: operations, and waits for it. And a device whose tensors are shapes and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.operations import HeadNorm

DEVICE = torch.device("meta")
"""Stands for a GPU: not the host, and what is on it cannot be looked at."""
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "detach"}
"""Operations that launch nothing, besides views."""

_LOOKS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"}


class Counted(TorchDispatchMode):
    """Names of the operations that run, but for views and allocations. What goes on in :meth:`one` is one operation.

    ``waits``: those that make the host wait for the device: values looked at, copies to the host, copies from pageable memory.
    ``copies``: those to the host. A copy to the host of what has no content yields zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []
        self.copies = 0
        self._inside = 0

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        if not self._inside:
            self.names.append(name)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        returned = func._schema.returns
        view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if name in _LOOKS:
            self.waits.append(name)
        if not self._inside and not view and name not in _FREE:
            self.names.append(name)
        if name in ("to", "_to_copy", "copy_"):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            source: torch.Tensor = given["src"] if name == "copy_" else given["self"]
            to = torch.device(given["self"].device if name == "copy_" else given.get("device") or source.device)
            if source.device == DEVICE and to.type == "cpu":
                self.waits.append(f"{name} to the host")
                self.copies += 1
                return _zeros(source)
            if source.device.type == "cpu" and to == DEVICE and not given.get("non_blocking"):
                self.waits.append(f"{name} from pageable memory")
        return func(*args, **kwargs)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(like.shape)


def put_elsewhere(executor: TorchExecutor) -> None:
    """Move all that ``executor`` holds, weights, pool and itself, to :data:`DEVICE`."""
    for module in executor.loaded.model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = value.detach().to(DEVICE)  # type: ignore[assignment]
                elif isinstance(value, HeadNorm):
                    held[name] = HeadNorm(*(x.to(DEVICE) for x in value[:3]), value.eps)  # type: ignore[assignment]
    pool = executor.pool
    for layer in [*pool.layers.values(), *(layer for _, layer in pool._unclaimed)]:
        layer.keys, layer.values = layer.keys.to(DEVICE), layer.values.to(DEVICE)
    for holder in (executor, executor.sampler, executor.attention):
        holder.device = DEVICE  # type: ignore[union-attr]
