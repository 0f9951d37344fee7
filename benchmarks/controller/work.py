"""Runs by the hundred, in one process or a few: each is plain data, and results come as they are done."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import groupby
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from benchmarks.controller.contenders import CONTENDERS, STATIC
from benchmarks.controller.run import BIN_S, Bench, Outcome, run, serve
from benchmarks.controller.run import requests as requests_of
from benchmarks.controller.scenarios import HARDWARE, LOADS, SCENARIOS, Phase, Scenario
from benchmarks.workers import end_with_parent
from runtime.knobs import Knobs

T = TypeVar("T")
R = TypeVar("R")


class Task(NamedTuple):
    """One run of a contender (its name), under fixed knobs for each phase if it has any."""

    scenario: str
    contender: str
    seed: int
    schedule: tuple[Knobs, ...] = ()


class PeakTask(NamedTuple):
    """About ``requests`` of a load (by its place in ``LOADS``) at ``rate`` under ``knobs``."""

    load: int
    knobs: Knobs
    rate: float
    requests: int
    seed: int


class Peak(NamedTuple):
    """Goodput, requests/s, and whether slots ever ran out."""

    goodput: float
    full: bool


class Workers:
    """Runs tasks, ``jobs`` at a time; with one, here."""

    def __init__(self, jobs: int, bench: Bench) -> None:
        self.bench = bench
        self._pool = (
            ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent) if jobs > 1 else None
        )

    def runs(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Each task and what came of it, in no particular order."""
        return self.each(run_task, tasks)

    def peaks(self, tasks: Iterable[PeakTask]) -> Iterator[tuple[PeakTask, Peak]]:
        """Each task and what it found."""
        return self.each(run_peak, tasks)

    def each(self, work: Callable[[T, Bench], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Each task and what ``work``, a function of a module, makes of it."""
        if self._pool is None:
            for task in tasks:
                yield task, work(task, self.bench)
            return
        waiting: dict[Future[R], T] = {self._pool.submit(work, task, self.bench): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def run_task(task: Task, bench: Bench) -> Outcome:
    return run(SCENARIOS[task.scenario], CONTENDERS[task.contender].driver(task.schedule), task.seed, bench)


WARM_UP, LEAST_S = 0.3, 120.0
"""Share of a run for a peak that is left out, for an engine that is still filling up serves more than it can go on to serve;
and the shortest run: several long answers."""


def run_peak(task: PeakTask, bench: Bench) -> Peak:
    load = LOADS[task.load]
    seconds = max(task.requests / task.rate, LEAST_S)
    scenario = Scenario(str(load), "", HARDWARE[load.hardware], (Phase(seconds, load.parts, task.rate),))
    offered = requests_of(scenario, task.seed, (task.rate,), bench.traces)
    outcome = serve(scenario, offered, CONTENDERS[STATIC].driver((task.knobs,)), task.seed, patient=True)
    kept = outcome.bins[int(WARM_UP * len(outcome.bins)) :]
    return Peak(sum(met for _, met in kept) / (len(kept) * BIN_S), outcome.full)


def by_slots(cells: Sequence[Knobs]) -> list[list[Knobs]]:
    """``cells`` in the order of how many sequences they take at once, those of a kind together.

    Where slots never ran out, more of them change nothing, and need not be tried."""
    slots = {cell: min(cell.max_batch_size, cell.token_budget) for cell in cells}
    ordered = sorted(cells, key=lambda cell: (slots[cell], cell.max_batch_size))
    return [list(group) for _, group in groupby(ordered, key=lambda cell: slots[cell])]


def roomy(cell: Knobs, kinds: Iterable[Knobs]) -> Knobs | None:
    """One of ``kinds`` with the budget and chunk of ``cell``: what it did, ``cell`` does."""
    return next((k for k in kinds if (k.token_budget, k.chunk_size) == (cell.token_budget, cell.chunk_size)), None)
