"""``find_max_batch``: the largest batch that fits, and the one with the most throughput inside a latency budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from runtime.batching.event_loop import LoopThread
from runtime.batching.invoke import Function, is_out_of_memory


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch of ``size`` took ``seconds`` (median); infinite if it ran out of memory."""

    size: int
    seconds: float
    fits: bool

    @property
    def throughput(self) -> float:
        """Items a second."""
        return self.size / self.seconds if self.fits and self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """``fits``: the largest size that ran; ``best``: the size with the most throughput among those inside the budget, None
    if none is. ``out_of_memory``: whether memory is what ended the search, rather than ``most`` or the budget."""

    fits: int
    best: int | None
    out_of_memory: bool
    trials: tuple[Trial, ...]


def find_max_batch(
    fn: Callable[[list[Any]], Any],
    example: Any,
    *,
    latency_ms: float | None = None,
    most: int = 4096,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> MaxBatch:
    """Call ``fn`` with batches of ``example``: 1, 2, 4, … until memory runs out or ``most`` is reached, then halve the gap.

    ``example``: one item, the largest that will come, for memory depends on it. With ``latency_ms`` the doubling ends at the
    first size beyond it. Each size runs once to warm up and ``repeats`` times timed. What else ``fn`` raises goes through;
    a size of 1 that does not fit raises :class:`MemoryError`.
    """
    for name, value in (("most", most), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if latency_ms is not None and not latency_ms > 0:
        raise ValueError(f"latency_ms is {latency_ms!r}; it must be above 0")
    budget = float("inf") if latency_ms is None else latency_ms / 1e3
    loop = LoopThread("find_max_batch")
    function = Function(fn, loop=loop)
    trials: dict[int, Trial] = {}

    def run(size: int) -> Trial:
        if size not in trials:
            trials[size] = _trial(function, example, size, repeats, clock)
        return trials[size]

    def good(size: int) -> bool:
        trial = run(size)
        return trial.fits and trial.seconds <= budget

    try:
        first = run(1)
        if not first.fits:
            raise MemoryError(f"{function.name} runs out of memory with a single item")
        low, high = 1, 2
        while high <= most and good(low) and good(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while good(low) and high - low > max(1, low // 16):  # to within a sixteenth: sizes nearer than that are alike
            middle = (low + high) // 2
            low, high = (middle, high) if good(middle) else (low, middle)
    finally:
        loop.close()
    tried = sorted(trials.values(), key=lambda trial: trial.size)
    inside = [trial for trial in tried if trial.fits and trial.seconds <= budget]
    return MaxBatch(
        fits=max(trial.size for trial in tried if trial.fits),
        best=max(inside, key=lambda trial: trial.throughput).size if inside else None,
        out_of_memory=any(not trial.fits for trial in tried),
        trials=tuple(tried),
    )


def _trial(function: Function, example: Any, size: int, repeats: int, clock: Callable[[], float]) -> Trial:
    times = []
    try:
        for turn in range(repeats + 1):
            started = clock()
            function.run([example] * size, lambda outputs: None)
            if turn:
                times.append(clock() - started)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Trial(size, float("inf"), fits=False)
    return Trial(size, median(times), fits=True)
