"""``@batch``: a function of a list becomes one that takes items one by one, from anywhere, and batches them."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, overload

from runtime.batching.batcher import Batcher, in_event_loop
from runtime.batching.future import ItemFuture
from runtime.batching.options import slos_by_class
from runtime.errors import EngineClosedError


class _Made:
    """The batcher of a function, or of a method and one instance, to which it holds no more than a weak reference."""

    def __init__(self, owner: weakref.ref[Any] | None = None) -> None:
        self.owner = owner
        self.lock = threading.Lock()
        self.batcher: Batcher | None = None


class Batched:
    """What ``@batch`` makes of a function: call it with an item, ``await`` it, ``submit`` to it, ``map`` over it.

    The batcher is made with the first item; an SLO that cannot be read, and an option that is none, raise before that. On a
    method there is one for each instance, which goes with it, but not before the futures of its items are done. ``function``
    is what was decorated; ``options`` are those of the decorator.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        _check(options)
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.options = options
        self._name = getattr(function, "__name__", "")
        self._owner: Any = None  # the instance, kept as long as someone has its bound method
        self._made = _Made()
        self._lock = threading.Lock()
        self._of: dict[int, _Made] = {}  # by identity: instances need not be hashable
        self._given: set[str] = set()  # options that cannot be copied and that an instance has

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Batched:
        if instance is None:
            return self
        with self._lock:
            made = self._of.get(id(instance))
            if made is None:
                try:
                    made = _Made(weakref.ref(instance))
                except TypeError:
                    raise TypeError(
                        f"@batch on {self._name}: a {type(instance).__name__} cannot be weakly referenced, so its batcher"
                        " would keep it for ever; give the class __weakref__ (a dataclass: weakref_slot=True)"
                    ) from None
                self._of[id(instance)] = made
                weakref.finalize(instance, self._of.pop, id(instance), None).atexit = False
        bound = object.__new__(Batched)
        bound.__dict__.update(self.__dict__)
        bound._owner, bound._made = instance, made
        return bound

    @property
    def batcher(self) -> Batcher:
        """The batcher itself: knobs, records, ``close``."""
        made = self._made
        if made.batcher is None:
            with made.lock:
                if made.batcher is None:
                    batcher = Batcher(self._weakly_bound(), **{"name": self._name, **self._options_of_its_own()})
                    batcher._owner = made.owner
                    made.batcher = batcher
        return made.batcher

    @property
    def target(self) -> Callable[..., Any]:
        """What is called with a list: the function, or the method of its instance."""
        return self.function if self._owner is None else functools.partial(self.function, self._owner)

    def _options_of_its_own(self) -> dict[str, Any]:
        """Of a method, each instance has a grouping and a strategy of its own: what they hold is of one batcher's items. One
        that cannot be copied, as it holds a lock, goes to the first instance."""
        if self._made.owner is None:
            return self.options
        options = dict(self.options)
        for name in {"grouping", "strategy"} & options.keys():
            try:
                options[name] = copy.deepcopy(options[name])
            except Exception as error:
                with self._lock:
                    taken = name in self._given
                    self._given.add(name)
                if taken:
                    raise TypeError(
                        f"@batch on {self._name}: {name} is {options[name]!r}, which cannot be copied ({error}), and another"
                        " instance has it; give it a __deepcopy__, or make a Batcher in __init__"
                    ) from error
        return options

    def _weakly_bound(self) -> Callable[..., Any]:
        return self.function if self._made.owner is None else _weak_method(self.function, self._made.owner)

    def __call__(self, item: Any, **options: Any) -> Any:
        return self._awaited(item, options) if in_event_loop() else self.batcher.call(item, **options)

    async def _awaited(self, item: Any, options: dict[str, Any]) -> Any:
        return await self.batcher.acall(item, **options)

    def submit(self, item: Any, **options: Any) -> ItemFuture:
        """See :meth:`Batcher.submit`."""
        return self.batcher.submit(item, **options)

    def map(self, items: Any, **options: Any) -> Iterator[Any]:
        """See :meth:`Batcher.map`."""
        yield from self.batcher.map(items, **options)

    def close(self, drain: bool = True) -> None:
        """Close the batcher, if there is one yet."""
        if self._made.batcher is not None:
            self._made.batcher.close(drain)

    def __repr__(self) -> str:
        return f"<batched {self._name}>"


def _check(options: dict[str, Any]) -> None:
    """Raise what :class:`Batcher` would raise of these at the first item, when nobody looks at the decorator any more."""
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        raise TypeError(f"@batch has no option {unknown!r}; the options are {', '.join(_OPTIONS)}")
    slos_by_class(options.get("slo"))


_OPTIONS = [name for name in inspect.signature(Batcher).parameters if name != "fn"]


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
    """Decorate ``function``, or a method, that takes a list of items. ``options`` are those of :class:`Batcher`."""
    if function is not None:
        return Batched(function, options)
    return lambda decorated: Batched(decorated, options)
