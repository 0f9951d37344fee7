"""Attention on a CPU over the block pool itself, decode rows and prompt chunks alike, by one call."""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import torch
from torch import Tensor

from runtime.torch_backend.attention import Terms
from runtime.torch_backend.cpu.compiled import OUT_OF_MEMORY, Layer, Step, kernels
from runtime.torch_backend.cpu.operations import threads_for
from runtime.torch_backend.inputs import PackedBatch, listed
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.padded import PaddedAttention, PaddedStep

log = logging.getLogger(__name__)

_DIMS = 32  # dimensions of a head that the kernel takes are multiples of,
_MOST_DIM = 256  # and at most this many
_MOST_WINDOW = 1 << 30  # tokens; a wider one is none


class PagedStep:
    """What :class:`PagedAttention` plans: each sequence's new tokens, its context and its blocks."""

    def __init__(self, owner: PagedAttention, batch: PackedBatch) -> None:
        self._owner, self._batch = owner, batch
        found = listed(batch, owner.pool.block_size, owner.pool.pad_block)
        self._held = [np.ascontiguousarray(each) for each in found]  # C reads them until the step is over
        fresh, context, table = (each.ctypes.data for each in self._held)
        blocks = owner.pool.block_count + 1 + (owner.pool.scratch_block is not None)  # and the one that pads tables
        self.arguments = Step(fresh, context, table, *found.table.shape, owner.pool.block_size, blocks)
        self.tokens = int(found.new.sum())
        self.pairs = int(found.new @ found.context)  # of a new token and a token that it sees, about
        self._padded: PaddedStep | None = None

    def padded(self) -> PaddedStep:
        if self._padded is None:
            self._padded = self._owner.plain.plan(self._batch)
        return self._padded


class PagedAttention:
    """An :class:`~runtime.torch_backend.attention.AttentionBackend` by a kernel of our own (``kernels.c``).

    It reads blocks where they lie: nothing is gathered, padded or masked beyond a tile of 64 tokens. Threads share sequences and
    KV heads, not the context of one. What the kernel does not take (heads of other sizes, other dtypes) attends in plain PyTorch.
    """

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        self.pool = pool
        self.plain = PaddedAttention(pool, device)
        self._said: set[tuple[int, int]] = set()

    def plan(self, batch: PackedBatch) -> PagedStep:
        return PagedStep(self, batch)

    def run(self, state: PagedStep, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        tokens, heads, key_dim = query.shape
        found = kernels(query.dtype)
        if found is None or not self._takes(state, layer, query, terms):
            # this says what is wrong, if anything is
            return self.plain.run(state.padded(), layer, query, key, value, terms)
        _, kv_heads, value_dim = layer.values.shape
        if query.stride(2) != 1 or query.stride(1) != key_dim:
            query = query.contiguous()
        window = 0 if terms.window is None or terms.window > _MOST_WINDOW else terms.window
        sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
        out = query.new_empty(tokens, heads, value_dim)
        arguments = Layer(
            query.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr(), None if sinks is None else sinks.data_ptr(),
            out.data_ptr(), query.stride(0), heads, kv_heads, key_dim, value_dim, window, terms.scale, terms.softcap or 0.0,
        )  # fmt: skip
        failed = found.attend(
            ctypes.byref(arguments), ctypes.byref(state.arguments), threads_for(state.pairs * heads * key_dim)
        )
        if failed == OUT_OF_MEMORY:
            raise MemoryError("attention: out of memory")
        if tokens > state.tokens:
            out[state.tokens :].zero_()
        if failed:
            raise IndexError("a block table names a block that the KV pool does not have")
        return out

    def _takes(self, state: PagedStep, layer: LayerKV, query: Tensor, terms: Terms) -> bool:
        """Whether the kernel takes these: it looks at no shape itself."""
        tokens, heads, key_dim = query.shape
        slots, kv_heads, value_dim = layer.values.shape
        if key_dim % _DIMS or value_dim % _DIMS or max(key_dim, value_dim) > _MOST_DIM:
            if (key_dim, value_dim) not in self._said:
                self._said.add((key_dim, value_dim))
                log.info(
                    "heads of %d (values: %d) dimensions attend by PyTorch's operations, which take longer",
                    key_dim,
                    value_dim,
                )
            return False
        return (
            query.dtype == layer.keys.dtype == layer.values.dtype
            and layer.keys.shape == (slots, kv_heads, key_dim)
            and slots == state.arguments.pool_blocks * self.pool.block_size
            and layer.keys.is_contiguous()
            and layer.values.is_contiguous()
            and tokens >= state.tokens
            and heads % kv_heads == 0
            and (terms.sinks is None or terms.sinks.numel() == heads)
        )
