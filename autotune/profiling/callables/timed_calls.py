"""Calls of the function with groups of real inputs, and how long they took."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from autotune.measure.evaluate import Interrupted
from autotune.profiling.callables.subject import Subject
from runtime.batching.event_loop import LoopThread
from runtime.batching.invoke import Function, is_out_of_memory
from runtime.errors import InputError

REPEATS = 3


class OutOfMemory(Exception):
    """A call of so many items ran out of memory."""


class TimedCalls:
    """Calls the function with cheap, mixed and dear inputs, the same ones for the same seed and size.

    ``of`` raises :class:`InputError` when the function cannot be called with these inputs, and Interrupted when ``stop`` says so.
    """

    def __init__(self, subject: Subject, seed: int, clock: Callable[[], float], stop: Callable[[], bool]) -> None:
        self._subject, self._seed, self._clock, self._stop = subject, seed, clock, stop
        self._loop = LoopThread("calibration")
        self._function = Function(subject.function, collate=subject.collate, loop=self._loop)
        self._order = sorted(range(len(subject.inputs)), key=subject.costs.__getitem__)
        self._warm = False

    def of(self, size: int, end: float) -> dict[str, Any]:
        """``groups``: [items, cost, seconds of each call]; ``seconds``: what they took in all. From the second group on none is
        begun after ``end``, unless it is of single items."""
        rng, begun, groups = random.Random(f"{self._seed}/{size}"), self._clock(), []
        if not self._warm:
            self._call(self._group(rng, 1, 0.5))  # what is loaded lazily is loaded now
            self._warm = True
        for where in (0.5, 0.1, 0.9) if self._subject.costs_vary else (0.5, 0.5):
            indices = self._group(rng, size, where)
            spent = [self._call(indices) for _ in range(REPEATS)]
            groups.append([size, self._subject.cost_of(indices), spent])
            if self._stop():
                raise Interrupted("stopped while calibrating")
            if self._clock() > end and size > 1:
                break
        return {"groups": groups, "seconds": self._clock() - begun}

    def once(self, size: int, rng: random.Random) -> tuple[int, float]:
        """What one call of ``size`` inputs drawn by ``rng`` costs, and the seconds it takes."""
        indices = self._group(rng, size, 0.5)
        return self._subject.cost_of(indices), self._call(indices)

    def beside(self, size: int, workers: int) -> dict[str, float]:
        """How many ``times`` as long a call of ``size`` takes while ``workers`` call all at once. Raises as ``of`` does."""
        indices = self._group(random.Random(f"{self._seed}/beside"), size, 0.5)

        def calls(count: int) -> list[float]:
            return [self._call(indices) for _ in range(count)]

        alone = median(calls(REPEATS + 1)[1:])
        each, begun = 2 * REPEATS, self._clock()
        try:
            with ThreadPoolExecutor(workers) as pool:
                for running in [pool.submit(calls, each) for _ in range(workers)]:
                    running.result()
        except OutOfMemory:
            told = f"{self._subject.name} runs out of memory while all call it, with {size} items each"
            raise InputError(f"--replicas is {workers}: {told}") from None
        return {"times": (self._clock() - begun) / each / max(alone, 1e-9)}

    def close(self) -> None:
        self._loop.close()

    def _group(self, rng: random.Random, size: int, where: float) -> list[int]:
        """``size`` inputs from around the quantile ``where`` of cost; from everywhere at the middle."""
        order = self._order
        if where == 0.5:
            return [rng.choice(order) for _ in range(size)]
        half = max(1, len(order) // 10)
        middle = int(where * (len(order) - 1))
        near = order[max(0, middle - half) : middle + half + 1]
        return [rng.choice(near) for _ in range(size)]

    def _call(self, indices: Sequence[int]) -> float:
        subject = self._subject
        payloads = [subject.inputs[i] for i in indices]
        begun = self._clock()
        try:
            outcomes = self._function.run(payloads, _no_outputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory from None
            told = f"{type(error).__name__}: {error}"
            raise InputError(f"--callable: {subject.name} failed with {len(payloads)} of the inputs: {told}") from None
        seconds = self._clock() - begun
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, Exception):
                told = f"{type(outcome).__name__}: {outcome}"
                raise InputError(
                    f"--callable: {subject.name} failed on input {index + 1} of {subject.inputs_name}: {told}"
                )
        return seconds


def _no_outputs(outputs: Sequence[Any]) -> bool:
    raise AssertionError("only generators emit")
