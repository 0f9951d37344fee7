"""What ``submit`` returns: a :class:`concurrent.futures.Future` that can also be awaited, from any event loop.

It works with ``concurrent.futures.wait``, ``as_completed`` and ``asyncio.wrap_future``. Those who await it are woken once a
call for each event loop, not once an item.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from runtime.batching.item import RUNNING, Item
from runtime.shared.wakeups import wake

if TYPE_CHECKING:
    from runtime.batching.pool import Pool

log = logging.getLogger(__name__)


def _contained(fn: Callable[[Any], object], future: Future[Any]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # Future itself logs it
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, and no doing of the callback's
        log.exception("a callback of a future raised")


class ItemFuture(Future[Any]):
    """The outcome of one item. ``cancel()`` succeeds as long as the item has not gone into a call; of a stream, to its end.

    Which of cancellation, timeout, rejection and result it is gets decided under the batcher's lock, by the state of the item;
    whoever moved that sets the outcome.
    """

    item: Item
    _pool: Pool
    _raised_at: TracebackType | None = None  # of its exception
    _keeps: Any = None  # the batcher, which ends with the last who knows it, and the object whose method it calls

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have ``fn`` called with this future when its item has ended, by whoever ends it, or at once if it has.

        What it raises is logged, and keeps nobody else waiting: ``SystemExit`` too, where other futures contain ``Exception``
        alone.
        """
        super().add_done_callback(partial(_contained, fn))

    def set_exception(self, exception: BaseException | None) -> None:
        """For the batcher: the item failed with ``exception``."""
        if exception is not None:
            self._raised_at = exception.__traceback__
        super().set_exception(exception)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the item failed with, None if it did not, after at most ``timeout`` seconds of waiting (None: any time).

        Raises what :meth:`result` does where there is no outcome.
        """
        if not self.done():
            self._pool.may_wait()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """What came of the item, after at most ``timeout`` seconds of waiting (None: any time).

        Raises ``TimeoutError`` after that, ``CancelledError``, and what the item failed with. All items of a call that failed
        raise the same exception; whoever asks sees where it was raised, and not who else has asked. While there is no outcome
        it raises ``RuntimeError`` in a signal handler that interrupts a call of the batcher, and EngineClosedError in a process
        that was forked from the batcher's.
        """
        error = self.exception(timeout)
        if error is None:
            return super().result()
        try:
            raise error.with_traceback(self._raised_at)
        finally:
            del self, error  # or this frame, which the exception holds, would hold it

    def running(self) -> bool:
        """Whether it is in a call."""
        return self.item.state is RUNNING and not self.done()

    def cancel(self) -> bool:
        """Withdraw the item. False if it has ended, or runs and its outputs do not come one by one: then nothing happens. False
        as well in a signal handler that interrupts a call of the batcher: then it is done when that goes on."""
        if self.done():
            return self.cancelled()
        return self._pool.withdraw(self.item) or self.cancelled()  # under the batcher's lock: whoever wins, wins alone

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            self._pool.may_wait()
            waiter = asyncio.get_running_loop().create_future()
            super().add_done_callback(lambda _: wake(waiter))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()


class StreamFuture(ItemFuture):
    """Of an item whose outputs come one by one: iterate over it, ``for`` or ``async for``. ``result()`` is all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[Any] = []
        self._changed = threading.Condition()
        self._in_loops: deque[asyncio.Future[None]] = deque()
        self.add_done_callback(StreamFuture._wake)  # nothing of its own, which it would keep alive

    @property
    def outputs(self) -> list[Any]:
        """Those that have come so far."""
        return self._outputs

    def put(self, output: Any) -> None:
        """One more output; called by the worker."""
        self._outputs.append(output)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            while self._in_loops:
                wake(self._in_loops.popleft())

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        while True:
            if len(self._outputs) == seen and not self.done():
                self._pool.may_wait()
            with self._changed:
                while len(self._outputs) == seen and not self.done():
                    self._changed.wait()
            if len(self._outputs) == seen:
                self.result()  # raises what it ended with
                return
            yield self._outputs[seen]
            seen += 1

    async def __aiter__(self) -> AsyncIterator[Any]:
        seen = 0
        while True:
            waiter: asyncio.Future[None] | None = None
            if len(self._outputs) == seen and not self.done():
                self._pool.may_wait()
            with self._changed:
                if len(self._outputs) == seen and not self.done():
                    waiter = asyncio.get_running_loop().create_future()
                    self._in_loops.append(waiter)
            if waiter is not None:
                try:
                    await waiter
                except asyncio.CancelledError:
                    self.cancel()
                    raise
                continue
            if len(self._outputs) == seen:
                self.result()
                return
            yield self._outputs[seen]
            seen += 1
