"""When to call the function, and with what: one file each, behind one protocol."""

from __future__ import annotations

from runtime.batching.strategies.adaptive import Adaptive
from runtime.batching.strategies.dynamic import Dynamic
from runtime.batching.strategies.memory_bounded import MemoryBounded
from runtime.batching.strategies.protocol import Decision, State, Strategy, fit
from runtime.batching.strategies.static import Static

STRATEGIES: dict[str, type[Strategy]] = {"adaptive": Adaptive, "dynamic": Dynamic, "static": Static}


def strategy_of(value: str | Strategy) -> Strategy:
    """A fresh strategy by name, or the given one. Raises ``ValueError`` for anything else."""
    if isinstance(value, str) and value in STRATEGIES:
        return STRATEGIES[value]()
    needed = ("admit", "decide", "began", "observe")
    if isinstance(value, str | type) or not all(callable(getattr(value, name, None)) for name in needed):
        raise ValueError(f"strategy is {value!r}; it must be one of {', '.join(STRATEGIES)}, or a Strategy")
    return value


__all__ = [
    "STRATEGIES",
    "Adaptive",
    "Decision",
    "Dynamic",
    "MemoryBounded",
    "State",
    "Static",
    "Strategy",
    "fit",
    "strategy_of",
]
