"""How long a call takes: planned calls of several sizes over the real inputs, their medians, and a model fitted to them.

Sizes 1, 2, 4, … are each called with groups of cheap, mixed and expensive inputs, so that items and cost vary apart; a group is
called three times and its median counts. The doubling ends where an average call no longer fits the SLO,
where memory runs out, or with the time. The model is the batcher's own (:mod:`runtime.batching.service_model`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from autotune.measure.evaluate import Interrupted
from autotune.profiling.study import SweepStudy
from autotune.profiling.subject import Subject
from runtime.batching.event_loop import LoopThread
from runtime.batching.invoke import Function, is_out_of_memory
from runtime.batching.item import Call, Item
from runtime.batching.service_model import Price, ServiceModel
from runtime.errors import InputError

_ENDED = "calibrated"
REPEATS = 3  # of a call with one group of inputs
ROUNDS = 30  # times the model sees every median: recursive least squares has then forgotten where it began


@dataclass(frozen=True)
class Timed:
    """Calls of one group of ``items`` inputs that cost ``cost`` together took so many ``seconds`` (their median)."""

    items: int
    cost: int
    seconds: float


@dataclass(frozen=True)
class CallCost:
    """What a call takes: the counterpart of a language model's cost model.

    ``ratios``: every single call against ``price``, for simulations to scatter as the function does. ``largest``: items of the
    largest size that ran. ``ended``: why no larger one did. ``beside``: how many times as long a call takes while all
    ``workers`` call.
    """

    price: Price
    timed: tuple[Timed, ...]
    ratios: tuple[float, ...]
    largest: int
    ended: str
    workers: int = 1
    beside: float = 1.0

    @property
    def error(self) -> float:
        """Median relative error of the model over the groups."""
        return median(abs(self.price.of(t.items, t.cost) / t.seconds - 1) for t in self.timed)

    def at_speed(self, speed: float) -> CallCost:
        """On a machine of another ``speed``, in units of the calibrated one."""
        return replace(self, price=Price(*(seconds / speed for seconds in self.price)))

    def seconds(self, items: int, mean_cost: float) -> float:
        return self.price.of(items, items * mean_cost)

    def slowdown(self, running: int) -> float:
        """How many times as long a call takes while so many run: evenly from one to all."""
        return 1.0 if self.workers == 1 else 1 + (self.beside - 1) * (running - 1) / (self.workers - 1)

    def capacity(self, mean_cost: float, within_s: float) -> tuple[float, int]:
        """Most items/s of all workers, and the size of call that gives it, of calls of at most ``within_s`` (one item, if none
        is that short)."""

        def seconds(n: int) -> float:
            return max(self.beside * self.seconds(n, mean_cost), 1e-9)

        sizes = [n for n in range(1, self.largest + 1) if n == 1 or seconds(n) <= within_s]
        size = max(sizes, key=lambda n: n / seconds(n))
        return self.workers * size / seconds(size), size


def calibrated(study: SweepStudy) -> bool:
    """Whether an earlier session of ``study`` came to the end of the doubling."""
    return study.get(_ENDED) is not None


def measure_calls(
    subject: Subject,
    study: SweepStudy,
    *,
    seed: int,
    budget_s: float,
    most: int,
    workers: int = 1,
    longest_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[float, str], None] = lambda share, note: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CallCost:
    """Call the function with up to ``most`` items at a time. ``longest_s``: a call beyond it ends the doubling (None: 40 times
    the call of one item). What was timed in an earlier session of ``study`` is not called again. Raises :class:`FunctionFailed`
    when the function cannot be called with these inputs, Interrupted when ``stop`` says so."""
    known = study.get(_ENDED)  # in an earlier session
    with closing(TimedCalls(subject, seed, clock, stop)) as caller:
        end = clock() + budget_s
        timed: list[Timed] = []
        calls: list[Timed] = []
        average = " on average" if subject.costs_vary else ""
        size, largest, ended = 1, 0, f"{most} items, the most requested"
        try:
            while True:
                begun = clock()
                result = study.measured(f"calls/{size}", partial(caller.of, size, end), stop=stop)
                end -= max(0.0, result["seconds"] - (clock() - begun))  # of an earlier session counts as well
                for items, cost, spent in result["groups"]:
                    calls += [Timed(items, cost, s) for s in spent]
                    timed.append(Timed(items, cost, median(spent)))
                largest = size
                progress(min(1.0, 1 - (end - clock()) / budget_s), f"{largest} items")
                took = fitted(timed).of(size, size * subject.mean_cost) if subject.costs_vary else timed[-1].seconds
                longest = longest_s if longest_s is not None else 40 * timed[0].seconds
                if known is not None and known["largest"] == largest:
                    ended = known["ended"]
                elif took > longest:
                    ended = f"a call of {size} takes {took * 1e3:.3g} ms{average}"
                elif known is None and clock() > end:
                    ended = "the time for calibrating was over"
                elif size < most:
                    size = min(2 * size, most)
                    continue
                break
        except OutOfMemory:
            if not largest:
                raise FunctionFailed(f"--callable: {subject.name} runs out of memory with one item") from None
            ended = f"{size} items run out of memory"
        study.put(_ENDED, {"largest": largest, "ended": ended})
        beside = 1.0
        if workers > 1:
            together = study.measured(
                f"beside/{workers}", partial(caller.beside, max(1, largest // 4), workers), stop=stop
            )
            beside = max(1.0, together["times"])
    price = fitted(timed)
    if not subject.costs_vary:  # items and cost then say the same, and the split between them nothing
        price = Price(price.fixed, price.per_item + price.per_cost * subject.costs[0], 0.0)
    ratios = [c.seconds / max(price.of(c.items, c.cost), 1e-9) for c in calls]
    return CallCost(price, tuple(timed), tuple(ratios), largest, ended, workers, beside)


def fitted(timed: Sequence[Timed]) -> Price:
    """The price of a call by the batcher's own model, shown the medians until it has converged."""
    model = ServiceModel(forgetting=0.999)
    for round_ in range(ROUNDS):
        for index, t in enumerate(timed):
            for _ in range(2 if round_ == index == 0 else 1):  # the model leaves the very first call out
                call = Call([Item(None, 0.0)] * t.items, t.cost, 0, 0.0, 0, 0)
                call.end = max(t.seconds, 1e-7)
                model.observe(call)
    return model.price()


class FunctionFailed(InputError):
    """The function cannot be called with these inputs: what was measured tells nothing of those that will be."""


class OutOfMemory(Exception):
    """A call of so many items ran out of memory."""


class TimedCalls:
    """Calls the function with cheap, mixed and expensive inputs, the same ones for the same seed and size.

    ``of`` raises :class:`FunctionFailed` when the function cannot be called with these inputs, and Interrupted when ``stop`` says
    so.
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
            cause = f"{self._subject.name} runs out of memory while all call it, with {size} items each"
            raise FunctionFailed(f"--replicas is {workers}: {cause}") from None
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
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise OutOfMemory from None
            cause = f"{type(error).__name__}: {error}"
            raise FunctionFailed(
                f"--callable: {subject.name} failed with {len(payloads)} of the inputs: {cause}"
            ) from None
        seconds = self._clock() - begun
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, Exception):
                cause = f"{type(outcome).__name__}: {outcome}"
                raise FunctionFailed(
                    f"--callable: {subject.name} failed on input {index + 1} of {subject.inputs_name}: {cause}"
                )
        return seconds


def _no_outputs(outputs: Sequence[Any]) -> bool:
    raise AssertionError("only generators emit")
