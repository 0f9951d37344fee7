"""What a batcher is given, checked and put into the form that the core takes. Wrong values raise ``ValueError``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from runtime.batching.strategies import Adaptive, Dynamic, MemoryBounded, Static, Strategy, strategy_of
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO

BATCHER_LIMITS = KnobLimits(
    max_batch_size=4096, max_wait_ms=10000, token_budget=1048576, chunk_size=1048576, draft_tokens=0
)
"""Ceilings unless others are given: wide, for sizes are learned."""


def whole_cost(cost: Any) -> int:
    """What a cost function returned, rounded up to a whole number of at least 1."""
    try:
        if isfinite(cost) and cost >= 0:
            return max(1, -int(-float(cost) // 1))
    except (TypeError, ValueError):
        pass
    raise ValueError(f"cost of an item is {cost!r}; it must be a number of at least 0")


def seconds(name: str, value: float) -> float:
    """``value``, if it is a number of seconds above 0 (``inf`` is one); ``name`` is what the error calls it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
    return value


def workers_of(fn: Callable[..., Any] | None, replicas: int | Sequence[Callable[..., Any]] | None) -> list[Any]:
    """What each worker calls: ``fn``, as many times as ``replicas`` says (once for None), or the callables of that list."""
    if isinstance(replicas, Sequence):
        if fn is not None or not replicas:
            raise ValueError("replicas is a list: it must hold at least one callable and stand in for fn")
        return list(replicas)
    if fn is None:
        raise ValueError("fn is missing; a callable that takes a list of items is needed")
    number = 1 if replicas is None else replicas
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            f"replicas is {replicas!r}; it must be a number of workers of at least 1, or a list of callables"
        )
    return [fn] * number


def priced_strategy(value: str | Strategy, call_price_ms: float) -> Strategy:
    """The strategy ``value``, by name or as it is. A price of a call (ms that one item waits) is for ``"adaptive"`` alone."""
    if isinstance(call_price_ms, bool) or not isinstance(call_price_ms, int | float) or not call_price_ms >= 0:
        raise ValueError(f"call_price_ms is {call_price_ms!r}; it must be a number of milliseconds of at least 0")
    if value == "adaptive":
        return Adaptive(call_price_s=call_price_ms / 1e3)
    if call_price_ms:
        raise ValueError(f'call_price_ms is {call_price_ms:g}; it must be 0 unless strategy is "adaptive"')
    return strategy_of(value)


def slos_by_class(slo: SLO | str | Mapping[str, SLO | str] | None) -> dict[str, SLO] | None:
    """The SLO of each request class; one for all is that of class ``default``. None where there is none."""
    if slo is None:
        return None
    return {name: SLO.of(s) for name, s in slo.items()} if isinstance(slo, Mapping) else {"default": SLO.of(slo)}


def first_knobs(given: Mapping[str, float], limits: KnobLimits, strategy: Strategy) -> Knobs:
    """What is given; the rest is open (adaptive, and strategies of one's own), or what suits most (static and dynamic).

    What came later and means nothing to a batcher (``draft_tokens``) is at its default, as in files from before."""
    usual = {"max_batch_size": 32, "max_wait_ms": 10.0} if isinstance(strategy, Static | Dynamic) else {}
    usually = limits.clamp(Knobs())
    opened = {s.name: getattr(limits if s.batcher or s.required else usually, s.name) for s in KNOBS}
    return limits.check(Knobs(**{**opened, **{k: min(v, opened[k]) for k, v in usual.items()}, **given}))


def memory_bounded(
    strategy: Strategy, limit_bytes: int | None, measure: Callable[[], int] | None, processes: bool
) -> Strategy:
    """``strategy``, its calls kept below ``limit_bytes`` as ``measure`` finds them; as it is without both.

    ``processes``: whether workers are processes, whose memory ``measure`` cannot see.
    """
    if limit_bytes is not None and measure is None:
        raise ValueError(
            f"measure_bytes is None; beside memory_limit_bytes, {limit_bytes}, it must be a function that returns bytes"
        )
    if limit_bytes is None and measure is not None:
        raise ValueError("memory_limit_bytes is None; beside measure_bytes it must be a number of bytes")
    if limit_bytes is None:
        return strategy
    if processes:
        raise ValueError("measure_bytes is given and processes is set; it would measure this process, not the workers'")
    return MemoryBounded(strategy, limit_bytes)


def check_queue(max_queue: int, knobs: Knobs, strategy: Strategy) -> None:
    """Raise unless ``max_queue`` items, a whole number, can fill a batch of a static ``strategy``."""
    if isinstance(strategy, Static) and isinstance(max_queue, int) and 0 < max_queue < knobs.max_batch_size:
        raise ValueError(f"max_queue is {max_queue}; a static batch of {knobs.max_batch_size} would never fill")
