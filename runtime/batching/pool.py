"""The threads of a batcher: each takes the next call from the core, runs it, and hands out what came of it.

One lock guards the core; it is held for microseconds and never while the function runs. A thread with nothing to do waits at
its own gate until an arrival, the end of another call or the time that the strategy named. A thread that dies in the
middle of a call is replaced, and the items of that call run once more.

A signal handler or a finalizer may interrupt the very thread that holds the lock, in the middle of a change. What it asks for
is then put off until that thread has released the lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, TypeVar

from runtime.batching.accounts import item_record
from runtime.batching.backpressure import Backpressure
from runtime.batching.calls import Calls
from runtime.batching.core import BatchCore
from runtime.batching.invoke import Function
from runtime.batching.item import ENDED, NEW, Ended, Item
from runtime.batching.outcomes import end_early, refuse, withdraw
from runtime.clock import Clock
from runtime.errors import EngineClosedError, RejectedError, StepFailedError
from runtime.records import FinishReason, RequestRecord
from runtime.shared.at_exit import stop_at_exit
from runtime.shared.expiries import Expiries
from runtime.shared.listeners import Listeners
from runtime.slo import SLO
from runtime.tunable import SchedulerView

if TYPE_CHECKING:
    from runtime.batching.future import ItemFuture

log = logging.getLogger(__name__)
T = TypeVar("T")

_DROP_S: Final = 0.05  # that a finalizer waits for the lock, whose thread may wait for the one that it interrupts
KILL_AFTER_S: Final = 5.0  # how long a close that does not drain waits for a call in a process


class Pool:
    """See the module. Public methods may be called from any thread."""

    def __init__(
        self,
        core: BatchCore,
        functions: Sequence[Function],
        clock: Clock,
        *,
        concurrency: int,
        isolate: bool,
        name: str,
        measure: Callable[[], int] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self.lock = threading.RLock()  # a signal handler or a finalizer may come to it again: see holds_up
        self._held = threading.Condition(self.lock)
        self._within = False  # whether a thread is in a change under the lock; stays True where that raised
        self.listeners = Listeners()
        self._closed = False
        self.process = os.getpid()
        self.clock = clock
        self._now = clock.now
        self._calls = Calls(core, self.lock, self.listeners, clock.now, self.wake, isolate=isolate, measure=measure)
        self._close = close
        self._close_lock = threading.RLock()
        self._functions_closed = False
        self._functions = functions
        self._streams = functions[0].streams
        self._idle: dict[Slot, None] = {}
        self._untold: deque[Ended | tuple[Item, Exception]] = deque()  # ended without a result, or refused
        self._backpressure = Backpressure(self.lock, core, self._untold.append)
        self._timekeeper = Timekeeper(self.lock, core.expiries, clock.now, self._tick)
        self._alive = 0
        self._put_off: deque[Callable[[], object]] = deque()  # to be called by whoever held the lock
        self._catching_up: set[int] = set()  # the threads that do so
        self._abandoned = False
        self._broken = ""  # why, if so
        self._slots = [
            Slot(worker, function, f"batcher {name} {worker}.{i}")
            for worker, function in enumerate(functions)
            for i in range(concurrency)
        ]
        stop_at_exit(self)
        try:
            with self.lock:
                for slot in self._slots:
                    self._start(slot)
        except BaseException:
            self.abandon()  # those that have been started end
            raise

    def _start(self, slot: Slot) -> None:
        """Needs the lock, which is what the new thread takes first. Raises ``RuntimeError`` where no thread can be started."""
        thread = threading.Thread(target=self._run, args=(slot,), name=slot.name, daemon=True)
        thread.start()
        slot.thread = thread
        self._alive += 1

    # -- from any thread ------------------------------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """Whether the caller is a thread of the pool, or in the loop of its function: these must not wait for themselves."""
        me = threading.current_thread()
        return any(slot.thread is me or slot.function.runs_in(me) for slot in self._slots)

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more; in a process that was forked from its own, too."""
        return self._closed or self._elsewhere

    @property
    def holds_up(self) -> bool:
        """Whether the caller is a signal handler or a finalizer that interrupts this very thread in a change under the lock."""
        return self._within and self._holds

    @property
    def _holds(self) -> bool:
        """Whether this thread holds the lock. For those who cannot rely on ``_within``."""
        try:
            self._held.notify(0)
        except RuntimeError:
            return False
        return True

    def may_wait(self) -> None:
        """Raise ``RuntimeError`` where the pool waits for the caller (:attr:`holds_up`), and EngineClosedError in another
        process, where nothing comes."""
        self._check_process()
        if self.holds_up:
            raise RuntimeError("a signal handler that interrupts a call of the batcher cannot wait for it")

    def submit(self, item: Item, *, block: bool = False, patient: bool = False) -> None:
        """Queue ``item``. Where the queue is full this raises :class:`RejectedError`, waits for a place (``block``), or has the
        item stand in line for one (``patient``). Where it is put off, the item's future gets what it would raise."""
        self._check_process()
        if self.holds_up:
            self._put_off.append(partial(self._submit_late, item, block or patient))
            return
        try:
            with self.lock:
                self._within = True
                try:
                    self._take_in(item, block, patient)
                except BaseException:  # before anybody else sees it half in
                    self._backpressure.leave(item)
                    self.core.take_back(item)
                    raise
                self._within = False
        except Exception as error:
            self._record_refusal(item, error)
            raise
        except BaseException:  # such as Ctrl-C, while it stood in line
            with self.lock:
                self._within = True
                self._places_freed([])
                self._within = False
            self._tell_ended()
            raise
        finally:
            if self._put_off:
                self._catch_up()

    def _submit_late(self, item: Item, patient: bool) -> None:
        try:
            self.submit(item, patient=patient)
        except Exception as error:
            refuse(item, error)
        except BaseException as error:
            if item.state is ENDED and not item.tries:  # taken back
                interrupted = StepFailedError(f"item {item.id}: its submit was interrupted by {error!r}")
                interrupted.__cause__ = error
                refuse(item, interrupted)
            raise

    def _take_in(self, item: Item, block: bool, patient: bool) -> None:
        if item.state is not NEW:  # it was put off, and has ended in the meantime
            return
        if self._closed:
            raise RejectedError(f"item {item.id}: {self._closed_because}", reason="closed")
        held = (block or patient) and not self._backpressure.admits
        if held and block and self.here:  # it would wait for itself
            held = False
        if held:
            self._backpressure.join(item)
        else:
            self.core.submit(item, item.arrival)
            if self._idle:
                self._arrived()
        if item.expires < inf:
            if held:
                self.core.expiries.add(item, item.expires)
            self._timekeeper.watch(item.expires)
        if held and block:
            self._backpressure.wait(item)

    @property
    def _closed_because(self) -> str:
        return f"the batcher is closed{self._broken}"

    def _record_refusal(self, item: Item, error: Exception) -> None:
        if isinstance(error, RejectedError) and self.listeners.known:  # an offered item that missed its SLO
            record = item_record(item, FinishReason.REJECTED, self._now(), -1, error.reason)
            self.listeners.tell(None, [record])

    @property
    def _elsewhere(self) -> bool:
        """Whether this process was forked from the one that made it: the threads stayed there, and one may hold the lock."""
        return os.getpid() != self.process

    def _check_process(self) -> None:
        if self._elsewhere:
            raise EngineClosedError(
                f"the batcher was made in process {self.process}, before this one was forked; make it here"
            )

    def withdraw(self, item: Item) -> bool:
        """End ``item``, by its client's wish. False if it neither waits nor, with outputs that come one by one, runs, and where
        it is put off."""
        if self._elsewhere:
            return False
        if self.holds_up:
            if item.handle is not None:
                self._put_off.append(item.handle.cancel)
            return False
        gone = False
        try:
            with self.lock:
                self._within = True
                lives = item.state is not ENDED
                try:
                    _ = self.core.forget(item) or (self._streams and self.core.leave(item))
                finally:
                    gone = lives and item.state is ENDED  # also where Ctrl-C comes in between
                if gone:
                    self._places_freed([item])
                    if self.core.fault is not None:
                        self.wake()
                self._within = False
        finally:
            if gone:
                withdraw(item)
            if self._put_off:
                self._catch_up()
        self._tell_ended()
        if gone and self.listeners.known:
            self.listeners.tell(
                None, [item_record(item, FinishReason.CANCELLED, self._now(), self.core.epoch, "by the client")]
            )
        return gone

    def drop(self, futures: Iterable[ItemFuture]) -> None:
        """Withdraw the items of ``futures``, which nobody waits for any more. For finalizers, which may run in the middle of
        anything, such as a thread that holds the lock: that one then sees to it."""
        self._put_off.extend(future.cancel for future in futures)
        if self._put_off and not self._holds and self.lock.acquire(timeout=_DROP_S):
            self.lock.release()
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what has been put off. Not under the lock."""
        me = threading.get_ident()
        if me in self._catching_up:  # one of those that it calls
            return
        try:
            self._catching_up.add(me)
            while self._put_off:
                try:
                    late = self._put_off.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    late()
                except Exception:  # no business of the one that it is called by
                    log.exception("what a signal handler or a finalizer had asked of the batcher failed")
        finally:
            self._catching_up.discard(me)

    def locked(self, question: Callable[[], T]) -> T:
        """Answer ``question`` under the lock. Raises what :meth:`may_wait` does."""
        self.may_wait()
        try:
            with self.lock:
                self._within = True
                answer = question()
                self._within = False
            return answer
        finally:
            if self._put_off:
                self._catch_up()

    def change(self, change: Callable[[], T]) -> T:
        """Make ``change`` of the settings at once, on an open batcher, and have idle threads look at what follows. Raises
        EngineClosedError."""
        self._check_process()
        if self._closed:
            raise EngineClosedError("the batcher is closed")
        if self.holds_up:  # settings may be changed from anywhere, the rest may not
            result = change()
            self._put_off.append(partial(self.locked, self.wake))
            return result

        def beside_no_other() -> T:
            if self._closed:
                raise EngineClosedError("the batcher is closed")
            result = change()
            self.wake()
            return result

        return self.locked(beside_no_other)

    def set_slo(self, request_class: str, slo: SLO | None) -> None:
        """As :meth:`BatchCore.set_slo`. Raises EngineClosedError in another process."""
        self._check_process()
        change = partial(self.locked, partial(self.core.set_slo, request_class, slo))
        if self.holds_up:
            self._put_off.append(change)
        else:
            change()

    def view(self) -> SchedulerView:
        """As :meth:`BatchCore.view`. Raises what :meth:`may_wait` does."""
        return self.locked(lambda: self.core.view(self._now()))

    def close(self, drain: bool) -> None:
        """Take nothing more; finish (``drain``) or cancel what waits; wait for the threads to end, unless they wait for the
        caller."""
        if self._elsewhere:
            return
        waits = not self.here and not self.holds_up
        self.stop(drain)
        if not waits:
            self._abandoned = True  # the last thread closes the functions
            return
        kill_at = inf if drain else time.monotonic() + KILL_AFTER_S
        for slot in self._slots:
            while slot.thread is not None and slot.thread.is_alive():
                if slot.function.kill is None or drain:
                    slot.thread.join()
                    continue
                slot.thread.join(max(0.01, kill_at - time.monotonic()))
                if time.monotonic() >= kill_at:
                    slot.function.kill()
        self._timekeeper.join()
        self._close_functions()

    def _close_functions(self) -> None:
        """Once, whoever comes first; any other waits for that."""
        with self._close_lock:
            if not self._functions_closed:
                self._functions_closed = True
                self._close()

    def join(self, timeout: float) -> None:
        """Wait for the threads that call the function to end, so long at most all together."""
        if self._abandoned and not self._closed:  # somebody held the lock then
            self.stop(drain=False)
        until = time.monotonic() + timeout
        for thread in self.threads():
            thread.join(max(0.0, until - time.monotonic()))

    def threads(self) -> list[threading.Thread]:
        """Those that call the function."""
        return [slot.thread for slot in self._slots if slot.thread is not None]

    def abandon(self) -> None:
        """Nobody knows the batcher any more: cancel what there is. For finalizers, which may run in the middle of anything,
        such as a worker that holds the lock: that one then looks after it."""
        self._abandoned = True
        if not self._holds and self.lock.acquire(blocking=False):
            self.lock.release()
            self.stop(drain=False)
            if not (self._alive or self._elsewhere or self.here):  # no thread is left that would
                self._close_functions()

    def stop(self, drain: bool) -> None:
        """As :meth:`close`, without waiting. Where Ctrl-C interrupts it, it is put off."""
        if self._elsewhere:
            return
        if self.holds_up:
            self._closed = True
            self._put_off.append(partial(self.stop, drain))
            return
        try:
            with self.lock:
                self._within = self._closed = True
                self.core.state.closing = True
                self.wake()  # first: whoever comes does what is left where this is interrupted
                self._timekeeper.look()
                if not drain:
                    self.core.retries = 0
                    reason = FinishReason.CANCELLED if self._abandoned else FinishReason.ERROR
                    self.core.drop_into(self._untold.append, "the batcher was closed", reason, cut=True)
                self._backpressure.refuse(self._closed_because)
                self._within = False
        except BaseException as error:
            if not isinstance(error, Exception):
                self._put_off.append(partial(self.stop, drain))
            raise
        finally:
            if self._put_off:
                self._catch_up()
        self._tell_ended()

    def wake(self) -> None:
        """Have idle threads ask the core again: something has changed. Needs the lock."""
        for slot in self._idle:
            slot.open()
        self._idle.clear()

    # -- under the lock -------------------------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """Something waits and somebody is idle: wake one, unless the strategy holds out for more."""
        core, state = self.core, self.core.state
        if state.waiting < core.hold_items and state.waiting_cost < core.knobs.token_budget and state.free_places > 0:
            return
        idle, loads = self._idle, core.loads
        slot = next(iter(idle)) if len(idle) == 1 else min(idle, key=lambda slot: loads[slot.worker])
        slot.open()  # first: Ctrl-C may come in between
        del idle[slot]

    def _places_freed(self, ended: Iterable[Item]) -> None:
        """``ended`` have, or a call took items from the queue: its places go to those in line."""
        for item in ended:
            self._backpressure.leave(item)
        if self._backpressure.fill(self._now()) and self._idle:
            self._arrived()

    def _tick(self) -> bool:
        with self.lock:
            self._within = True
            ended = self.core.expire(self._now())
            self._untold += ended
            if ended:
                self._places_freed(each.item for each in ended)
                if self.core.fault is not None:
                    self.wake()
            over = self._closed and not self._alive
            self._within = False
        if self._put_off:
            self._catch_up()
        if self._abandoned and not self._closed:
            self.stop(drain=False)
        self._tell_ended()
        return not over

    # -- the workers ----------------------------------------------------------------------------------------------------

    def _run(self, slot: Slot) -> None:
        core = self.core
        try:
            while True:
                with self.lock:
                    self._within = True
                    self._idle.pop(slot, None)  # where Ctrl-C interrupted whoever opened its gate
                    step = core.next(self._now(), slot.worker)
                    fault = None if self._broken else core.fault
                    over = self._closed and not core.has_work and fault is None
                    if over:
                        self.wake()
                    elif step.call is None and fault is None:
                        self._idle[slot] = None
                    elif self._idle and core.state.waiting:
                        self._arrived()
                    self._untold += step.ended
                    self._places_freed(each.item for each in step.ended)
                    if step.call is not None:
                        slot.function.begin()
                    self._within = False
                if self._put_off:
                    self._catch_up()
                if self._abandoned and not self._closed:
                    self.stop(drain=False)
                if self._untold:
                    self._tell_ended()
                if over:
                    return
                if fault is not None:
                    self._break_down(fault)
                elif step.call is None:
                    slot.rest(step.wake_at, self._now, self.lock, self._idle)
                elif not self._calls.run(slot.function, step.call):
                    with self.lock:
                        self._start(slot)
                    return
        except BaseException as error:  # what nobody foresaw: still, every item is to have an outcome
            self._break_down(error)
        finally:
            with self.lock:
                self._alive -= 1
                last = not self._alive
                self._timekeeper.look()
            if last and self._abandoned:  # nobody will close them
                self._close_functions()

    def _break_down(self, error: BaseException) -> None:
        """The strategy or the grouping raised: calls that run end as they will, everything else ends now."""
        log.error("the batcher breaks down: %r", error, exc_info=error)
        with self.lock:
            self._broken = f", for its strategy or grouping raised {error!r}"
            self.core.fault = self.core.fault or error
            self._closed = self.core.state.closing = True
            self.core.drop_into(self._untold.append, f"the batcher broke down: {error!r}", FinishReason.ERROR)
            self._backpressure.refuse(self._closed_because)
        self.stop(drain=True)
        self._tell_ended()

    def _tell_ended(self) -> None:
        """Tell those whose items ended without a result, or were not let in; also what somebody else left who was interrupted.
        Not under the lock."""
        records: list[RequestRecord] = []
        try:
            while self._untold:
                try:
                    each = self._untold.popleft()
                except IndexError:  # another thread was faster
                    break
                self._tell(each, records)
            if records:
                self._kill_unwanted()
        finally:
            if records and self.listeners.known:
                self.listeners.tell(None, records)

    def _tell(self, each: Ended | tuple[Item, Exception], records: list[RequestRecord]) -> None:
        item = each[0]
        future = item.handle
        if future is None:  # it was noted twice
            return
        try:
            if isinstance(each, Ended):
                records.append(end_early(each, self._now(), self.core.epoch))
            else:
                refuse(*each)
                self._record_refusal(*each)
        except BaseException:
            if not future.done():  # Ctrl-C
                item.handle = future
                self._untold.appendleft(each)
            raise

    def _kill_unwanted(self) -> None:
        """End the calls in processes for which nobody waits. Under the lock, so that none of them gives way to another call."""
        with self.lock:
            self._within = True
            for call in self.core.state.running:
                if (kill := self._functions[call.worker].kill) and all(item.state is ENDED for item in call.items):
                    kill()
            self._within = False
        if self._put_off:
            self._catch_up()


class Slot:
    """One thread: a place in which one call at a time can run.

    With nothing to do it stands in ``idle`` and waits at its ``gate``, which whoever has news for it opens.
    """

    __slots__ = ("function", "gate", "name", "thread", "worker")

    def __init__(self, worker: int, function: Function, name: str) -> None:
        self.worker = worker
        self.function = function
        self.name = name
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: threading.Thread | None = None

    def open(self) -> None:
        """Have its thread go on. Needs the lock; once too often does no harm."""
        if self.gate.locked():
            self.gate.release()

    def rest(self, until: float, now: Callable[[], float], lock: threading.RLock, idle: dict[Slot, None]) -> None:
        """Wait until the gate is opened, or until then."""
        timeout = -1.0 if until == inf else min(max(0.0, until - now()), threading.TIMEOUT_MAX)
        if self.gate.acquire(timeout=timeout):
            return
        with lock:
            if self in idle:
                del idle[self]
                return
        self.gate.acquire()  # it was opened in that very moment


class Timekeeper:
    """Sees to it that items time out in time, even if every worker is busy.

    A thread, from the first item that may time out. ``tick`` ends what is due and says whether to go on; it is called at once
    whenever there may be something to do, without the lock.
    """

    def __init__(
        self, lock: threading.RLock, expiries: Expiries[Item], now: Callable[[], float], tick: Callable[[], bool]
    ) -> None:
        self._expiries = expiries
        self._now = now
        self._tick = tick
        self._sooner = threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._looked = 0  # how often it was asked to look; so that nothing is missed while it ticks

    def watch(self, expiry: float) -> None:
        """Something expires then. Needs the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="batcher timekeeper", daemon=True)
            thread.start()
            self._thread = thread
        elif expiry <= self._expiries.next:
            self.look()

    def look(self) -> None:
        """Tick now. Needs the lock."""
        self._looked += 1
        self._sooner.notify_all()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        seen = -1
        while True:
            with self._sooner:
                if seen == self._looked:
                    until = self._expiries.next
                    wait = None if until == inf else min(max(0.0, until - self._now()), threading.TIMEOUT_MAX)
                    self._sooner.wait(wait)
                seen = self._looked
            if not self._tick():
                return
