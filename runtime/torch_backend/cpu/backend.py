"""Attention on a CPU: decode rows over contiguous memory, prompt chunks in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.torch_backend.attention import Terms
from runtime.torch_backend.cpu.decode_cache import DecodeCache
from runtime.torch_backend.cpu.prefill import attend_tiles
from runtime.torch_backend.inputs import PackedBatch
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.padded import ChunkInputs, DecodeInputs, PaddedAttention, attend_chunk


class CPUAttention(PaddedAttention):
    """An :class:`~runtime.torch_backend.attention.AttentionBackend` with a contiguous copy of what decodes.

    ``token_bytes``: of one token's keys and values in all layers. ``max_bytes`` bounds the copy. What it has no room for, and
    rows that are not followed from step to step, are read from the pool. Chunks with terms that tiles lack attend as elsewhere.
    """

    def __init__(self, pool: KVPool, device: torch.device, token_bytes: int, max_bytes: int) -> None:
        super().__init__(pool, device)
        self.cache = DecodeCache(pool, token_bytes, max_bytes)

    def _decode(self, batch: PackedBatch) -> DecodeInputs | None:
        cached = batch.followed and self.cache.advance(batch.rows, batch.left, batch.taken)
        return self.cache if cached and self.cache.count else super()._decode(batch)

    def _attend_chunk(self, chunk: ChunkInputs, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        if terms.plain:
            return attend_tiles(query, keys, values, terms.scale, terms.window)
        return attend_chunk(chunk, query, keys, values, terms)
