"""Our own engine, :class:`runtime.Engine`, as a source of engines: of a model by name, or of one loaded already.

It is an :class:`~autotune.engines.protocol.Engine` as it stands. Torch is loaded with the model, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from autotune.engines.defaults import VLLM_DEFAULTS
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.slo import RequestClass
from runtime.tunable import ModelInfo
from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.torch_backend.loading import LoadedModel

BLOCK = 16
"""Tokens in a KV block, unless given."""


class OwnSource:
    """Starts :class:`runtime.Engine` for ``loaded``; ``options`` are those of its constructor."""

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        self._loaded = loaded
        self._options = options

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "auto", device: str = "auto", seed: int = 0, max_model_len: int | None = None
    ) -> Self:
        """Of the model ``name``: a preset, a directory or a hub id. Raises as
        :func:`~runtime.torch_backend.loading.load_model`."""
        from runtime.torch_backend.loading import load_model

        return cls(load_model(name, dtype=dtype, device=device, seed=seed, max_model_len=max_model_len))

    @property
    def model(self) -> ModelInfo:
        return self._loaded.info

    def with_options(self, **options: Any) -> OwnSource:
        """The same model under other ``options``, of which each stands for one given before."""
        return OwnSource(self._loaded, **{**self._options, **options})

    name = "autotune-runtime"
    version = __version__
    limits = KnobLimits()
    arguments: Mapping[str, str] = MappingProxyType({})

    @property
    def stock(self) -> Knobs:
        """vLLM's defaults: what a server is started with that nobody has tuned."""
        return self.limits.clamp(VLLM_DEFAULTS)

    def with_kv_tokens(self, tokens: int) -> OwnSource:
        """The same model with a KV pool of ``tokens``, in blocks of :data:`BLOCK`."""
        return self.with_options(kv_tokens=tokens, block_size=BLOCK)

    def with_classes(self, classes: Iterable[RequestClass]) -> OwnSource:
        """The same model for requests of these classes, and of none of them."""
        return self.with_options(classes=tuple(classes))

    def as_profiled(self, kv_tokens: int, block_size: int, prefix_cache: bool, threads: int | None) -> OwnSource:
        """The same model with the KV pool, prefix cache and CPU threads of a profile."""
        return self.with_options(kv_tokens=kv_tokens, block_size=block_size, prefix_cache=prefix_cache, threads=threads)

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> Engine:
        return Engine(self._loaded, knobs=knobs, limits=limits, seed=seed, **self._options)

    # -- the memory of this machine -----------------------------------------------------------------------------------

    def default_kv_tokens(self) -> int:
        """The KV pool that an engine started now would choose for itself, tokens in blocks of :data:`BLOCK`."""
        from runtime.torch_backend.kv_pool import default_kv_blocks

        return default_kv_blocks(self._loaded, BLOCK) * BLOCK

    def free_bytes(self) -> int:
        """Memory that is free where the model is."""
        from runtime.torch_backend.kv_pool import free_bytes

        return free_bytes(self._loaded)


def dtypes() -> tuple[str, ...]:
    """Those that a model can be loaded in, ``auto`` first. Loads torch."""
    from runtime.torch_backend.loading import DTYPES

    return "auto", *DTYPES
