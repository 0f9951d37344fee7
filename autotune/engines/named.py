"""An engine by the name that ``--engine`` has, for a language model, and what is known of it before it is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self

from autotune.engines.protocol import EngineSource
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import RequestClass
from runtime.tunable import ModelInfo


class NamedSource(EngineSource, Protocol):
    """An :class:`~autotune.engines.protocol.EngineSource` of a language model that the command line can be told.

    ``name`` and ``version`` are those in the engine's facts. ``arguments``: what else it is started with, as ``--engine-arg``
    had it. ``limits``: the ceilings to search below; ``stock``: the knobs that the engine would start with if nobody tuned it.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, str]: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def limits(self) -> KnobLimits: ...
    @property
    def stock(self) -> Knobs: ...

    def default_kv_tokens(self) -> int | None:
        """The KV pool that an engine started now would have; None: it is known when it has been started."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that is free where the model will be; None: nobody knows, and the engine complains itself."""
        ...

    def with_kv_tokens(self, tokens: int) -> Self:
        """The same with a KV pool of ``tokens``, in blocks of the engine's own size."""
        ...

    def with_classes(self, classes: Iterable[RequestClass]) -> Self:
        """The same for requests of these classes, and of none of them."""
        ...

    def as_profiled(self, kv_tokens: int, block_size: int, prefix_cache: bool, threads: int | None) -> Self:
        """The same with the KV pool, prefix cache and CPU threads of a profile of this engine."""
        ...


NAMES = ("own", "vllm")
"""What ``--engine`` takes."""
_IN_FACTS: Mapping[str, str] = {"autotune-runtime": "own", "vllm": "vllm"}
"""From the name of an engine in its facts, and in a profile."""


def named(engine: str) -> str:
    """What ``--engine`` calls the engine that a profile calls ``engine``. Raises :class:`InputError` for one not known here."""
    try:
        return _IN_FACTS[engine]
    except KeyError:
        raise InputError(f"engine {engine} cannot be started here; --engine takes {' or '.join(NAMES)}") from None


def engine_identity(source: NamedSource) -> dict[str, object]:
    """What makes a study of ``source`` another one than that of another engine.

    Nothing of our own engine: its version is that of autotune, and studies that are older than ``--engine`` are of it.
    """
    if _IN_FACTS.get(source.name) == "own":
        return {}
    return {"engine": {"name": source.name, "version": source.version, "arguments": dict(source.arguments)}}


def check_engine(name: str, arguments: Sequence[str] = ()) -> dict[str, str]:
    """``--engine`` and ``--engine-arg``, before anything slow is done: the arguments by name. Raises :class:`InputError`."""
    if name not in NAMES:
        raise InputError(f"--engine is {name}; it must be {' or '.join(NAMES)}")
    given: dict[str, str] = {}
    for text in arguments:
        key, equals, value = (part.strip() for part in text.partition("="))
        key = key.lstrip("-").replace("-", "_")
        if not equals or not key or not value:
            raise InputError(f'--engine-arg: "{text}" is not NAME=VALUE, such as dtype=float32 or enforce_eager=true')
        if key in given:
            raise InputError(f"--engine-arg: {key} is given twice")
        given[key] = value
    if name == "own":
        if given:
            raise InputError(
                f"--engine-arg: {next(iter(given))} is given; it goes with --engine vllm: this project's own engine has none"
            )
    else:
        from autotune.engines.vllm.named import check_installed

        check_installed()
    return given


def load(
    name: str,
    model: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    max_model_len: int | None = None,
    arguments: Mapping[str, str] | None = None,
) -> NamedSource:
    """The engine ``name`` for ``model`` on ``device`` (``cpu`` or ``cuda``): our own loads it now, vLLM reads its configuration.

    ``arguments``: as :func:`check_engine` returns them. Raises :class:`InputError` or
    :class:`~runtime.errors.ModelError` for what cannot be served.
    """
    if name == "own":
        from autotune.engines.own import OwnSource

        return OwnSource.load(model, dtype=dtype, device=device, seed=seed, max_model_len=max_model_len)
    from autotune.engines.vllm.named import load_vllm

    return load_vllm(
        model, dtype=dtype, device=device, seed=seed, max_model_len=max_model_len, arguments=arguments or {}
    )
