"""What can be measured and tuned: the one protocol of an engine, and the engines behind it.

Whoever measures, profiles, controls or serves knows :class:`Engine` and asks its ``capabilities``; only the modules of this
room know an engine by name. The simulated engine stands behind the same protocol in :mod:`autotune.simulate`.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from autotune.engines.protocol import Engine, EngineSource, Handle, VirtualEngine, virtual, waiting
from runtime.batching.decorator import Batched
from runtime.tunable import Capabilities, Tunable

__all__ = ["Adaptable", "Engine", "EngineSource", "Handle", "VirtualEngine", "adapt", "virtual", "waiting"]


class OfVllm(Protocol):
    """``vllm.LLM``."""

    llm_engine: Any


class EngineOfVllm(Protocol):
    """Its LLMEngine."""

    engine_core: Any


Adaptable = Tunable | Batched | OfVllm | EngineOfVllm
"""What :func:`adapt` takes."""


def adapt(engine: Adaptable) -> Tunable:
    """What users hand to :func:`autotune.control`, as what a controller sees.

    That is ``engine`` itself if it says what it can do, as :class:`runtime.Engine` and :class:`runtime.Batcher` do; of a
    function under ``@batch`` its batcher; of a ``vllm.LLM`` or its LLMEngine, in this process, its scheduler. Raises
    ``ValueError`` for anything else.
    """
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
