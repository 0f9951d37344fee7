"""A function in a process of its own: no shared interpreter lock, and a crash takes down nothing but the call it was in."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from runtime.batching.invoke import WorkerDied, as_function

_GRACE_S = 5.0  # for a process to end by itself


class ProcessWorker:
    """Calls ``fn`` in a child process, which starts with the first call and again after it has died.

    ``fn``, the items and the results must be picklable; the child imports the module that ``fn`` lives in. One call at a time;
    :meth:`begin` says that one is about to come, and :meth:`kill` is about that one, whether it comes before it, during it or
    after it.
    """

    def __init__(self, fn: Callable[[list[Any]], Any]) -> None:
        try:
            self._pickled = pickle.dumps(_undecorated(fn) or as_function(fn))
        except Exception as error:
            raise ValueError(
                f"processes is set and fn is {fn!r}, which cannot be sent to a process ({error});"
                " it must be a plain function of a module"
            ) from error
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None
        self._lock = threading.RLock()  # guards the next two, and the process against a kill while it is let go
        self._calling = False
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._pickled), daemon=True)
        process.start()
        theirs.close()
        with self._lock:
            self._process, self._pipe = process, ours
            if self._killed:
                process.kill()
        return ours

    def begin(self) -> None:
        """A call is about to come: forget what was said of the one before. Any thread."""
        with self._lock:
            self._killed = False

    def __call__(self, items: list[Any]) -> Any:
        request = pickle.dumps(items)
        with self._lock:
            if self._killed:
                raise WorkerDied(f"nobody waits for this call of {self.__qualname__}")
            self._calling = True
        try:
            try:
                pipe = self._pipe or self._start()
                pipe.send_bytes(request)
                reply = pipe.recv_bytes()
            except (EOFError, OSError) as error:
                code = self._end()
                raise WorkerDied(f"the process that ran {self.__qualname__} ended with exit code {code}") from error
            ok, answer = pickle.loads(reply)
        finally:
            with self._lock:
                self._calling, killed = False, self._killed
            if killed:  # perhaps when the answer was on its way: the next call is to find another process
                self._end()
        if ok:
            return answer
        raise answer

    def kill(self) -> None:
        """End the call that :meth:`begin` has announced, in the middle of whatever the child does. Any thread."""
        with self._lock:
            self._killed = True
            if self._calling and self._process is not None:
                self._process.kill()

    def _end(self) -> int | None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
        code: int | None = process.exitcode
        return code

    def close(self) -> None:
        """Have the child end, and wait for it."""
        pipe = self._pipe
        if pipe is not None:
            with suppress(OSError):
                pipe.send_bytes(b"")
            pipe.close()
        self._end()


class _Undecorated:
    """A function that was decorated, so that something else stands under its name now; found again by what wraps it."""

    def __init__(self, module: str, qualname: str, depth: int) -> None:
        self.module, self.qualname, self.depth = module, qualname, depth

    def find(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found


def _undecorated(fn: Any) -> _Undecorated | None:
    """How the child finds ``fn`` if ``@batch``, or another decorator that keeps ``__wrapped__``, stands for it; else None."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        return None
    for depth in range(1, 16):
        try:
            if (found := _Undecorated(module, qualname, depth)).find() is fn:
                return found
        except (ImportError, AttributeError):
            return None
    return None


def _readable(error: BaseException) -> BaseException:
    """``error``, or what it says: some exceptions cannot be written, or can be written and not read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _serve(pipe: Connection, pickled: bytes) -> None:
    """The child: calls the function with what comes through the pipe until that is empty or closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    fn = pickle.loads(pickled)
    if isinstance(fn, _Undecorated):
        fn = fn.find()
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        if not request:
            return
        try:
            outcomes = fn(pickle.loads(request))
            if isinstance(outcomes, list | tuple) and any(isinstance(one, BaseException) for one in outcomes):
                outcomes = [_readable(one) if isinstance(one, BaseException) else one for one in outcomes]
            reply = pickle.dumps((True, outcomes))
        except Exception as error:
            reply = pickle.dumps((False, _readable(error)))
        pipe.send_bytes(reply)
