"""Worker processes that try settings: they compute, and touch no file; only their parent writes the study.

A worker ends when its parent does, whatever happens to either. One that dies is replaced, and what it was at is given to
another; what kills three workers one after the other is given up with that cause.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from autotune.measure.evaluate import EvaluationError
from runtime.errors import AutotuneError
from runtime.knobs import Knobs

_ATTEMPTS = 3


@dataclass(frozen=True)
class Outcome:
    """What a setting came to: the objective's ``value`` (higher is better) and plain data to be stored with it."""

    value: float
    result: Mapping[str, Any]


class Objective(Protocol):
    """Picklable, and the same setting gives the same outcome in any process: a frozen dataclass of plain facts.

    ``stop`` may be asked now and then. Raises :class:`EvaluationError` where a setting cannot be tried, and its subclass
    ``Interrupted`` after ``stop``.
    """

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome: ...


@dataclass(frozen=True)
class Tried:
    """A task that came back: an outcome, or the cause why there is none."""

    task: int
    outcome: Outcome | None
    cause: str = ""


class WorkerError(AutotuneError):
    """Workers cannot be started, or the objective raised what no setting should make it raise."""


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    task: int | None = None


class Pool:
    """``count`` processes with the objective. A context manager: leaving it ends them at once, whatever they are at."""

    def __init__(self, objective: Objective, count: int) -> None:
        self._objective, self._count = objective, count
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._tasks: dict[int, Knobs] = {}
        self._attempts: dict[int, int] = {}
        self._queue: list[int] = []
        self._stillborn = 0

    def __enter__(self) -> Pool:
        self._workers = [self._start() for _ in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    @property
    def room(self) -> int:
        """How many more tasks would be taken up without waiting."""
        return self._count - len(self._tasks)

    @property
    def busy(self) -> int:
        return len(self._tasks)

    def submit(self, task: int, knobs: Knobs) -> None:
        self._tasks[task] = knobs
        self._attempts[task] = 0
        self._queue.append(task)
        self._hand_out()

    def finished(self, timeout_s: float) -> Iterator[Tried]:
        """What came back within that time, in the order in which it did."""
        waited: list[Any] = [w.pipe for w in self._workers] + [w.process.sentinel for w in self._workers]
        ready = set(wait(waited, timeout_s))
        for worker in list(self._workers):
            if worker.pipe in ready or worker.process.sentinel in ready:
                try:
                    while worker.pipe.poll():
                        yield from self._heard(worker, worker.pipe.recv())
                except (EOFError, OSError):
                    yield from self._died(worker)
        self._hand_out()

    def _heard(self, worker: _Worker, message: tuple[str, Any]) -> Iterator[Tried]:
        kind, content = message
        if kind == "ready":
            worker.ready, self._stillborn = True, 0
            return
        if kind == "broken":
            raise WorkerError(content)
        task, worker.task = worker.task, None
        assert task is not None
        del self._tasks[task], self._attempts[task]
        yield Tried(task, content) if kind == "done" else Tried(task, None, content)

    def _died(self, worker: _Worker) -> Iterator[Tried]:
        worker.process.join()
        worker.pipe.close()
        how = f"exit code {worker.process.exitcode}"
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= _ATTEMPTS:
                raise WorkerError(f"worker processes end before they begin ({how})")
        self._workers[self._workers.index(worker)] = self._start()
        if (task := worker.task) is None:
            return
        self._attempts[task] += 1
        if self._attempts[task] < _ATTEMPTS:
            self._queue.insert(0, task)
            return
        del self._tasks[task], self._attempts[task]
        yield Tried(task, None, f"its worker process died {_ATTEMPTS} times ({how})")

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.ready and worker.task is None:
                worker.task = self._queue.pop(0)
                try:
                    worker.pipe.send(self._tasks[worker.task])
                except OSError:  # it has just died; its sentinel will say so
                    continue

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._objective), daemon=True, name="simulation")
        process.start()
        theirs.close()
        return _Worker(process, ours)


def _work(pipe: Connection, objective: Objective) -> None:
    """The worker process: a setting in, its outcome out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of the terminal's processes; the parent decides
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        pipe.send(("ready", None))
        while True:
            knobs = pipe.recv()
            try:
                pipe.send(("done", objective(knobs, _never)))
            except EvaluationError as error:
                pipe.send(("failed", str(error)))
            except (OSError, EOFError):
                raise
            except Exception as error:
                pipe.send(("broken", f"{type(error).__name__} while simulating {knobs}: {error}"))
    except (OSError, EOFError):
        return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _never() -> bool:
    return False
