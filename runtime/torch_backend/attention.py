"""Attention over a packed batch, put into a transformers model through its attention interface.

One forward holds the new tokens of many sequences, end to end: decode rows first, one token each, then prompt chunks.
The hook writes each token's key and value to the KV pool and attends sequence by sequence. What a step holds comes
through :meth:`PackedModel.running`, per thread, so that several engines may live in one process.

transformers calls the hook with ``query [1, heads, tokens, dim]`` and ``key``/``value [1, kv_heads, tokens, dim]``, after
rotary embedding, and expects ``[1, tokens, heads, value_dim]`` back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from runtime.errors import UnsupportedModelError
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.prefill import attend_tiles

NAME = "autotune_packed"


class ChunkInputs:
    """One prompt chunk: rows ``begin … end`` of the packed batch, positions ``start …`` of its sequence.

    ``table [1, blocks]`` lists the blocks from position 0 to the chunk's end, or is None when the chunk starts there.
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


class DecodeInputs(Protocol):
    """How the decode rows of a step find their context."""

    @property
    def count(self) -> int: ...

    def attend(self, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """``query [heads, count, dim]`` and the rows' new ``key``/``value [kv_heads, count, dim]``, which are in the pool
        already; returns ``[count, heads, value_dim]``."""
        ...


class Terms:
    """What a layer adds to plain attention: ``scale``, sliding ``window``, ``softcap`` of scores, ``sinks [heads]``."""

    __slots__ = ("scale", "sinks", "softcap", "window")

    def __init__(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.sinks = sinks

    @property
    def plain(self) -> bool:
        """Whether scaled dot-product attention computes it, the window being part of the mask."""
        return self.softcap is None and self.sinks is None


class StepInputs:
    """Where the tokens of one forward belong. ``slots [tokens]``: the pool slot of each. ``tiled``: chunks attend by
    :func:`attend_tiles`, which suits CPUs, where it can. ``wanted``: the rows whose logits are, if that is not all."""

    __slots__ = ("calls", "chunks", "decode", "pool", "serial", "slots", "tiled", "wanted")

    def __init__(
        self, serial: int, pool: KVPool, slots: Tensor, decode: DecodeInputs | None, chunks: list[ChunkInputs],
        tiled: bool = False,
    ) -> None:  # fmt: skip
        self.serial = serial
        self.pool = pool
        self.slots = slots
        self.decode = decode
        self.chunks = chunks
        self.tiled = tiled
        self.calls = 0
        self.wanted: Tensor | None = None


class PaddedDecode:
    """Decode rows over a gathered, padded copy of their blocks; runs on any device.

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

    def attend(self, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        keys, values = layer.blocks(self.table, self.block_size)
        heads, rows, _ = query.shape
        kv_heads = keys.shape[2]
        # the heads that share a KV head become its queries: no copy of the keys, no slow grouped kernel
        grouped = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, -1)
        out = attend_grouped(grouped, keys.transpose(1, 2), values.transpose(1, 2), self.mask(terms.window), terms)
        return out.reshape(rows, heads, -1)


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, terms: Terms) -> Tensor:
    """``query [rows, kv_heads, group, dim]`` over ``keys``/``values [rows, kv_heads, context, dim]``."""
    if terms.plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=terms.scale)
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
        out = F.scaled_dot_product_attention(
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


class _Running(threading.local):
    step: StepInputs | None = None


_running = _Running()


def running_step() -> StepInputs | None:
    """The step that runs in this thread."""
    return _running.step


_ABSENT: Any = object()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = _ABSENT,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer. Shapes: see the module."""
    step = _running.step
    if step is None:
        raise RuntimeError("packed attention was called outside a step of the engine")
    if position_bias is not None:
        raise UnsupportedModelError("attention with a position bias (ALiBi, T5) is not supported")
    if is_causal is False or getattr(module, "is_cross_attention", False):
        raise UnsupportedModelError("attention that is not causal self-attention is not supported")
    if query.shape[2] != step.slots.shape[0] or key.shape[2] != step.slots.shape[0]:
        raise UnsupportedModelError("the model changes the number of tokens before attention")
    layer = step.pool.layer(module, key, value)
    if layer.serial == step.serial:
        raise UnsupportedModelError("the model runs one attention layer twice in a forward")
    layer.serial = step.serial
    step.calls += 1
    if sliding_window is _ABSENT:  # given as None it means: this layer has none, whatever the module says
        sliding_window = getattr(module, "sliding_window", None)
    window = sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    q, k, v = query[0], key[0], value[0]
    layer.keys.index_copy_(0, step.slots, k.transpose(0, 1))
    layer.values.index_copy_(0, step.slots, v.transpose(0, 1))
    parts: list[Tensor] = []
    at = 0
    if step.decode is not None:
        at = step.decode.count
        parts.append(step.decode.attend(layer, q[:, :at], k[:, :at], v[:, :at], terms))
    for chunk in step.chunks:
        rows = slice(chunk.begin, chunk.end)
        if chunk.table is None:
            keys, values = k[:, rows], v[:, rows]
        else:
            past_keys, past_values = layer.blocks(chunk.table, step.pool.block_size)
            context = chunk.start + chunk.end - chunk.begin
            keys, values = past_keys[0, :context].transpose(0, 1), past_values[0, :context].transpose(0, 1)
        if step.tiled and terms.plain:
            attended = attend_tiles(q[:, rows], keys, values, terms.scale, terms.window)
        else:
            attended = attend_chunk(chunk, q[:, rows], keys, values, terms)
        parts.append(attended.transpose(0, 1))
    out = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)  # some models take views of it
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The hook masks by itself: a packed batch has no rectangular mask."""


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class PackedModel:
    """A transformers model whose attention is packed while a step runs, and its own at all other times."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = list(configs.values())
        self._lock = _LOCKS.setdefault(model, threading.RLock())

    @contextmanager
    def running(self, step: StepInputs) -> Iterator[None]:
        """Attention belongs to ``step`` within; one step at a time for each model, even from several engines."""
        with self._lock:
            names = [config._attn_implementation for config in self._configs]
            before = _running.step
            _running.step = step
            try:
                for config in self._configs:
                    config._attn_implementation_internal = NAME
                yield
            finally:
                for config, name in zip(self._configs, names, strict=True):
                    config._attn_implementation_internal = name
                _running.step = before
