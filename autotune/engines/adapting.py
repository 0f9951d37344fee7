"""What users hand to :func:`autotune.control`, as what a controller sees."""

from __future__ import annotations

from runtime.batching.decorator import Batched
from runtime.tunable import Capabilities, Tunable

Adaptable = Tunable | Batched
"""What :func:`adapt` takes."""


def adapt(engine: Adaptable) -> Tunable:
    """``engine`` itself if it says what it can do, as :class:`runtime.Engine` and :class:`runtime.Batcher` do; of a function
    under ``@batch`` its batcher. Raises ``ValueError`` for anything else."""
    if isinstance(engine, Batched):
        return engine.batcher
    if not isinstance(getattr(engine, "capabilities", None), Capabilities):
        raise ValueError(
            f"engine is a {type(engine).__name__}; it must be a runtime.Engine, a Batcher, a function under @batch, or have "
            "capabilities as autotune.engines.Engine has"
        )
    return engine
