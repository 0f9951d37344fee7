"""What can be measured and tuned: the one protocol of an engine, and the engines behind it.

Whoever measures, profiles, controls or serves knows :class:`Engine` and asks its ``capabilities``; only the modules of this
room know an engine by name. Others import what stands here, :mod:`.protocol`, :mod:`.named` (the engines that ``--engine`` takes)
and :mod:`.defaults`. The simulated engine stands behind the same protocol in :mod:`autotune.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from autotune.engines.protocol import EndedForReason, Engine, EngineSource, Handle, VirtualEngine, virtual, waiting
from runtime.tunable import Capabilities, Tunable

if TYPE_CHECKING:
    from runtime.batching.decorator import Batched

__all__ = [
    "Adaptable",
    "EndedForReason",
    "Engine",
    "EngineSource",
    "Handle",
    "VirtualEngine",
    "adapt",
    "callable_source",
    "undecorated",
    "virtual",
    "waiting",
]


class OfVllm(Protocol):
    """``vllm.LLM``."""

    llm_engine: Any


class EngineOfVllm(Protocol):
    """Its LLMEngine."""

    engine_core: Any


Adaptable: TypeAlias = "Tunable | Batched | OfVllm | EngineOfVllm"
"""What :func:`adapt` takes."""


def adapt(engine: Adaptable) -> Tunable:
    """What users hand to :func:`autotune.control`, as what a controller sees.

    That is ``engine`` itself if it says what it can do, as :class:`runtime.Engine` and :class:`runtime.Batcher` do; of a
    function under ``@batch`` its batcher; of a ``vllm.LLM`` or its LLMEngine, in this process, its scheduler. Raises
    ``ValueError`` for anything else.
    """
    from runtime.batching.decorator import Batched

    if isinstance(engine, Batched):
        return engine.batcher
    if isinstance(getattr(engine, "capabilities", None), Capabilities):
        return cast(Tunable, engine)
    from autotune.engines.vllm.attached import is_vllm, tunable_of

    if is_vllm(engine):
        return tunable_of(engine)
    raise ValueError(
        f"engine is a {type(engine).__name__}; it must be a runtime.Engine, a Batcher, a function under @batch, a vllm.LLM, or "
        "have capabilities as autotune.engines.Engine has"
    )


def callable_source(function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> EngineSource:
    """Engines that call ``function`` with batches of ``inputs``: batchers, ``options`` being those of :class:`runtime.Batcher`.

    A request is the input whose index its prompt begins with.
    """
    from autotune.engines.callable import CallableSource

    return CallableSource(function, inputs, options)


def undecorated(function: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What is called with a list, and the options of ``@batch`` if it stands over that."""
    from runtime.batching.decorator import Batched

    return (function.target, function.options) if isinstance(function, Batched) else (function, {})
