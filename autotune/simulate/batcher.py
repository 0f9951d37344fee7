"""The batcher in virtual time: what :class:`runtime.Batcher` is to live traffic, with a price for a call instead of a function.

It runs the live batcher's own core, strategies and groupings; time is a number that moves on in the calls that let it pass
(:meth:`SimulatedBatcher.wait`, ``run`` and ``serve``), all in the caller's thread, and nothing of the host's time gets in.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from autotune.simulate.open_loop import offer_open_loop
from autotune.simulate.virtual_pool import VirtualPool
from autotune.workload import Arrival, ReplayReport, prompt_ids
from runtime.batching.accounts import call_record
from runtime.batching.core import BatchCore
from runtime.batching.groupings import Grouping
from runtime.batching.item import Call, Ended, Item
from runtime.batching.strategies import Strategy, strategy_of
from runtime.batching.tuning import TunableBatcher
from runtime.clock import VirtualClock
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, RequestRecord
from runtime.shared.listeners import Listeners
from runtime.slo import SLO
from runtime.tunable import Capabilities, Facts

_ASK_EVERY = 256  # events between two questions whether to stop


@lru_cache(maxsize=1 << 15)
def _input_of(arrival: Arrival, inputs: int, prompt_seed: int) -> int:
    """Which input ``arrival`` is for. Kept: settings are compared under the same arrivals."""
    return prompt_ids(arrival, inputs, prompt_seed)[0]


@dataclass
class _Tuned:
    """What :class:`TunableBatcher` needs of a pool."""

    core: BatchCore
    clock: VirtualClock
    listeners: Listeners = field(default_factory=Listeners)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    woken: bool = True
    """Whether something has changed, so that the strategy may decide otherwise."""

    def wake(self) -> None:
        self.woken = True


class SimulatedItem:
    """What :meth:`SimulatedBatcher.submit` returns."""

    __slots__ = ("_batcher", "_item")

    def __init__(self, batcher: SimulatedBatcher, item: Item) -> None:
        self._batcher = batcher
        self._item = item

    def cancel(self) -> bool:
        """Withdraw it. False if it is in a call, which nothing stops, or has ended."""
        return self._batcher.withdraw(self._item)


class SimulatedBatcher(TunableBatcher):
    """Serves items in virtual time: ``service`` says what a call that runs alone takes, in seconds.

    ``costs``: of the inputs; a prompt's first number says which of them comes. ``strategy``, ``grouping``, ``slo`` (one, or one
    for each class), ``knobs`` and ``limits`` are those of :class:`runtime.Batcher`, ``workers`` its replicas.
    ``slowdown``: how many times as long a call takes while so many run. ``failure``: why the function fails for an item, empty
    where it does not. Not to be shared between threads, but for turning knobs.

    Raises ``ValueError`` for arguments out of bounds.
    """

    def __init__(
        self,
        service: Callable[[Call], float],
        costs: Sequence[int],
        *,
        strategy: str | Strategy = "adaptive",
        grouping: str | Grouping = "arrival",
        slo: SLO | Mapping[str, SLO] | None = None,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        workers: int = 1,
        slowdown: Callable[[int], float] | None = None,
        failure: Callable[[Item], str] | None = None,
    ) -> None:
        if not costs:
            raise ValueError("costs is empty; at least one input is needed")
        core = BatchCore(strategy_of(strategy), grouping, slo=slo, knobs=knobs, limits=limits, workers=workers)
        self._calls = VirtualPool(core, service, self._tell, slowdown=slowdown, failure=failure)
        self._tuned = _Tuned(core, self._calls.clock)
        super().__init__(self._tuned)
        self._core, self._virtual = core, self._calls.clock
        self._costs = costs
        self._turns, self._numbers = itertools.count(), itertools.count(1)
        self._running = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the live batcher, in virtual time."""
        return replace(super().capabilities, virtual_time=True)

    @property
    def facts(self) -> Facts:
        return replace(super().facts, engine="simulation")

    # -- items ----------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: object = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> SimulatedItem:
        """Queue now the input that ``prompt``'s first number picks, or, if it is empty, the next one; ``params`` say nothing.

        Raises RejectedError: ``queue_full``, ``slo`` by the strategy's choice, ``closed``. Listeners hear of it.
        """
        del params
        index = prompt[0] if prompt else next(self._turns)
        item = Item(
            None,
            self._virtual.now(),
            self._costs[index % len(self._costs)],
            tenant=tenant,
            request_class=request_class,
            id=f"#{next(self._numbers)}" if request_id is None else request_id,
        )
        self._add(item)
        return SimulatedItem(self, item)

    def withdraw(self, item: Item) -> bool:
        """End ``item``, by its client's wish. False if it does not wait."""
        if not self._core.forget(item):
            return False
        self._calls.end([Ended(item, FinishReason.CANCELLED, "by the client")])
        return True

    def cancel_all(self, reason: FinishReason = FinishReason.CANCELLED, cause: str = "by the client") -> int:
        """End everything that waits, by its client's wish unless ``reason`` and ``cause`` say otherwise, and finish the calls
        that run, which nothing stops; returns how many waited."""
        ended = self._core.drop_waiting(cause, reason)
        self._calls.end(ended)
        self.run()
        return len(ended)

    @property
    def closed(self) -> bool:
        return self._tuned.closed

    def close(self, drain: bool = True) -> None:
        """Accept nothing more; serve what was accepted to its end (``drain=False``: cancel what waits). Any number of times.

        From a listener it returns at once, and the run that told the listener goes on to the end.
        """
        self._tuned.closed = self._core.state.closing = True
        self._tuned.wake()
        if not drain:
            self._calls.end(self._core.drop_waiting("the batcher was closed", FinishReason.ERROR))
        if not self._running:
            self.run()

    # -- time -----------------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let ``seconds`` pass, with what happens in them."""
        until = self._virtual.now() + seconds
        self.run(until)
        self._calls.advance(max(until, self._virtual.now()))

    def run(self, until: float = inf, *, stop: Callable[[], bool] | None = None) -> bool:
        """Run calls until nothing is left but what the strategy leaves waiting for more, or until that time. False if ``stop``
        ended it before."""
        core, calls, clock = self._core, self._calls, self._virtual
        countdown = 0
        self._running = True
        try:
            calls.begin_calls(ask=self._must_ask())
            while (now := clock.now()) < until:
                if stop is not None:
                    countdown -= 1
                    if countdown < 0:
                        if stop():
                            return False
                        countdown = _ASK_EVERY
                due = calls.due
                if due == inf:
                    break
                calls.advance(min(max(due, now), until))
                ended = calls.end_calls()
                calls.begin_calls(ask=self._must_ask() or ended or core.hold_until <= clock.now())
        finally:
            self._running = False
        return True

    def serve(
        self,
        arrivals: Iterable[Arrival],
        *,
        start: float | None = None,
        label: str = "r",
        prompt_seed: int = 0,
        shared: bool | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> ReplayReport:
        """Offer each of ``arrivals`` at ``start`` (now, unless given) + its time, open-loop, and return after the last.

        Item i is called ``<label>-<i>``; which input it is follows from ``prompt_seed``. ``shared`` says nothing: inputs have no
        prefixes. What is rejected goes to listeners alone. ``stop`` ends it early.
        """
        del shared

        def offer(number: int, arrival: Arrival, due: float) -> None:
            cost = self._costs[_input_of(arrival, len(self._costs), prompt_seed)]
            name = f"{label}-{number}"
            with suppress(RejectedError):
                self._add(Item(None, due, cost, tenant=arrival.tenant, request_class=arrival.request_class, id=name))

        return offer_open_loop(arrivals, self._virtual, self.run, offer, start=start, stop=stop)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _add(self, item: Item) -> None:
        try:
            if self._tuned.closed:
                raise RejectedError(f"item {item.id}: the batcher is closed", reason="closed", retry_after_s=None)
            self._calls.submit(item)
        except RejectedError as error:
            self._calls.reject(item, error)
            raise

    def _must_ask(self) -> bool:
        """Whether to ask the strategy, whatever waits."""
        woken, self._tuned.woken = self._tuned.woken, False
        return woken or self._core.state.closing

    def _tell(self, call: Call | None, records: list[RequestRecord]) -> None:
        if call is None:
            self._tuned.listeners.tell(None, records)
            return
        running = sum(len(other.items) for other in self._core.state.running)
        self._tuned.listeners.tell(call_record(call, running), records)
