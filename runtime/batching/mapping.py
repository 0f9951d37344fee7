"""Many items at once: submit as fast as there is room, and give out what comes of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from runtime.batching.future import ItemFuture
from runtime.errors import RejectedError

_AHEAD = 8192  # items submitted before the first result is taken, at most: results wait in memory


def map_over(
    submit: Callable[[Any], ItemFuture],
    items: Iterable[Any],
    *,
    ahead: int,
    ordered: bool,
    progress: bool,
    return_exceptions: bool,
) -> Iterator[Any]:
    """See :meth:`runtime.batching.batcher.Batcher.map`."""
    total = len(items) if isinstance(items, Sized) else None
    with _bar(total) if progress else nullcontext(lambda: None) as advance:
        running: deque[ItemFuture] = deque()
        source = _submitted(submit, items, running, return_exceptions)
        most = min(ahead, _AHEAD)
        give = _in_order if ordered else _as_completed
        try:
            for outcome in give(source, running, most):
                advance()
                if isinstance(outcome, Exception) and not return_exceptions:
                    raise outcome
                yield outcome
        finally:
            for future in running:
                future.cancel()


def _submitted(
    submit: Callable[[Any], ItemFuture], items: Iterable[Any], running: deque[ItemFuture], return_exceptions: bool
) -> Iterator[ItemFuture]:
    """Submits one item each time it is asked. One that is refused gets a future that says so."""
    for item in items:
        while True:
            try:
                yield submit(item)
            except RejectedError as error:
                if error.reason == "queue_full" and running:
                    running[0].exception()  # others fill the queue too: wait for one of ours
                    if running[0].done():
                        wait(list(running), timeout=error.retry_after_s or 0.001, return_when=FIRST_COMPLETED)
                    continue
                if not return_exceptions:
                    raise
                refused = ItemFuture()
                refused.set_exception(error)
                yield refused
            break


def _outcome(future: ItemFuture) -> Any:
    error = future.exception()
    return future.result() if error is None else error


def _in_order(source: Iterator[ItemFuture], running: deque[ItemFuture], most: int) -> Iterator[Any]:
    for future in source:
        running.append(future)
        while running and (len(running) >= most or running[0].done()):
            outcome = _outcome(running[0])
            running.popleft()
            yield outcome
    while running:
        outcome = _outcome(running[0])
        running.popleft()
        yield outcome


def _as_completed(source: Iterator[ItemFuture], running: deque[ItemFuture], most: int) -> Iterator[Any]:
    def ended(at_least_one: bool) -> list[Any]:
        if at_least_one:
            wait(list(running), return_when=FIRST_COMPLETED)
        over = [future for future in running if future.done()]
        alive = [future for future in running if not future.done()]
        running.clear()
        running.extend(alive)
        return [_outcome(future) for future in over]

    for future in source:
        running.append(future)
        if len(running) >= most:
            yield from ended(True)
    while running:
        yield from ended(True)


class _bar(AbstractContextManager[Callable[[], None]]):
    """A bar on stderr; inside it, the function that moves it on by one."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = ("items", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("items", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
