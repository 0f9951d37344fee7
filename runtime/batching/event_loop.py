"""An event loop in a thread of its own, in which asynchronous functions run, whoever submits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Final

log = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0
"""For a task that was cancelled to be over."""


class LoopThread:
    """Starts with the first coroutine. All calls of one batcher share it, so sessions and pools of clients work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` in the loop and wait for what it returns or raises. ``RuntimeError`` where no thread can be started:
        the next coroutine tries again."""
        with self._lock:
            try:
                loop = self._loop or self._start()
            except BaseException:
                coroutine.close()
                raise
        found, fatal = asyncio.run_coroutine_threadsafe(_contained(coroutine), loop).result()
        if fatal is not None:
            raise fatal
        return found

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._serve, args=(loop,), name=f"{self._name} loop", daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run ``loop`` until it is closed. What would end it, such as SystemExit in a task that the function has started, ends
        that task alone."""
        while not self._closing:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                log.exception("something in %s raised what would end it; it goes on", threading.current_thread().name)

    def runs_in(self, thread: threading.Thread) -> bool:
        return self._thread is thread

    def close(self) -> None:
        """Cancel what the function has left running in the loop, then stop and close it; a task that is not over after
        ``PATIENCE_S`` is left where it is."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(_ended(loop), loop).result()
            self._closing = True
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _ended(loop: asyncio.AbstractEventLoop) -> None:
    """All tasks of ``loop`` but this one are cancelled, and have had time to clean up."""
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=PATIENCE_S)
    await loop.shutdown_asyncgens()


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """What would end the loop, such as SystemExit, goes to the worker that called instead."""
    try:
        return await coroutine, None
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as fatal:
        return None, fatal
