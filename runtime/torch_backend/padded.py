"""Attention in plain PyTorch, on any device: decode rows over a padded copy of their blocks, prompt chunks one by one.

What a device has of its own is tested against this. Its cost follows rows × longest context.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.torch_backend import sdpa
from runtime.torch_backend.attention import StepInputs, Terms
from runtime.torch_backend.inputs import Ints, PackedBatch
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.transfer import to_device


class ChunkInputs:
    """One prompt chunk: rows ``begin … end`` of the packed batch, positions ``start …`` of its sequence.

    ``table [1, blocks]`` lists the blocks from position 0 to the chunk's end; None for a chunk that starts there: its own keys
    and values are all there is.
    """

    __slots__ = ("begin", "end", "masks", "start", "table")

    def __init__(self, begin: int, end: int, start: int, table: Tensor | None) -> None:
        self.begin = begin
        self.end = end
        self.start = start
        self.table = table
        self.masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """``[tokens, context]``, True where a token may look: causal, at most ``window`` positions back, itself included."""
        found = self.masks.get(window)
        if found is None:
            length = self.start + self.end - self.begin
            query = torch.arange(self.start, length, device=device)[:, None]
            key = torch.arange(length, device=device)[None, :]
            found = key <= query
            if window is not None:
                found = found & (key > query - window)
            self.masks[window] = found
        return found


class PaddedDecode:
    """Decode rows over a gathered, padded copy of their blocks.

    ``table [rows, blocks]`` is padded with the pool's zero block, ``lengths [rows]`` count the new token.
    """

    def __init__(self, table: Tensor, lengths: Tensor, block_size: int) -> None:
        self.table = table
        self.block_size = block_size
        self.count = table.shape[0]
        self.lengths = lengths.view(-1, 1, 1, 1)
        self._position = torch.arange(table.shape[1] * block_size, device=table.device).view(1, 1, 1, -1)
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        found = self._masks.get(window)
        if found is None:
            found = self._position < self.lengths
            if window is not None:
                found = found & (self._position >= self.lengths - window)
            self._masks[window] = found
        return found

    def attend(self, layer: LayerKV, query: Tensor, terms: Terms) -> Tensor:
        """``query [count, heads, dim]`` over what the pool holds; returns ``[count, heads, value_dim]``."""
        keys, values = layer.blocks(self.table, self.block_size)
        rows, heads, _ = query.shape
        kv_heads = keys.shape[2]
        # the heads that share a KV head become its queries: no copy of the keys, no slow grouped kernel
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        out = attend_grouped(grouped, keys.transpose(1, 2), values.transpose(1, 2), self.mask(terms.window), terms)
        return out.reshape(rows, heads, -1)


class FixedDecode:
    """Decode rows over a padded copy of all that ``table [rows, blocks]`` may hold, at ``positions [rows]``; both are read
    when it runs."""

    def __init__(self, table: Tensor, positions: Tensor, block_size: int) -> None:
        self.count = table.shape[0]
        self._table, self._positions, self._block_size = table, positions, block_size

    def attend(self, layer: LayerKV, query: Tensor, terms: Terms) -> Tensor:
        rows = PaddedDecode(self._table, self._positions + 1, self._block_size)
        return rows.attend(layer, query, terms)


class PaddedStep(NamedTuple):
    """What :class:`PaddedAttention` plans."""

    decode: PaddedDecode | FixedDecode | None
    chunks: list[ChunkInputs]


class PaddedAttention:
    """An :class:`~runtime.torch_backend.attention.AttentionBackend` over ``pool`` for any device."""

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        self.pool = pool
        self.device = device

    def plan(self, batch: PackedBatch) -> PaddedStep:
        decode = self._decode(batch)
        tables = iter(self._tables(batch))
        return PaddedStep(
            decode,
            [
                ChunkInputs(begin, end, chunk.start, next(tables) if chunk.start else None)
                for chunk, (begin, end) in zip(batch.chunks, batch.spans(), strict=True)
            ],
        )

    def fixed(self, table: Tensor, positions: Tensor) -> PaddedStep:
        return PaddedStep(FixedDecode(table, positions, self.pool.block_size), [])

    def refresh(self, state: PaddedStep, context: Ints) -> None:
        """Nothing: all that a run needs is on the device."""

    def _decode(self, batch: PackedBatch) -> PaddedDecode | None:
        rows = batch.rows
        if not len(rows.sequences):
            return None
        lengths = rows.positions + 1
        table, ends = to_device([rows.table(int(lengths.max())), lengths], self.device)
        return PaddedDecode(table, ends, self.pool.block_size)

    def _tables(self, batch: PackedBatch) -> list[Tensor]:
        """Of the chunks that do not start at position 0."""
        tables: list[Ints] = []
        for chunk in batch.chunks:
            if chunk.start:
                blocks = -(-(chunk.start + chunk.count) // self.pool.block_size)
                tables.append(np.array([chunk.sequence.blocks[:blocks]], np.int64))
        return to_device(tables, self.device) if tables else []

    def run(self, state: PaddedStep, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        parts: list[Tensor] = []
        if state.decode is not None:
            rows = slice(0, state.decode.count)
            parts.append(state.decode.attend(layer, query[rows], terms))
        for chunk in state.chunks:
            rows = slice(chunk.begin, chunk.end)
            if chunk.table is None:
                keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            else:
                past_keys, past_values = layer.blocks(chunk.table, self.pool.block_size)
                context = chunk.start + chunk.end - chunk.begin
                keys, values = past_keys[0, :context].transpose(0, 1), past_values[0, :context].transpose(0, 1)
            parts.append(attend_chunk(chunk, query[rows].transpose(0, 1), keys, values, terms).transpose(0, 1))
        planned = sum(len(part) for part in parts)
        if planned < len(query):  # dummies behind them
            parts.append(parts[0].new_zeros(len(query) - planned, *parts[0].shape[1:]))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def lone_step(tokens: int, device: torch.device, operations: Operations | None = None) -> StepInputs:
    """A step of one prompt of ``tokens``, from position 0, over a pool of its own: to try a model or a layer with.

    Attention reads what was written to the pool.
    """
    pool = KVPool(1, tokens)
    attention = PaddedAttention(pool, device)
    planned = PaddedStep(None, [ChunkInputs(0, tokens, 0, torch.zeros(1, 1, dtype=torch.int64, device=device))])
    return StepInputs(0, pool, torch.arange(tokens, device=device), operations or Operations(), attention, planned)


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, terms: Terms) -> Tensor:
    """``query [rows, kv_heads, group, dim]`` over ``keys``/``values [rows, kv_heads, context, dim]``."""
    if terms.plain:
        return sdpa.attended(query, keys, values, attn_mask=mask, scale=terms.scale)
    scores = _scores(query, keys, terms).masked_fill_(~mask, float("-inf"))
    sinks = None if terms.sinks is None else terms.sinks.view(1, *query.shape[1:3], 1)
    return torch.matmul(softmax_weights(scores, sinks).to(values.dtype), values)


def attend_chunk(chunk: ChunkInputs, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
    """``query [heads, tokens, dim]`` over ``keys``/``values [kv_heads, context, dim]``; returns ``[heads, tokens, dim]``."""
    heads, tokens, dim = query.shape
    kv_heads, context, _ = keys.shape
    group = heads // kv_heads
    window = terms.window if terms.window is not None and context > terms.window else None
    if terms.plain:
        causal = chunk.start == 0 and window is None
        # KV heads as batch and their query heads as heads: the keys are repeated by a stride of zero, without a copy
        out = sdpa.attended(
            query.view(kv_heads, group, tokens, dim),
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=None if causal else chunk.mask(window, query.device),
            is_causal=causal,
            scale=terms.scale,
        )
        return out.reshape(heads, tokens, -1)
    scores = _scores(query.reshape(kv_heads, group * tokens, dim), keys, terms).view(kv_heads, group, tokens, context)
    scores = scores.masked_fill_(~chunk.mask(window, query.device), float("-inf"))
    sinks = None if terms.sinks is None else terms.sinks.view(kv_heads, group, 1, 1)
    weights = softmax_weights(scores, sinks).to(values.dtype).view(kv_heads, group * tokens, context)
    return torch.matmul(weights, values).view(heads, tokens, -1)


def _scores(query: Tensor, keys: Tensor, terms: Terms) -> Tensor:
    scores = torch.matmul(query, keys.transpose(-1, -2)) * terms.scale
    return scores if terms.softcap is None else torch.tanh(scores / terms.softcap) * terms.softcap


def softmax_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in float32; a sink is one more score that takes weight and gives no value (Xiao et al. 2023)."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    with_sink = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(with_sink, -1, dtype=torch.float32)[..., :-1]
