"""``@batch``: a function of a list becomes one that takes items one by one, from anywhere, and batches them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, overload

from runtime.batching.batcher import Batcher
from runtime.batching.future import ItemFuture
from runtime.errors import EngineClosedError


class Batched:
    """What ``@batch`` makes of a function: call it with an item, ``await`` it, ``submit`` to it, ``map`` over it.

    The batcher is made with the first item. On a method there is one for each instance, which goes with it. ``function``
    is what was decorated.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], owner: Any = None) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._options = options
        self._owner = None if owner is None else weakref.ref(owner)
        self._lock = threading.Lock()
        self._batcher: Batcher | None = None
        self._name = getattr(function, "__name__", "")
        self._bound: dict[int, Batched] = {}  # by identity: instances need not be hashable

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Batched:
        if instance is None:
            return self
        with self._lock:
            bound = self._bound.get(id(instance))
            if bound is None:
                bound = self._bound[id(instance)] = Batched(self.function, self._options, instance)
                weakref.finalize(instance, self._bound.pop, id(instance), None).atexit = False
        return bound

    @property
    def batcher(self) -> Batcher:
        """The batcher itself: knobs, records, ``close``."""
        if self._batcher is None:
            with self._lock:
                if self._batcher is None:
                    self._batcher = Batcher(self._callable(), name=self._name, **self._options)
        return self._batcher

    def _callable(self) -> Callable[..., Any]:
        if self._owner is None:
            return self.function
        owner = self._owner()
        if owner is None:
            raise EngineClosedError(f"the object whose {self._name} this is has gone")
        return _weak_method(self.function, self._owner)

    def __call__(self, item: Any, **options: Any) -> Any:
        return self.batcher(item, **options)

    def submit(self, item: Any, **options: Any) -> ItemFuture:
        """See :meth:`Batcher.submit`."""
        return self.batcher.submit(item, **options)

    def map(self, items: Any, **options: Any) -> Iterator[Any]:
        """See :meth:`Batcher.map`."""
        return self.batcher.map(items, **options)

    def close(self, drain: bool = True) -> None:
        """Close the batcher, if there is one yet."""
        if self._batcher is not None:
            self._batcher.close(drain)

    def __repr__(self) -> str:
        return f"<batched {self._name}>"


def _weak_method(function: Callable[..., Any], owner: weakref.ref[Any]) -> Callable[..., Any]:
    """``function`` bound to what ``owner`` refers to, without keeping that alive; of the same kind (async, generator)."""
    from runtime.batching.invoke import kind_of

    def instance() -> Any:
        found = owner()
        if found is None:
            raise EngineClosedError("the object whose method this is has gone")
        return found

    streams, is_async = kind_of(function)
    bound: Callable[..., Any]
    if streams and is_async:

        async def bound(items: Any) -> Any:
            async for outputs in function(instance(), items):
                yield outputs

    elif streams:

        def bound(items: Any) -> Any:
            yield from function(instance(), items)

    elif is_async:

        async def bound(items: Any) -> Any:
            return await function(instance(), items)

    else:

        def bound(items: Any) -> Any:
            return function(instance(), items)

    return functools.wraps(function)(bound)


@overload
def batch(function: Callable[..., Any], /) -> Batched: ...
@overload
def batch(**options: Any) -> Callable[[Callable[..., Any]], Batched]: ...
def batch(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorate a function, or a method, that takes a list of items. The options are those of :class:`Batcher`."""
    if function is not None:
        return Batched(function, options)
    return lambda decorated: Batched(decorated, options)
