"""Whether the profile of a callable is still true: calls of a few sizes, timed again and held against its formula.

In each round every size is called once, in an order of the round's own, with real inputs drawn anew. What differs, how far
that is believed and what is said of it is as with an engine's steps (:mod:`autotune.profiling.check`); the formula's doubt is its
typical error. Other processes excuse calls up to twice as slow, not more.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.callable import CallableProfile
from autotune.profiling.calls import OutOfMemory, TimedCalls
from autotune.profiling.check import CROWDED, Check, RegionCheck, median_interval
from autotune.profiling.subject import Subject

_WARM_UP, _FEWEST, _MOST = 2, 6, 500  # rounds
_EXCUSED = 2.0  # times as slow
_MOST_OVER = 4.0  # times the budget, for a function far slower than the profile says


def check_calls(
    profile: CallableProfile,
    subject: Subject,
    *,
    budget_s: float,
    threshold: float,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    stop: Callable[[], bool] = lambda: False,
    advance: Callable[[float, str], None] = lambda share, note: None,
    taken: Callable[[], float] = lambda: 0.0,
) -> Check:
    """Time calls for ``budget_s`` seconds. ``taken``: asked at the end how many cores other processes took. Raises
    :class:`InputError` when the function fails, EvaluationError without memory for a size that ran, Interrupted on ``stop``."""
    sizes = sizes_of(profile)
    rng = random.Random(seed)
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    begun, rounds = clock(), 0
    with closing(TimedCalls(subject, seed, clock, stop)) as calls:
        while True:
            for size in rng.sample(sizes, len(sizes)):
                try:
                    cost, seconds = calls.once(size, rng)
                except OutOfMemory:
                    raise EvaluationError(
                        f"{subject.name} runs out of memory with {size} items, which it did not"
                    ) from None
                if rounds >= _WARM_UP:
                    ratios[size].append(seconds / max(predicted_s(profile, size, cost), 1e-9))
                    times[size].append(seconds)
                if stop():
                    raise Interrupted("stopped")
            rounds += 1
            counted, spent = rounds - _WARM_UP, clock() - begun
            advance(min(1.0, spent / budget_s), f"round {counted}" if counted > 0 else "warm-up")
            if (
                counted >= _MOST
                or (spent >= budget_s and counted >= _FEWEST)
                or (spent >= _MOST_OVER * budget_s and counted > 0)
            ):
                break
    others = taken()
    regions = tuple(_size(profile, size, ratios[size], times[size], threshold, others > CROWDED) for size in sizes)
    return Check(regions, counted, spent, threshold, others, kind="call")


def sizes_of(profile: CallableProfile) -> list[int]:
    """One item, the size of the highest throughput inside the SLO, and as many as were tried."""
    tried = sorted({group.items for group in profile.service.groups})
    best = max((size for size in tried if size <= profile.load.capacity_size), default=tried[0])
    return sorted({tried[0], best, tried[-1]})


def predicted_s(profile: CallableProfile, items: int, cost: float) -> float:
    service = profile.service
    return (service.fixed_ms + service.per_item_ms * items + service.per_cost_ms * cost) / 1e3


def _size(
    profile: CallableProfile, size: int, ratios: list[float], times: list[float], threshold: float, crowded: bool
) -> RegionCheck:
    middle = statistics.median(ratios)
    low, high = median_interval(ratios)
    typical = statistics.median(times)
    return RegionCheck(
        region="calls",
        noun=f"of {size} item{'s' * (size > 1)}",
        steps=len(ratios),
        kinds=1,
        measured_ms=typical * 1e3,
        predicted_ms=typical / middle * 1e3,
        difference=middle - 1,
        noise=max(middle - low, high - middle),
        model=profile.service.error,
        threshold=threshold,
        crowded=crowded and middle < _EXCUSED,
    )
