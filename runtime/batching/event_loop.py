"""An event loop in a thread of its own, in which asynchronous functions run, whoever submits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class LoopThread:
    """Starts with the first coroutine. All calls of one batcher share it, so sessions and pools of clients work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` in the loop and wait for what it returns or raises."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=f"{self._name} loop", daemon=True)
                self._thread.start()
        found, fatal = asyncio.run_coroutine_threadsafe(_contained(coroutine), self._loop).result()
        if fatal is not None:
            raise fatal
        return found

    def runs_in(self, thread: threading.Thread) -> bool:
        return self._thread is thread

    def close(self) -> None:
        """Stop and close the loop; nothing runs in it any more."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """What would end the loop, such as SystemExit, goes to the worker that called instead."""
    try:
        return await coroutine, None
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as fatal:
        return None, fatal
