"""The block KV pool: keys and values of every attention layer, by slot.

A block is ``block_size`` consecutive slots; block ``b`` holds slots ``b·block_size … (b+1)·block_size − 1``. Which
sequence owns a block is the scheduler's business; the pool only stores. All of it is allocated at once, by what a probe of
the model has seen its layers keep: the number and width of heads may differ by layer, and between keys and values.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.torch_backend.contract import KVLayer, Loaded
from runtime.torch_backend.memory import is_out_of_memory, prefer_huge_pages
from runtime.torch_backend.transfer import to_device

MAX_CPU_POOL_BYTES = 4 << 30
CPU_SHARE = 0.3
CUDA_SHARE = 0.85


LARGEST_FP8 = 448.0


class LayerKV:
    """Keys ``[slots, heads, key_dim]`` and values ``[slots, heads, value_dim]`` of one layer.

    Of a pool of 8 bits they are bytes (uint8) that hold e4m3 numbers, and these are multiplied by ``key_scale`` and
    ``value_scale [heads]`` (float32). They are 1: nothing calibrates them.
    """

    __slots__ = ("key_scale", "keys", "serial", "value_scale", "values")

    def __init__(self, keys: Tensor, values: Tensor, *, fp8: bool = False) -> None:
        self.keys = keys
        self.values = values
        self.key_scale, self.value_scale = (
            torch.ones(x.shape[1], device=x.device) if fp8 else None for x in (keys, values)
        )
        self.serial = -1  # the step that wrote here last

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep ``key`` and ``value [tokens, heads, dim]`` in ``slots [tokens]``."""
        if self.key_scale is not None and self.value_scale is not None:
            key, value = fp8_bytes(key, self.key_scale), fp8_bytes(value, self.value_scale)
        self.keys.index_copy_(0, slots, key)
        self.values.index_copy_(0, slots, value)

    def finite(self, slots: Tensor) -> Tensor:
        """Whether all that ``slots [n]`` hold is finite: a bool on the device."""
        found = [x.index_select(0, slots) for x in (self.keys, self.values)]
        if self.key_scale is None:
            keys, values = (x.isfinite().all() for x in found)
        else:
            keys, values = ((x.bitwise_and(0x7F) != 0x7F).all() for x in found)  # else it is e4m3's NaN
        return keys & values

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
    """``blocks`` blocks for each layer, and one more, always zero, that pads block tables. With ``scratch`` another one,
    ``scratch_block``, which rows that are nobody's write.

    ``layers`` are allocated now, on ``device``; layers that are not among them at their first call. With ``fp8`` in 8 bits,
    however they are computed. Raises ``ValueError`` where they do not fit.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        layers: Sequence[KVLayer] = (),
        device: torch.device | None = None,
        *,
        scratch: bool = False,
        fp8: bool = False,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"kv_blocks is {blocks} and block_size {block_size}; both must be at least 1")
        self.block_count = blocks
        self.block_size = block_size
        self.pad_block = blocks
        self.fp8 = fp8
        self.scratch_block = blocks + 1 if scratch else None
        self.layers: dict[nn.Module, LayerKV] = {}
        self._unclaimed: list[tuple[KVLayer, LayerKV]] = []  # allocated, of no module yet
        place = device or torch.device("cpu")
        try:
            for layer in layers:
                self._unclaimed.append((layer, self._allocate(layer, place)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            tokens, held = blocks * block_size, len(self._unclaimed)
            raise ValueError(
                f"kv_tokens is {tokens}; memory of {place} ran out after {held} of {len(layers)} layers of that KV pool; "
                f"about {tokens * held // len(layers)} tokens fit"
            ) from error

    def dummy_slots(self, count: int) -> NDArray[np.int64]:
        """Where ``count`` rows that are nobody's write: in the scratch block, several to a slot if need be."""
        assert self.scratch_block is not None
        return self.scratch_block * self.block_size + np.arange(count) % self.block_size

    def _allocate(self, layer: KVLayer, device: torch.device) -> LayerKV:
        slots = (self.block_count + 1 + (self.scratch_block is not None)) * self.block_size
        dtype = torch.uint8 if self.fp8 else layer.dtype
        keys, values = (_zeros(dtype, device, slots, *each) for each in (layer.key, layer.value))
        return LayerKV(keys, values, fp8=self.fp8)

    def layer(self, module: nn.Module, kept: KVLayer, device: torch.device) -> LayerKV:
        """The store of ``module``, which keeps ``kept`` of a token and computes on ``device``."""
        found = self.layers.get(module)
        if found is None:
            at = next((at for at, (allocated, _) in enumerate(self._unclaimed) if allocated == kept), None)
            found = self._allocate(kept, device) if at is None else self._unclaimed.pop(at)[1]
            self.layers[module] = found
        return found

    @property
    def kept(self) -> tuple[KVLayer, ...]:
        """What each layer called so far keeps of a token."""
        found = []
        for layer in self.layers.values():
            (_, heads, dim), (_, value_heads, value_dim) = layer.keys.shape, layer.values.shape
            found.append(KVLayer((heads, dim), (value_heads, value_dim), layer.keys.dtype))
        return tuple(found)

    def scrub(self, blocks: list[int]) -> None:
        """Zero ``blocks`` in every layer: their last owner left values that are not finite.

        Positions behind a sequence's end are masked, but NaN times a weight of zero is NaN.
        """
        for layer in self.layers.values():
            [at] = to_device([np.array(blocks, np.int64)], layer.keys.device)
            layer.keys.view(-1, self.block_size, *layer.keys.shape[1:]).index_fill_(0, at, 0)
            layer.values.view(-1, self.block_size, *layer.values.shape[1:]).index_fill_(0, at, 0)

    def scrub_slots(self, slots: NDArray[np.int64]) -> None:
        """Zero ``slots [n]`` in every layer, whose blocks their owner keeps."""
        for layer in self.layers.values():
            [at] = to_device([slots], layer.keys.device)
            layer.keys.index_fill_(0, at, 0)
            layer.values.index_fill_(0, at, 0)

    @property
    def bytes(self) -> int:
        """Of all layers, those that no module has called for yet included."""
        layers = [*self.layers.values(), *(layer for _, layer in self._unclaimed)]
        return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))


def fp8_bytes(x: Tensor, scale: Tensor) -> Tensor:
    """``x [tokens, heads, dim]`` over ``scale [heads]`` as e4m3 bytes, as the GPU's kernels write them: rounded to the nearest,
    ±448 at most, NaN for what is not finite."""
    scaled = x.float() / scale[:, None]
    held = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(~scaled.isfinite(), math.nan)
    return held.to(torch.float8_e4m3fn).view(torch.uint8)


def _zeros(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """On a CPU the pages come from the system zeroed when they are first touched: writing them all at once would take seconds
    for a pool of which a light load touches little."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    found = torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(*shape)
    prefer_huge_pages(found, now=False)
    return found


def default_kv_blocks(loaded: Loaded, block_size: int = 16) -> int:
    """How many KV blocks the free memory of the model's device allows, with its weights in place, by a rule of thumb.

    CUDA (where :mod:`runtime.torch_backend.pool_size` knows nothing better): the share ``CUDA_SHARE`` of what is free now, the
    rest for activations. CPU: the share ``CPU_SHARE`` of available memory and never more than ``MAX_CPU_POOL_BYTES``. Never more
    than 4096 sequences of the model's full context. Raises ``ValueError`` when not even one block fits.
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
    gc.collect()  # an engine that was closed may hold its pool until then
    free, _ = torch.cuda.mem_get_info(loaded.device)
    # memory that torch's caching allocator holds but does not use is free to us as well
    return int(free + torch.cuda.memory_reserved(loaded.device) - torch.cuda.memory_allocated(loaded.device))


def check_pool(loaded: Loaded, tokens: int, block_size: int = 16) -> None:
    """Raise ``ValueError`` unless a pool of ``tokens`` fits into what is free beside the weights."""
    needed, free = tokens * loaded.kv_bytes_per_token, free_bytes(loaded)
    if needed > free:
        most = free // loaded.kv_bytes_per_token // block_size * block_size
        raise ValueError(
            f"kv_tokens is {tokens}; that KV pool takes {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB of "
            f"{loaded.device} are free beside the weights of {loaded.name}; it must be at most {most}"
        )
