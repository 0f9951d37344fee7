"""Many items at once: submit as fast as there is room, and give out what comes of each.

Before it waits for an outcome without bringing more items, it says so: a strategy that holds items back until others fill
their call would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from queue import SimpleQueue
from typing import Any

from runtime.batching.future import ItemFuture
from runtime.batching.item import WAITING
from runtime.batching.pool import Pool
from runtime.errors import RejectedError
from runtime.shared.progress import progress_bar

FOR_ITSELF = "a worker of this batcher would wait for itself; submit and go on instead"
_AHEAD = 8192  # items submitted before the first result is taken, at most: results wait in memory


def map_over(
    cost_of: Callable[[Any], int],
    new: Callable[[Any, int], ItemFuture],
    enter: Callable[[ItemFuture], object],
    items: Iterable[Any],
    pool: Pool,
    *,
    ordered: bool,
    progress: bool,
    return_exceptions: bool,
) -> Iterator[Any]:
    """See :meth:`runtime.batching.batcher.Batcher.map`."""
    if pool.here:
        raise RuntimeError(FOR_ITSELF)
    pool.may_wait()
    total = len(items) if isinstance(items, Sized) else None
    with progress_bar("items", total, show=progress) as advance:
        line: deque[ItemFuture] = deque()
        crowd: dict[ItemFuture, None] = {}
        running: Collection[ItemFuture] = line if ordered else crowd  # those whose outcome has not been given out
        source = _submitted(cost_of, new, enter, items, return_exceptions)
        most = min(pool.core.max_queue, _AHEAD)
        outcomes = _in_order(source, line, most, pool) if ordered else _as_completed(source, crowd, most, pool)
        try:
            for outcome in outcomes:
                advance()
                if isinstance(outcome, BaseException) and not return_exceptions:
                    raise outcome
                yield outcome
        finally:
            pool.drop(running)


def _submitted(
    cost_of: Callable[[Any], int],
    new: Callable[[Any, int], ItemFuture],
    enter: Callable[[ItemFuture], object],
    items: Iterable[Any],
    return_exceptions: bool,
) -> Iterator[ItemFuture]:
    """Submits one item each time it is asked. One that is refused, or whose cost cannot be had, gets a future that says so."""
    for item in items:
        try:
            cost = cost_of(item)
        except Exception as error:
            if not return_exceptions:
                raise
            future = ItemFuture()
            future.set_exception(error)
            yield future
            continue
        future = new(item, cost)
        try:
            enter(future)
        except RejectedError as error:
            if not return_exceptions:
                raise
            future.set_exception(error)
        yield future


def _outcome(future: ItemFuture) -> Any:
    error = future.exception()
    return future.result() if error is None else error


def _press_for(future: ItemFuture, pool: Pool) -> None:
    """``future`` is waited for, and no more are brought meanwhile."""

    def press() -> None:
        state = pool.core.state
        state.wanted = [item for item in state.wanted if item.state is WAITING]
        if future.item not in state.wanted:
            state.wanted.append(future.item)
            pool.wake()

    if not future.done() and future.item.state is WAITING:
        pool.locked(press)


def _press_for_all(pool: Pool) -> None:
    """No more will come of this source: nothing that waits now is to be held back for more."""

    def press() -> None:
        pool.core.state.pressed = max(pool.core.state.pressed, pool.clock.now())
        pool.wake()

    pool.locked(press)


def _in_order(source: Iterator[ItemFuture], running: deque[ItemFuture], most: int, pool: Pool) -> Iterator[Any]:
    for future in source:
        running.append(future)
        while running and (len(running) >= most or running[0].done()):
            _press_for(running[0], pool)
            outcome = _outcome(running[0])
            running.popleft()
            yield outcome
    _press_for_all(pool)
    while running:
        outcome = _outcome(running[0])
        running.popleft()
        yield outcome


def _as_completed(
    source: Iterator[ItemFuture], running: dict[ItemFuture, None], most: int, pool: Pool
) -> Iterator[Any]:
    # each tells when it is over, so that nobody has to look at all of them
    over: SimpleQueue[ItemFuture] = SimpleQueue()
    for future in source:
        running[future] = None
        future.add_done_callback(over.put)
        while running and (len(running) >= most or not over.empty()):
            _press_for(next(iter(running)), pool)
            yield _next_over(over, running)
    _press_for_all(pool)
    while running:
        yield _next_over(over, running)


def _next_over(over: SimpleQueue[ItemFuture], running: dict[ItemFuture, None]) -> Any:
    future = over.get()
    del running[future]
    return _outcome(future)
