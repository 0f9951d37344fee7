"""The rate at which settings are compared: near the knee of the best of them, where they differ most.

Far below it every setting keeps every promise, far above it none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from autotune.profiling.space import SearchSpace
from runtime.knobs import KNOBS, Knobs

TARGET = 0.9
"""Share of promises that the best setting keeps at the knee: its goodput is about the highest there is at any rate."""

_STEP, _PRECISION = 1.3, 1.03
_LOWEST = 1 / 64  # of the first guess: below it, nobody keeps the SLO at any rate worth serving
_FACTORS = (  # of slots, budget and chunk against the calibration's guess; the chunk is cut to the budget
    (1, 1, 1), (2, 1, 1), (0.5, 1, 1), (1, 2, 1), (1, 0.5, 0.5), (2, 2, 2), (4, 2, 0.5), (2, 4, 4), (4, 4, 1), (4, 1, 0.5),
    (0.5, 0.5, 0.5), (1, 4, 1), (8, 8, 8), (4, 8, 2),
)  # fmt: skip

_STEPS = (
    (1, 0.84, 0.84), (1, 1.19, 1.19), (1, 0.7, 0.7), (1, 1.41, 1.41), (1.5, 1, 1), (0.67, 1, 1), (1, 1, 0.6), (1, 1, 0.3),
    (1, 1, 1.6),
)  # fmt: skip

Attained = Callable[[Knobs, float], float]
"""Share of requests in SLO of a setting at a rate."""


def panel(space: SearchSpace, fitted: Knobs) -> list[Knobs]:
    """A few settings spread around the calibration's guess, all inside the space."""
    return _scaled(space, fitted, _FACTORS)


def neighbours(space: SearchSpace, knobs: Knobs) -> list[Knobs]:
    """Settings a small step away from ``knobs``, inside the space."""
    return _scaled(space, knobs, _STEPS)


class Knee(NamedTuple):
    """The setting that keeps ``TARGET`` up to the highest rate found, and that rate."""

    knobs: Knobs
    rate: float


def knee(
    settings: Iterable[Knobs],
    attained: Attained,
    first: float,
    most: float,
    best: Knee | None = None,
    *,
    late: Callable[[], bool] = lambda: False,
) -> Knee | None:
    """The highest rate, to 3%, at which one of ``settings`` still keeps ``TARGET``; None if none does at any rate.

    A setting is only followed further up if it keeps the share where the best before it (``best``, to begin with) no
    longer did, so most of them cost one question. ``first``: where to begin; ``most``: more cannot be offered. What is found
    once it is ``late`` is what is found.
    """
    for knobs in settings:
        if (best is not None and best.rate >= most) or late():
            return best
        start = min(first if best is None else best.rate * _PRECISION, most)
        rate = _follow(knobs, attained, start, most, late, only_above=best is not None)
        if rate is not None:
            best = Knee(knobs, rate)
    return best


def _follow(
    knobs: Knobs, attained: Attained, start: float, most: float, late: Callable[[], bool], *, only_above: bool
) -> float | None:
    """The highest rate at which ``knobs`` keep the share; None if that is far below ``start``, or below it at all."""
    if attained(knobs, start) >= TARGET:
        low, high = start, start
        while high < most:
            high = min(high * _STEP, most)
            if late() or attained(knobs, high) < TARGET:
                break
            low = high
        else:
            return most
    else:
        if only_above:
            return None
        low, high = start, start
        while attained(knobs, low := low / _STEP**2) < TARGET:
            high = low
            if low < start * _LOWEST or late():
                return None
    while high / low > _PRECISION and not late():
        middle = (low * high) ** 0.5
        if attained(knobs, middle) >= TARGET:
            low = middle
        else:
            high = middle
    return low


def _scaled(space: SearchSpace, knobs: Knobs, factors: Iterable[tuple[float, float, float]]) -> list[Knobs]:
    found = []
    for slots, budget, chunk in factors:
        by = {"max_batch_size": slots, "token_budget": budget, "chunk_size": chunk}
        values = {s.name: min(max(getattr(knobs, s.name) * by.get(s.name, 1.0), s.low), s.high) for s in KNOBS}
        whole = {s.name: int(values[s.name]) if s.integer else values[s.name] for s in KNOBS}
        found.append(space.knobs(space.params(Knobs(**whole))))
    return list(dict.fromkeys(found))
