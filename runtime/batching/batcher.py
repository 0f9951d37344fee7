"""Batches any callable that takes a list, under a latency SLO."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from runtime.batching.core import BatchCore
from runtime.batching.event_loop import LoopThread
from runtime.batching.future import ItemFuture, StreamFuture
from runtime.batching.groupings import Grouping
from runtime.batching.invoke import Function, kind_of
from runtime.batching.item import UNTIL_SLO, Item
from runtime.batching.mapping import FOR_ITSELF, map_over
from runtime.batching.options import (
    BATCHER_LIMITS,
    check_queue,
    first_knobs,
    memory_bounded,
    priced_strategy,
    seconds,
    slos_by_class,
    whole_cost,
    workers_of,
)
from runtime.batching.pool import Pool
from runtime.batching.process_worker import ProcessWorker
from runtime.batching.strategies import Strategy
from runtime.batching.tuning import TunableBatcher
from runtime.clock import Clock, MonotonicClock
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits
from runtime.ordering import Ordering
from runtime.slo import SLO
from runtime.tunable import SchedulerView

T = TypeVar("T")


class Batcher(TunableBatcher):
    """Calls ``fn``, which takes a list of items and returns a list of results, with what many callers submit one by one.

    ``fn`` may be a function, ``async def``, a (sync or async) generator function that yields one list after the other (then
    an item has many outputs), or a PyTorch module. An exception in a slot of the list is that item's exception.

    ``slo``: the latency target, as ``"e2e=200ms@99%"`` or an :class:`SLO`, or one for each request class; what cannot meet it
    is rejected early. ``cost``: cost units of an item, such as ``len``; 1 unless given. ``strategy`` and ``grouping``: see
    docs/how-to/batch.md. ``max_batch_size``, ``max_wait_ms``, ``token_budget``: the knobs to begin with; for the adaptive
    strategy they are ceilings, and none is needed. ``limits``: their ceilings while it runs.

    ``replicas``: a number of workers that call ``fn``, or a list of callables, one for each worker; ``concurrency``: calls at
    a time in each. ``processes``: each worker in a process of its own. ``max_queue``: items that may wait; beyond, ``submit``
    blocks or, with ``when_full="reject"``, raises. ``call_price_ms``: what a call costs, in milliseconds that one item waits;
    ``inf``: as few calls as the SLO allows. ``isolate``: a call that raises is halved until the item at fault is found.
    ``retries``: how many times an item runs again whose worker died. ``collate`` makes of the list what ``fn`` is given.
    ``memory_limit_bytes`` with ``measure_bytes`` (which says how many bytes the call that has just ended held at most) keeps
    calls below a limit. ``name``: what its threads and messages call it, that of ``fn`` unless given. ``clock``: of every
    deadline and record, the monotonic one unless given.

    Use from threads and event loops alike, and as a context manager. Wrong values raise ``ValueError``.
    """

    _pool: Pool

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        slo: SLO | str | Mapping[str, SLO | str] | None = None,
        cost: Callable[[Any], float] | None = None,
        strategy: str | Strategy = "adaptive",
        grouping: str | Grouping | Ordering = "arrival",
        max_batch_size: int | None = None,
        max_wait_ms: float | None = None,
        token_budget: int | None = None,
        limits: KnobLimits | None = None,
        replicas: int | Sequence[Callable[..., Any]] | None = None,
        concurrency: int = 1,
        processes: bool = False,
        max_queue: int = 100_000,
        when_full: Literal["block", "reject"] = "block",
        call_price_ms: float = 0.0,
        isolate: bool = False,
        retries: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        memory_limit_bytes: int | None = None,
        measure_bytes: Callable[[], int] | None = None,
        name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        if when_full not in ("block", "reject"):
            raise ValueError(f"when_full is {when_full!r}; it must be block or reject")
        if cost is not None and not callable(cost):
            raise ValueError(f"cost is {cost!r}; it must be a function of one item, such as len")
        workers = workers_of(fn, replicas)
        if processes and any(any(kind_of(worker)) for worker in workers):
            raise ValueError(
                "processes is set and fn is asynchronous or a generator; only a plain function can be sent"
            )
        if processes and concurrency != 1:
            raise ValueError(
                f"concurrency is {concurrency} and processes is set; a process runs one call, take more replicas"
            )
        limits = limits or BATCHER_LIMITS
        given = {"max_batch_size": max_batch_size, "max_wait_ms": max_wait_ms, "token_budget": token_budget}
        chosen = priced_strategy(strategy, call_price_ms)
        knobs = first_knobs({k: v for k, v in given.items() if v is not None}, limits, chosen)
        check_queue(max_queue, knobs, chosen)
        chosen = memory_bounded(chosen, memory_limit_bytes, measure_bytes, processes)
        loop = LoopThread(name or "batcher")
        children = [ProcessWorker(worker) for worker in workers] if processes else []
        functions = [Function(child, collate=collate, begin=child.begin, kill=child.kill) for child in children] or [
            Function(worker, collate=collate, loop=loop) for worker in workers
        ]
        if len({f.streams for f in functions}) > 1:
            raise ValueError("replicas: some stream and some do not; they must be alike")
        core = BatchCore(
            chosen,
            grouping,
            slo=slos_by_class(slo),
            knobs=knobs,
            limits=limits,
            workers=len(functions),
            concurrency=concurrency,
            max_queue=max_queue,
            retries=retries,
        )
        self.name = name or functions[0].name
        self._cost = cost
        self._block = when_full == "block"
        self._streams = functions[0].streams
        self._ids = count(1)
        clock = clock or MonotonicClock()
        self._now = clock.now
        self._owner: weakref.ref[Any] | None = None  # whose method this is

        def close_functions() -> None:
            for child in children:
                child.close()
            loop.close()

        pool = Pool(
            core,
            functions,
            clock,
            concurrency=concurrency,
            isolate=isolate,
            name=self.name,
            measure=measure_bytes,
            close=close_functions,
        )
        super().__init__(pool)
        self._forgotten = weakref.finalize(self, pool.abandon)
        self._forgotten.atexit = False  # the pool sees to that itself

    # -- items ----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        item: Any,
        *,
        priority: int = 0,
        tenant: str = "",
        request_class: str = "default",
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> ItemFuture:
        """Queue ``item``; returns a future, of which streamed outputs can be read one by one.

        Higher ``priority`` goes first under the grouping ``priority``; ``tenant``: whose it is, for the grouping ``fair``.
        ``request_class``: whose SLO it has, that of ``default`` unless there is one by this name. ``deadline_s``, seconds
        from now, stands in for the SLO's; after ``timeout_s`` seconds the item ends, whatever its state. ``request_id`` (1,
        2, … unless given) names it in records and errors.

        Raises ``ValueError`` for a time that is not above 0 and a cost below 0, and :class:`RejectedError`: ``queue_full``
        (where it would have to wait in an event loop, too), ``slo``, ``closed``.
        """
        cost = self._cost_of(item)
        future = self._future(
            self._item(item, cost, priority, tenant, request_class, deadline_s, timeout_s, request_id)
        )
        self._enter(future, block=self._block and not in_event_loop())
        return future

    def _item(
        self,
        payload: Any,
        cost: int,
        priority: int = 0,
        tenant: str = "",
        request_class: str = "default",
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Item:
        now = self._now()
        return Item(
            payload,
            now,
            cost,
            priority,
            tenant,
            UNTIL_SLO if deadline_s is None else now + seconds("deadline_s", deadline_s),
            inf if timeout_s is None else now + seconds("timeout_s", timeout_s),
            request_class,
            next(self._ids) if request_id is None else request_id,
        )

    def _future(self, item: Item) -> ItemFuture:
        future = item.handle = StreamFuture() if self._streams else ItemFuture()
        future.item = item
        future._pool = self._pool
        future._keeps = self if self._owner is None else (self, self._owner())  # until it is done
        return future

    def _enter(self, future: ItemFuture, *, block: bool = False, patient: bool = False) -> None:
        """Queue the item of ``future``, as :meth:`Pool.submit` has it."""
        try:
            self._pool.submit(future.item, block=block, patient=patient)
        except RejectedError:  # neither keeps the other, or its payload, alive: under overload there are many
            future.item.handle = future._keeps = None
            raise

    def _cost_of(self, payload: Any) -> int:
        cost = 1 if self._cost is None else self._cost(payload)
        if type(cost) is int and cost > 0:
            return cost
        return whole_cost(cost)

    def __call__(self, item: Any, **options: Any) -> Any:
        """The result of ``item``; in an event loop something to ``await`` for it. ``options`` are those of :meth:`submit`."""
        return self.acall(item, **options) if in_event_loop() else self.call(item, **options)

    def call(self, item: Any, **options: Any) -> Any:
        """Submit ``item`` and wait for its result; ``options`` are those of :meth:`submit`."""
        if self._pool.here:
            raise RuntimeError(FOR_ITSELF)
        return self.submit(item, **options).result()

    async def acall(self, item: Any, **options: Any) -> Any:
        """Await the result of ``item``, and room in the queue before that. Cancelling the task withdraws the item.

        ``options`` are those of :meth:`submit`.
        """
        if self._pool.here:
            raise RuntimeError(FOR_ITSELF)
        future = self._future(self._item(item, self._cost_of(item), **options))
        self._enter(future, patient=self._block)
        return await future

    def map(
        self,
        items: Iterable[Any],
        *,
        ordered: bool = True,
        progress: bool = False,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Iterator[Any]:
        """The results of ``items``, in their order or (``ordered=False``) as they come; ``options`` as for :meth:`submit`.

        It reads no further ahead than the queue has room, and waits for that whatever ``when_full`` says. There is no deadline
        unless ``deadline_s`` gives one. The first exception is raised, and the rest withdrawn, unless ``return_exceptions``
        puts it in its place (one of the cost function, too). ``progress`` draws a bar on stderr.
        """
        options.setdefault("deadline_s", inf)
        self._item(None, 1, **{**options, "request_id": ""})  # a wrong option is nobody's outcome
        return map_over(
            self._cost_of,
            lambda item, cost: self._future(self._item(item, cost, **options)),
            lambda future: self._enter(future, block=True),
            items,
            self._pool,
            ordered=ordered,
            progress=progress,
            return_exceptions=return_exceptions,
        )

    # -- its settings ---------------------------------------------------------------------------------------------------

    def _change(self, change: Callable[[], T]) -> T:
        return self._pool.change(change)

    def _put_slo(self, request_class: str, slo: SLO | None) -> None:
        self._pool.set_slo(request_class, slo)

    def view(self) -> SchedulerView:
        """How the queue and the calls stand. Raises ``RuntimeError`` in a signal handler that interrupts a call of the batcher,
        EngineClosedError in a process that was forked from its own."""
        return self._pool.view()

    # -- the batcher itself ---------------------------------------------------------------------------------------------

    def close(self, drain: bool = True) -> None:
        """Take nothing more, finish what waits (``drain=False``: cancel it) and wait for the workers. Any number of times.

        From a worker, and from a signal handler that interrupts another call of the batcher, it returns at once.
        """
        self._pool.close(drain)
        self._forgotten.detach()

    async def aclose(self, drain: bool = True) -> None:
        """As :meth:`close`, ``drain`` included, without holding up the event loop."""
        if self._pool.here:
            return self.close(drain)
        await asyncio.to_thread(self.close, drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, at: object) -> None:
        await self.aclose(drain=kind is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Batcher of {self.name}, {'closed' if self.closed else self.strategy.name}>"


def in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None
