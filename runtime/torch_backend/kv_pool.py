"""The block KV pool: keys and values of every attention layer, by slot.

A block is ``block_size`` consecutive slots; block ``b`` holds slots ``b·block_size … (b+1)·block_size − 1``. Which
sequence owns a block is the scheduler's business; the pool only stores. Layers get their tensors at their first call,
because the number and width of heads may differ by layer, and between keys and values.
"""

from __future__ import annotations

import math

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from runtime.torch_backend.contract import Loaded

MAX_CPU_POOL_BYTES = 4 << 30
CPU_SHARE = 0.3  # the decode cache may take as much again
CUDA_SHARE = 0.85


class LayerKV:
    """Keys ``[slots, heads, key_dim]`` and values ``[slots, heads, value_dim]`` of one layer."""

    __slots__ = ("keys", "serial", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.serial = -1  # the step that wrote here last

    def blocks(self, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """What the blocks ``table[rows, n]`` hold: ``[rows, n·block_size, heads, dim]`` twice.

        Whole blocks by ``index_select``: indexing slot by slot takes 2.4 times as long on a CPU.
        """
        rows, count = table.shape
        flat = table.reshape(-1)
        keys = self.keys.view(-1, block_size, *self.keys.shape[1:]).index_select(0, flat)
        values = self.values.view(-1, block_size, *self.values.shape[1:]).index_select(0, flat)
        return (
            keys.view(rows, count * block_size, *self.keys.shape[1:]),
            values.view(rows, count * block_size, *self.values.shape[1:]),
        )


class KVPool:
    """``blocks`` blocks for each layer, and one more, always zero, that pads block tables."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"kv_blocks is {blocks} and block_size {block_size}; both must be at least 1")
        self.block_count = blocks
        self.block_size = block_size
        self.pad_block = blocks
        self.layers: dict[nn.Module, LayerKV] = {}

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> LayerKV:
        """The store of ``module``; ``key`` and ``value`` ``[1, heads, tokens, dim]`` give its shape at the first call."""
        found = self.layers.get(module)
        if found is None:
            slots = (self.block_count + 1) * self.block_size
            found = self.layers[module] = LayerKV(
                _zeros_like(key, slots, key.shape[1], key.shape[3]),
                _zeros_like(value, slots, value.shape[1], value.shape[3]),
            )
        return found

    def scrub(self, blocks: list[int]) -> None:
        """Zero ``blocks`` in every layer: their last owner left values that are not finite.

        Positions behind a sequence's end are masked, but NaN times a weight of zero is NaN.
        """
        for layer in self.layers.values():
            at = torch.tensor(blocks, device=layer.keys.device)
            layer.keys.view(-1, self.block_size, *layer.keys.shape[1:]).index_fill_(0, at, 0)
            layer.values.view(-1, self.block_size, *layer.values.shape[1:]).index_fill_(0, at, 0)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for layer in self.layers.values() for x in (layer.keys, layer.values))


def _zeros_like(tensor: Tensor, *shape: int) -> Tensor:
    """Zeros of ``tensor``'s dtype and device. On a CPU the pages come from the system zeroed when they are first touched:
    writing them all at once would take seconds for a pool of which a light load touches little."""
    if tensor.device.type != "cpu":
        return tensor.new_zeros(*shape)
    count = math.prod(shape) * tensor.element_size()
    return torch.from_numpy(np.zeros(count, np.uint8)).view(tensor.dtype).view(*shape)


def default_kv_blocks(loaded: Loaded, block_size: int = 16) -> int:
    """How many KV blocks the free memory of the model's device allows, with its weights in place.

    CUDA: the share ``CUDA_SHARE`` of what is free now, the rest for activations. CPU: the share ``CPU_SHARE`` of
    available memory and never more than ``MAX_CPU_POOL_BYTES``. Never more than 4096 sequences of the model's full context.
    Raises ``ValueError`` when not even one block fits.
    """
    free = free_bytes(loaded)
    budget = int(free * CUDA_SHARE) if loaded.device.type == "cuda" else min(int(free * CPU_SHARE), MAX_CPU_POOL_BYTES)
    blocks = budget // (loaded.kv_bytes_per_token * block_size)
    if blocks < 1:
        raise ValueError(
            f"{budget} bytes of memory are left for the KV pool of {loaded.name}; "
            f"one block of {block_size} tokens takes {loaded.kv_bytes_per_token * block_size}"
        )
    return int(min(blocks, 4096 * -(-loaded.max_model_len // block_size)))


def free_bytes(loaded: Loaded) -> int:
    """Memory of the model's device that nobody uses now."""
    if loaded.device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(loaded.device)
    # memory that torch's caching allocator holds but does not use is free to us as well
    return int(free + torch.cuda.memory_reserved(loaded.device) - torch.cuda.memory_allocated(loaded.device))


def check_pool(loaded: Loaded, tokens: int) -> None:
    """Raise ``ValueError`` if a pool of ``tokens`` does not fit into the whole memory of the model's device."""
    needed = tokens * loaded.kv_bytes_per_token
    if loaded.device.type == "cuda":
        memory = torch.cuda.get_device_properties(loaded.device).total_memory
    else:
        memory = psutil.virtual_memory().total
    if needed > memory:
        most = memory // loaded.kv_bytes_per_token
        raise ValueError(
            f"kv_tokens is {tokens}; the KV pool would take {needed / 2**30:.0f} GiB, and {loaded.device} has "
            f"{memory / 2**30:.0f}; it must be below {most}"
        )
