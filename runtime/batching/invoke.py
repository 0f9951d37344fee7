"""Calling the function, whatever kind it is, and making one outcome for each item of what comes back."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import aclosing, closing
from functools import partial
from traceback import clear_frames
from typing import Any, NamedTuple, cast

from runtime.batching.event_loop import LoopThread
from runtime.errors import StepFailedError

Outcomes = list[Any]
"""One for each item: its result, or the exception that it failed with."""
Emit = Callable[[Sequence[Any]], bool]
"""Takes the next outputs of a function that streams: one slot an item, ``SKIP`` (or None) where there is nothing, ``END`` where
nothing more will come, or the item's exception. False if nobody waits for more."""


class _Sign:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


SKIP, END = _Sign("SKIP"), _Sign("END")
"""In a slot of a function that streams: no output in this turn; no more of them."""


class WorkerDied(Exception):
    """The worker is gone in the middle of a call: it did not fail, it ended."""


class Ran(NamedTuple):
    """What came of a call. ``runs``: how often the function was called; ``oom``: the runs that ran out of memory, as which of the
    items they held, and ``fitted``: those that returned."""

    outcomes: Outcomes
    runs: int
    oom: list[range]
    fitted: list[range]


class Function:
    """A callable of any kind behind one face: ``run(payloads, emit)`` gives one outcome for each."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        loop: LoopThread | None = None,
        begin: Callable[[], None] = lambda: None,
        kill: Callable[[], None] | None = None,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"fn is {fn!r}; it must be callable with a list of items")
        self._fn = as_function(fn)
        self._collate = collate
        self._loop = loop
        self.begin = begin
        """To be told, under the lock of whoever kills, that a call is about to come."""
        self.kill = kill
        """Ends that call in the middle, if there is a way to."""
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self.streams, self.is_async = kind_of(fn)

    def runs_in(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is that of the event loop in which the function runs."""
        return self._loop is not None and self._loop.runs_in(thread)

    def run(self, payloads: list[Any], emit: Emit) -> Outcomes:
        """Raises what the function raises."""
        given = payloads if self._collate is None else self._collate(payloads)
        if self.streams:
            return self._stream(given, len(payloads), emit)
        if self.is_async:
            assert self._loop is not None
            found = self._loop.run(self._fn(given))
        else:
            found = self._fn(given)
            if (
                inspect.iscoroutine(found) and self._loop is not None
            ):  # an async callable in disguise, such as a partial
                found = self._loop.run(found)
        return self._one_each(found, len(payloads))

    def _one_each(self, found: Any, count: int) -> Outcomes:
        if type(found) is not list:
            try:
                if isinstance(found, str | bytes | Mapping | Set):
                    raise TypeError
                len(found)
                found = list(found)
            except TypeError:
                raise StepFailedError(
                    f"{self.name} returned {type(found).__name__}; it must return a list with one result for each item"
                ) from None
        if len(found) != count:
            raise StepFailedError(
                f"{self.name} returned {len(found)} results for {count} items; it must be one for each"
            )
        return cast(Outcomes, found)

    def _stream(self, given: Any, count: int, emit: Emit) -> Outcomes:
        """Runs a generator to its end, or until nobody waits for more; ``emit`` keeps each item's outputs."""
        source = self._fn(given)
        if self.is_async:
            assert self._loop is not None

            async def run() -> None:
                async with aclosing(source):
                    async for outputs in source:
                        if not emit(self._one_each(outputs, count)):
                            return

            self._loop.run(run())
        else:
            with closing(source):
                for outputs in source:
                    if not emit(self._one_each(outputs, count)):
                        break
        return [SKIP] * count


def kind_of(fn: Callable[..., Any]) -> tuple[bool, bool]:
    """(whether it streams, whether it is asynchronous), seen through partials and callable objects."""
    target: Any = fn
    while isinstance(target, partial):
        target = target.func
    candidates = [target, getattr(type(target), "__call__", None)]  # noqa: B004  # its code is looked at, not called
    async_stream = any(inspect.isasyncgenfunction(c) for c in candidates)
    streams = async_stream or any(inspect.isgeneratorfunction(c) for c in candidates)
    return streams, async_stream or any(asyncio.iscoroutinefunction(c) for c in candidates)


def as_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, or what batches inputs for it if it is a bare PyTorch module."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(fn, torch.nn.Module):
        from runtime.torch_backend.batched_module import BatchedModule

        return BatchedModule(fn)
    return fn


class _Heard:
    """Hands on the outputs of a part of the items, and knows whether there were any."""

    def __init__(self, emit: Callable[[int, Sequence[Any]], bool], at: int) -> None:
        self._emit = emit
        self._at = at
        self.any = False

    def __call__(self, outputs: Sequence[Any]) -> bool:
        self.any = True
        return self._emit(self._at, outputs)


def run_call(
    function: Function, payloads: list[Any], emit: Callable[[int, Sequence[Any]], bool], *, isolate: bool
) -> Ran:
    """One outcome for each of ``payloads``, halving where memory ran out and, with ``isolate``, where the function raised; a
    stream only until its first outputs. ``emit`` gets those with the place of the first item that they are of.

    What is no :class:`Exception` (the worker's end, an interrupt) and :class:`WorkerDied` go through.
    """
    outcomes: Outcomes = []
    ran = Ran(outcomes, 0, [], [])
    todo = [range(len(payloads))]
    while todo:
        part = todo.pop()
        ran = ran._replace(runs=ran.runs + 1)
        heard = _Heard(emit, part.start)
        found = _attempt(function, payloads[part.start : part.stop], heard)
        if isinstance(found, list):
            outcomes += found
            ran.fitted.append(part)
            continue
        oom = is_out_of_memory(found)
        if oom:
            ran.oom.append(part)
        if len(part) > 1 and (oom or isolate) and not heard.any:
            middle = part.start + len(part) // 2
            todo += [range(middle, part.stop), range(part.start, middle)]
        else:
            if oom:
                _let_go(found)
            outcomes += [found] * len(part)
        del found  # with its traceback, and so all that the call had allocated: the next one needs the room
    return ran


def _attempt(function: Function, payloads: list[Any], emit: Emit) -> Outcomes | Exception:
    """The outcomes, or what the function raised."""
    try:
        return function.run(payloads, emit)
    except WorkerDied:
        raise
    except Exception as error:
        return error


def _let_go(error: BaseException | None) -> None:
    """Empty the frames that ``error`` keeps, for it goes to whoever submitted the item, who may keep it for long."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out; asks PyTorch only if it is there."""
    if isinstance(error, MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    from runtime.torch_backend.memory import is_out_of_memory as torch_says

    return torch_says(error)
