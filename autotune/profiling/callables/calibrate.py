"""How long a call takes: planned calls of several sizes over the real inputs, their medians, and a model fitted to them.

Sizes 1, 2, 4, … are each called with groups of cheap, mixed and dear inputs, so that items and cost vary apart; a group is
called three times and its median counts. The doubling ends where an average call no longer fits the promise,
where memory runs out, or with the time. The model is the batcher's own (:mod:`runtime.batching.service_model`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

from autotune.profiling.callables.kept import Kept, NothingKept
from autotune.profiling.callables.subject import Subject
from autotune.profiling.callables.timed_calls import OutOfMemory, TimedCalls
from runtime.batching.item import Call, Item
from runtime.batching.service_model import Price, ServiceModel
from runtime.errors import InputError

_ENDED = "calibrated"
ROUNDS = 30  # times the model sees every median: recursive least squares has then forgotten where it began


@dataclass(frozen=True)
class Timed:
    """Calls of one group of ``items`` inputs that cost ``cost`` together took so many ``seconds`` (their median)."""

    items: int
    cost: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """``ratios``: every single call against ``price``, for simulations to scatter as the function does. ``largest``: items
    of the largest size that ran. ``ended``: why no larger one did. ``beside``: how many times as long a call takes while all
    ``workers`` call."""

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


def calibrate(
    subject: Subject,
    *,
    seed: int,
    budget_s: float,
    most: int,
    workers: int = 1,
    longest_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[float, str], None] = lambda share, count: None,
    clock: Callable[[], float] = time.perf_counter,
    study: Kept | None = None,
) -> Calibration:
    """Call the function with up to ``most`` items at a time. ``longest_s``: a call beyond it ends the doubling (None: 40 times
    the call of one item). What was timed in an earlier session of ``study`` is not called again. Raises :class:`InputError`
    when the function cannot be called with these inputs, Interrupted when ``stop`` says so."""
    study = study or NothingKept()
    known = study.get(_ENDED)  # in an earlier session
    with closing(TimedCalls(subject, seed, clock, stop)) as caller:
        end = clock() + budget_s
        timed: list[Timed] = []
        calls: list[Timed] = []
        average = " on average" if subject.costs_vary else ""
        size, largest, ended = 1, 0, f"{most} items, the most asked for"
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
                raise InputError(f"--callable: {subject.name} runs out of memory with one item") from None
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
    return Calibration(price, tuple(timed), tuple(ratios), largest, ended, workers, beside)


def fitted(timed: Sequence[Timed]) -> Price:
    """The price of a call by the batcher's own model, shown the medians until it has settled."""
    model = ServiceModel(forgetting=0.999)
    for round_ in range(ROUNDS):
        for index, t in enumerate(timed):
            for _ in range(2 if round_ == index == 0 else 1):  # the model leaves the very first call out
                call = Call([Item(None, 0.0)] * t.items, t.cost, 0, 0.0, 0, 0)
                call.end = max(t.seconds, 1e-7)
                model.observe(call)
    return model.price()
