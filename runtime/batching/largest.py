"""``find_max_batch``: the largest batch that fits, and the one with the most throughput inside a latency budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from runtime.batching.event_loop import LoopThread
from runtime.batching.invoke import Function, is_out_of_memory

_HOPELESS = 3.0  # times the latency: a first run as long, warm-up included, need not be repeated


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A batch of ``size`` took ``seconds`` (median; of one run if not ``timed``); infinite if it ran out of memory."""

    size: int
    seconds: float
    fits: bool
    timed: bool = False

    @property
    def throughput(self) -> float:
        """Items a second."""
        return self.size / self.seconds if self.fits and self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """``fits``: the largest size that ran, of ``most``; ``best``: the size with the most throughput among those tried that are
    inside the latency, None if none is. ``out_of_memory``: whether memory is what bounds ``fits``, rather than ``most``."""

    fits: int
    best: int | None
    out_of_memory: bool
    trials: tuple[SizeTrial, ...]


def find_max_batch(
    fn: Callable[[list[Any]], Any],
    example: Any,
    *,
    latency_ms: float | None = None,
    most: int = 4096,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> MaxBatch:
    """Call ``fn`` with batches of ``example``: 1, 2, 4, … until memory runs out or ``most`` is reached, then halve the gap to the
    very size; and the same below it for the largest inside ``latency_ms``, to within a sixteenth.

    ``example``: one item, the largest that will come, for memory depends on it. Each size runs once to warm up and
    ``repeats`` times timed; one that is beyond ``latency_ms``, or only looks for the end of memory, runs once. So with much
    memory and a slow ``fn`` it is ``most`` that bounds the search. ``clock`` returns seconds. What else ``fn`` raises goes
    through; a size of 1 that does not fit raises :class:`MemoryError`.
    """
    for name, value in (("most", most), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if latency_ms is not None and not latency_ms > 0:
        raise ValueError(f"latency_ms is {latency_ms!r}; it must be above 0")
    budget = inf if latency_ms is None else latency_ms / 1e3
    loop = LoopThread("find_max_batch")
    function = Function(fn, loop=loop)
    trials: dict[int, SizeTrial] = {}

    def run(size: int, *, timed: bool = True) -> SizeTrial:
        known = trials.get(size)
        hopeless = known is not None and (not known.fits or known.timed or known.seconds > _HOPELESS * budget)
        if known is None or (timed and not hopeless):
            known = trials[size] = _trial(function, example, size, repeats if timed else 0, clock, budget)
        return known

    def inside(size: int) -> bool:
        trial = run(size)
        return trial.fits and trial.seconds <= budget

    def fits_memory(size: int) -> bool:
        return run(size, timed=all(trial.seconds <= budget for trial in trials.values() if trial.fits)).fits

    try:
        if not run(1).fits:
            raise MemoryError(f"{function.name} runs out of memory with a single item")
        fits, beyond = _doubling(fits_memory, most)
        fits, _ = _halving(lambda size: run(size, timed=False).fits, fits, beyond, 0)
        if inside(1):
            low, high = _doubling(inside, fits)
            _halving(inside, low, high, 1 / 16)
    finally:
        loop.close()
    tried = sorted(trials.values(), key=lambda trial: trial.size)
    good = [trial for trial in tried if trial.fits and trial.timed and trial.seconds <= budget]
    return MaxBatch(
        fits=fits,
        best=max(good, key=lambda trial: trial.throughput).size if good else None,
        out_of_memory=any(not trial.fits for trial in tried),
        trials=tuple(tried),
    )


def _doubling(good: Callable[[int], bool], most: int) -> tuple[int, int]:
    """1, which is good, doubled: the last that is good, and the first that is not, or that is beyond ``most``."""
    low = 1
    while low < most:
        high = min(2 * low, most)
        if not good(high):
            return low, high
        low = high
    return low, low + 1


def _halving(good: Callable[[int], bool], low: int, high: int, within: float) -> tuple[int, int]:
    """Closer together, ``low`` good and ``high`` not, until they are neighbours or alike."""
    while high - low > max(1, within * low):
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low, high


def _trial(
    function: Function, example: Any, size: int, repeats: int, clock: Callable[[], float], budget: float
) -> SizeTrial:
    """Run ``size`` once, and ``repeats`` times more to be timed unless the first was far beyond ``budget``."""
    times = []
    try:
        for turn in range(repeats + 1):
            started = clock()
            function.run([example] * size, lambda outputs: True)
            seconds = clock() - started
            if turn == 0:
                first = seconds
                if seconds > _HOPELESS * budget:
                    break
            else:
                times.append(seconds)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return SizeTrial(size, inf, fits=False)
    return SizeTrial(size, median(times) if times else first, fits=True, timed=bool(times))
