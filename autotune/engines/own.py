"""Our own engine, :class:`runtime.Engine`, as a source of engines: of a model by name, or of one loaded already.

It is an :class:`~autotune.engines.protocol.Engine` as it stands. Torch is loaded with the model, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from autotune.engines.defaults import VLLM_DEFAULTS, vllm_defaults
from autotune.engines.named import Host, InProcess, NamedEngine, ToServe
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.engine import Engine
from runtime.llm.parts import MAX_KV_TOKENS
from runtime.slo import RequestClass, request_classes
from runtime.tunable import ModelInfo, own_kv_cache_dtype
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
    def load(cls, name: str, **loading: Any) -> Self:
        """Of the model ``name``: a preset, a directory or a hub id. ``loading`` goes to
        :func:`~runtime.torch_backend.loading.load_model`; raises as that."""
        from runtime.torch_backend.loading import load_model

        return cls(load_model(name, **loading))

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
    introduction: Sequence[str] = ()

    @property
    def stock(self) -> Knobs:
        """vLLM's defaults: what a server is started with on this GPU that nobody has tuned; on a CPU, those of a large GPU."""
        device = self._loaded.device
        if device.type != "cuda":
            return self.limits.clamp(VLLM_DEFAULTS)
        import torch

        gpu = torch.cuda.get_device_properties(device)
        return self.limits.clamp(vllm_defaults(gpu.name, gpu.total_memory / 2**30))

    def with_kv_tokens(self, tokens: int) -> OwnSource:
        """The same model with a KV pool of ``tokens``, in blocks of :data:`BLOCK`."""
        return self.with_options(kv_tokens=tokens, block_size=BLOCK)

    def with_classes(self, classes: Iterable[RequestClass]) -> OwnSource:
        """The same model for requests of these classes, and of none of them."""
        return self.with_options(classes=tuple(classes))

    def as_profiled(self, kv_tokens: int, block_size: int | None, prefix_cache: bool, threads: int | None) -> OwnSource:
        """The same model with the KV pool, prefix cache and CPU threads of a profile."""
        size = block_size or BLOCK
        return self.with_options(kv_tokens=kv_tokens, block_size=size, prefix_cache=prefix_cache, threads=threads)

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> Engine:
        return Engine(self._loaded, knobs=knobs, limits=limits, seed=seed, **self._options)

    # -- the memory of this machine -----------------------------------------------------------------------------------

    def default_kv_tokens(self) -> int | None:
        """The KV pool that an engine started now would choose for itself, tokens in blocks of :data:`BLOCK`; None where that
        depends on what its largest step takes."""
        from runtime.torch_backend.backends import backend_for
        from runtime.torch_backend.kv_pool import default_kv_blocks

        if backend_for(self._loaded.device).memory is not None:
            return None
        return default_kv_blocks(self._loaded, BLOCK) * BLOCK

    def free_bytes(self) -> int:
        """Memory that is free where the model is."""
        from runtime.torch_backend.kv_pool import free_bytes

        return free_bytes(self._loaded)


# -- by name --------------------------------------------------------------------------------------------------------------

GPU_MODEL: Final = "qwen3-0.6b"
_CORES_FOR_TINY: Final = 8  # with wide vectors; twice as many without


def default_model(machine: Host) -> str:
    """The preset that fills a minute with hundreds of requests on ``machine``: settings are compared by counting them.

    Told by the kind of machine and never by a timing, so that the same command names the same model again.
    """
    if machine.kind == "gpu":
        return GPU_MODEL
    wide = {"avx512f", "sve", "sve2"} & {*machine.flags}
    return "tiny" if machine.cores >= (_CORES_FOR_TINY if wide else 2 * _CORES_FOR_TINY) else "nano"


def dtypes() -> tuple[str, ...]:
    """Those that a model can be loaded in, ``auto`` first. Loads torch."""
    from runtime.torch_backend.loading import DTYPES

    return "auto", *DTYPES


def _load(model: str, *, kv_cache_dtype: str, arguments: Mapping[str, str], **loading: Any) -> OwnSource:
    del arguments  # it takes none
    return OwnSource.load(model, kv_cache_dtype=own_kv_cache_dtype(kv_cache_dtype), **loading)


def _start(requested: ToServe) -> Engine:
    block = requested.block_size or BLOCK
    if requested.kv_tokens is not None and not block <= requested.kv_tokens <= MAX_KV_TOKENS:
        raise InputError(
            f"--kv-tokens is {requested.kv_tokens}; it must be a whole number from {block} to {MAX_KV_TOKENS}"
        )
    source = OwnSource.load(
        requested.model,
        dtype=requested.dtype or "auto",
        device=requested.device,
        kv_cache_dtype=own_kv_cache_dtype(requested.kv_cache_dtype),
        seed=requested.seed,
        max_model_len=requested.max_model_len,
    )
    try:
        return source.with_options(
            slo=requested.slo,
            classes=request_classes(requested.classes, where="--class"),
            kv_tokens=requested.kv_tokens,
            block_size=block,
            prefix_cache=requested.prefix_cache,
            max_queue=requested.max_queue,
            admission=_admission(requested) or False,
            threads=requested.threads,
            **({} if requested.ordering is None else {"ordering": requested.ordering}),
        ).start(requested.knobs, requested.limits, requested.seed)
    except ValueError as error:
        raise InputError(str(error)) from None


def _admission(requested: ToServe) -> AdmissionPolicy | None:
    """What becomes of late requests. The queue is in the order asked for, and else by deadline."""
    if not (requested.reject_late or requested.relegate_late):
        return None
    policy = AdmissionPolicy(late="relegate") if requested.relegate_late else AdmissionPolicy()
    return policy if requested.ordering is None else replace(policy, order=requested.ordering)


ENGINE: Final = NamedEngine(
    name="own",
    title="this project's own engine",
    version=lambda: __version__,
    load=_load,
    serving=InProcess(_start),
    dtypes=dtypes,
    limits=OwnSource.limits,
    default_model=default_model,
)
