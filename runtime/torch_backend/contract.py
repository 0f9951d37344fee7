"""What the executor needs to know of a loaded model; ``loading.LoadedModel`` is one."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel


class KVLayer(NamedTuple):
    """What one attention layer keeps of a token: ``key`` and ``value`` as (heads, dim), computed in ``dtype``."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """How many of a token."""
        return math.prod(self.key) + math.prod(self.value)


class Loaded(Protocol):
    """A model ready to run: in eval mode, on its device, in its dtype."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_cache_dtype(self) -> str:
        """Of the KV pool: "auto" is what the model computes them in, "fp8" 8 bits (e4m3)."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """Of the attention layers, in the order of their calls; empty if that is not known before the first step."""
        ...
