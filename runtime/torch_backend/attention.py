"""Attention over a packed batch: the seam that a device's attention plugs into, and how a transformers model gets it.

One forward holds the new tokens of many sequences, end to end: decode rows first, one token each, then prompt chunks. An
:class:`AttentionBackend` plans it once and runs in every layer. What a forward holds comes through
:meth:`PackedModel.running`, per thread, so that several engines may live in one process.

A layer that is fused (:mod:`runtime.torch_backend.fused_layer`) calls the backend itself. Any other is model code, which
transformers lets call :func:`packed_attention` with ``query [1, heads, tokens, dim]`` and ``key``/``value
[1, kv_heads, tokens, dim]``, after rotary embedding, and which expects ``[1, tokens, heads, value_dim]`` back.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from runtime.errors import UnsupportedModelError
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.inputs import Ints, PackedBatch
from runtime.torch_backend.kv_pool import KVPool, LayerKV, fp8_bytes
from runtime.torch_backend.operations import Operations

NAME = "autotune_packed"
_EAGER_FP8 = "autotune_eager_fp8"


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


class AttentionBackend(Protocol):
    """Causal attention of packed batches over one KV pool. Neither call makes the host wait for the device."""

    def plan(self, batch: PackedBatch) -> Any:
        """Prepare what does not depend on the layer. What it returns is handed to every :meth:`run` of this forward."""
        ...

    def run(self, state: Any, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """Attention of one layer. Each token sees its sequence up to and including itself.

        ``query [tokens, heads, dim]``, and the new ``key [tokens, kv_heads, dim]`` and ``value [tokens, kv_heads, value_dim]``,
        which ``layer`` holds already, with any strides; returns ``[tokens, heads, value_dim]``, contiguous. Tokens behind those
        that were planned are dummies, for which anything finite may come back.
        """
        ...


@runtime_checkable
class FixedAttention(Protocol):
    """An :class:`AttentionBackend` for which decode rows may lie in tensors that stay where they are, so that a step of them
    can be recorded. Neither call makes the host wait for the device."""

    def fixed(self, table: Tensor, positions: Tensor) -> Any:
        """What :meth:`AttentionBackend.run` is handed for decode rows, one new token each at ``positions [rows]``, with block
        tables ``table [rows, blocks]``. It reads both whenever it runs."""
        ...

    def refresh(self, state: Any, context: Ints) -> None:
        """The coming run of ``state`` is of ``context [n]``: positions that the first n rows see, their new token included. The
        other rows are nobody's."""
        ...


@runtime_checkable
class FixedSteps(Protocol):
    """An :class:`AttentionBackend` for which whole steps, prompts included, may lie in tensors that stay where they are. Neither
    call makes the host wait for the device."""

    def fixed_step(self, table: Tensor, tokens: int) -> Any:
        """What :meth:`AttentionBackend.run` is handed for ``tokens`` new tokens of as many sequences as ``table [sequences,
        blocks]`` has rows, which it reads whenever it runs."""
        ...

    def refresh_step(self, state: Any, new: Ints, context: Ints) -> None:
        """The coming run of ``state`` is of sequences with so many ``new`` tokens and so much ``context`` (new tokens included),
        ``[n]`` each, in the order of the packed tokens. What is left over of either is nobody's."""
        ...


class StepInputs:
    """Where the tokens of one forward belong, and who computes what fused layers ask for.

    ``slots [tokens]``: the pool slot of each. ``state``: what ``attention`` has planned. ``wanted``: the rows whose logits are,
    if that is not all.
    """

    __slots__ = ("attention", "calls", "operations", "pool", "serial", "slots", "state", "wanted")

    def __init__(
        self, serial: int, pool: KVPool, slots: Tensor, operations: Operations, attention: AttentionBackend, state: Any
    ) -> None:
        self.serial = serial
        self.pool = pool
        self.slots = slots
        self.operations = operations
        self.attention = attention
        self.state = state
        self.calls = 0
        self.wanted: Tensor | None = None

    def layer(self, module: nn.Module, kept: KVLayer) -> LayerKV:
        """The store of the attention layer ``module``, which keeps ``kept`` of a token and runs once in a forward."""
        layer = self.pool.layer(module, kept, self.slots.device)
        if layer.serial == self.serial:
            raise UnsupportedModelError("the model runs one attention layer twice in a forward")
        layer.serial = self.serial
        self.calls += 1
        return layer

    def attend(self, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """See :meth:`AttentionBackend.run`."""
        return self.attention.run(self.state, layer, query, key, value, terms)


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
    layer = step.layer(module, KVLayer((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key.dtype))
    terms = terms_of(query.shape[-1], scaling, window_of(module, sliding_window), softcap, s_aux)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer.write(step.slots, k, v)
    return step.attend(layer, q, k, v, terms).unsqueeze(0), None


def window_of(module: nn.Module, given: Any = _ABSENT) -> Any:
    """The sliding window of ``module``, an attention layer whose model code hands over ``given``.

    None there means that this layer has none, whatever else says so. A model whose window is in its mask alone hands over
    nothing: then it is what the config says of all layers.
    """
    if given is not _ABSENT:
        return given
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    config: Any = getattr(module, "config", None)
    kind: Any = type(config)
    if config is None or not _declares_window(kind) or getattr(config, "layer_types", None):
        return None
    return getattr(config, "sliding_window", None)


@cache
def _declares_window(kind: type[Any]) -> bool:
    """Whether configs of that class have a window of their own: each holds whatever else a file says, which no model reads."""
    return "sliding_window" in signature(kind).parameters


def terms_of(
    dim: int, scaling: float | None, sliding_window: Any, softcap: float | None, s_aux: Tensor | None
) -> Terms:
    """:class:`Terms` of what transformers hands to an attention function, for heads of ``dim``."""
    window = sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None
    return Terms(dim**-0.5 if scaling is None else scaling, window, softcap, s_aux)


def _eager_fp8(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
    """The eager attention of the model's own code, after ``key`` and ``value`` went through 8 bits."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedModelError(
            f"model {type(module).__name__}: kv_cache_dtype is 'fp8'; it must be auto: its code has no eager attention to "
            "compare with"
        )
    return own(module, query, *(_through_8_bits(x) for x in (key, value)), *others, **options)


def _through_8_bits(x: Tensor) -> Tensor:
    return fp8_bytes(x, torch.ones(1, device=x.device)).view(torch.float8_e4m3fn).to(x.dtype)


AttentionInterface.register(_EAGER_FP8, _eager_fp8)
AttentionMaskInterface.register(_EAGER_FP8, eager_mask)
AttentionInterface.register(NAME, packed_attention)
# and no mask function: transformers makes no mask then, which a packed batch does not have, and doesn't look at the positions,
# for which a GPU would have to be waited for

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
        with self._attending_by(NAME):
            before = _running.step
            _running.step = step
            try:
                yield
            finally:
                _running.step = before

    def eager(self, fp8: bool = False) -> AbstractContextManager[None]:
        """Within, the model computes its own attention by its own code, which knows all its terms. PyTorch's attention takes no
        softcap, and some versions of transformers hand it layers that have one. ``fp8``: over keys and values as a KV pool of
        8 bits holds them."""
        return self._attending_by(_EAGER_FP8 if fp8 else "eager")

    @contextmanager
    def _attending_by(self, name: str) -> Iterator[None]:
        with self._lock:
            names = [config._attn_implementation for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation_internal = name
                yield
            finally:
                for config, before in zip(self._configs, names, strict=True):
                    config._attn_implementation_internal = before
