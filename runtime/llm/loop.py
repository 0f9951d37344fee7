"""The engine's thread: it owns the core, takes what other threads ask for between steps, and delivers what steps yield.

Others never touch the core's state. They put calls into the inbox, a ``SimpleQueue``: putting takes no Python lock, so it
is safe in finalizers too, and it is what wakes the thread when it has nothing to run. The thread itself waits in one place
(:meth:`EngineLoop._take`), until a call comes or the time the scheduler named.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TypeVar

from runtime.clock import Clock
from runtime.errors import DeviceError, EngineClosedError, RejectedError, StepFailedError
from runtime.llm.buffer import TokenBuffer
from runtime.llm.core import Core, StepOutcome
from runtime.llm.intake import never_ran
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import Token
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, Sequence
from runtime.shared.at_exit import stop_at_exit
from runtime.shared.listeners import CompletionInterval, Listeners
from runtime.shared.wakeups import Wakeups

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineLoop:
    """Runs ``core`` until closed. Public methods may be called from any thread unless they say otherwise."""

    def __init__(self, core: Core, output: OutputProcessor, clock: Clock, *, max_queue: int, name: str) -> None:
        self.core = core
        self.process = os.getpid()
        self.listeners = Listeners()
        self._completion_interval = CompletionInterval()
        self.listeners.subscribe(self._completion_interval)
        self.error: BaseException | None = None
        self._output = output
        self._clock = clock
        self._max_queue = max_queue
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Guards the next three; held for microseconds, never across a step. A signal handler may come to it again.
        self._lock = threading.RLock()
        self._held = threading.Condition(self._lock)
        self._closed = False
        self._live: dict[str, TokenBuffer] = {}
        self._on_the_way = 0  # accepted, still in the inbox
        self._buffers: dict[Sequence, TokenBuffer] = {}  # from here on the engine's thread's own
        self._wakes: Wakeups[TokenBuffer] = Wakeups()
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        stop_at_exit(self)
        self._thread.start()

    # -- from any thread ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed or self._elsewhere

    @property
    def _elsewhere(self) -> bool:
        """Whether this process was forked from the one that made it: the thread stayed there, and may hold the lock."""
        return os.getpid() != self.process

    @property
    def here(self) -> bool:
        """Whether the caller is the engine's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def holds_up(self) -> bool:
        """Whether the caller is a signal handler that interrupts another of these methods, so that the thread cannot go on
        before the handler has returned."""
        try:
            self._held.notify(0)
        except RuntimeError:  # this thread does not hold the lock
            return False
        return True

    def may_wait(self) -> None:
        """Raise ``RuntimeError`` in the engine's own thread, which would wait for itself, and where the engine waits for the
        caller (:attr:`holds_up`); EngineClosedError in another process, where nothing comes."""
        self._check_process()
        if self.here:
            raise RuntimeError("a listener or step policy runs in the engine's thread and cannot wait for its tokens")
        if self.holds_up:
            raise RuntimeError("a signal handler that interrupts a call of the engine cannot wait for it")

    def submit(self, request: Request, buffer: TokenBuffer) -> None:
        """Queue ``request``. Raises RejectedError (queue full, closed), ``ValueError`` if its id is in use, or
        EngineClosedError in another process."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise self._rejected(request, "closed", self._why_closed(), None) from self.error
            if request.id in self._live:
                raise ValueError(f"request_id is {request.id!r}, which another live request has; it must be its own")
            waiting = self._on_the_way + len(self.core.waiting)
            if waiting >= self._max_queue:
                why = f"{waiting} requests are waiting and max_queue is {self._max_queue}"
                raise self._rejected(request, "queue_full", why, self._completion_interval.seconds)
            add = partial(self._add, request, buffer)
            self._on_the_way += 1  # no call before the next one has been made, and so no Ctrl-C
            self._inbox.put(add)  # before the next: who cancels it comes behind it
            self._live[request.id] = buffer  # unless Ctrl-C comes before it

    def cancel(self, request_id: str) -> bool:
        """End a request, whatever its state. False if no live request of this process has this id."""
        buffer = None if self._elsewhere else self._live.get(request_id)
        if buffer is None:
            return False
        self.cancel_buffer(buffer)
        return True

    def cancel_buffer(
        self, buffer: TokenBuffer, reason: FinishReason = FinishReason.CANCELLED, cause: str = "by the client"
    ) -> None:
        """As :meth:`cancel`; takes no lock, so that a finalizer may call it."""
        self._inbox.put(partial(self._end_early, buffer, reason, cause))

    def locked(self, change: Callable[[], T]) -> T:
        """Make ``change`` under the lock at once, on an open engine, and have the thread look at its consequences."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise EngineClosedError(self._why_closed()) from self.error
            result = change()
            self._inbox.put(lambda: None)  # only to wake the thread
        return result

    def post(self, change: Callable[[], object]) -> None:
        """Have the thread make ``change`` between two steps, without waiting for it. Raises EngineClosedError."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise EngineClosedError(self._why_closed()) from self.error
            self._inbox.put(partial(_contained, change))

    def ask(self, question: Callable[[], T]) -> T:
        """Answer ``question`` on the engine's thread, between steps; after the end of the thread, at once. Raises
        EngineClosedError in another process, and ``RuntimeError`` where the thread waits for the caller."""
        self._check_process()
        if self.here:
            return question()
        self.may_wait()
        answer: Future[T] = Future()
        with self._lock:
            ended = self._over
            if not ended:
                self._inbox.put(partial(_answer, question, answer))
        return question() if ended else answer.result()

    def close(self, drain: bool) -> None:
        """Accept nothing more; finish (``drain``) or cancel what there is; wait for the thread to end, unless that waits for the
        caller."""
        if self._elsewhere:
            return
        waits = not self.here and not self.holds_up
        with self._lock:
            self._closed = True
            self._inbox.put(partial(self._close, drain))
        if waits:
            self._thread.join()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, so long at most."""
        self._thread.join(timeout)

    def abandon(self) -> None:
        """Close without waiting, cancelling what there is. Takes no lock, so that a finalizer may call it."""
        self._inbox.put(self._abandoned)

    def _check_process(self) -> None:
        if self._elsewhere:
            why = f"the engine was made in process {self.process}, before this one was forked; make it here"
            raise EngineClosedError(why)

    def _why_closed(self) -> str:
        return "the engine is closed" if self.error is None else f"the engine stopped: {_described(self.error)}"

    def _rejected(self, request: Request, reason: str, why: str, retry_after: float | None) -> RejectedError:
        """Needs the lock. The rejection is recorded as well: it is an offered request that missed its SLO."""
        if not self._over:
            record = never_ran(request, FinishReason.REJECTED, self._clock.now(), reason, retry_after)
            self._inbox.put(partial(self.listeners.tell, None, [record]))
        return RejectedError(f"request {request.id}: {why}", reason=reason, retry_after_s=retry_after)

    # -- the engine's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            wake = inf
            while True:
                self._take(wake)
                if self._closing and not self.core.has_work:
                    break
                outcome = self.core.step(self._clock.now())
                self._deliver(outcome)
                over = self._closing and not self.core.has_work  # nothing will wake it
                more = outcome.record is not None or over
                wake = -inf if more else min(outcome.wake_at, self.core.next_expiry)
        except DeviceError as raised:
            log.critical("the engine closes: %s", raised)
            error = raised
        except BaseException as raised:  # whatever it is, nobody may be left waiting
            log.critical("the engine's thread died", exc_info=True)
            error = raised
        finally:
            self._finish_off(error)

    def _take(self, wake: float) -> None:
        """Make the calls that have come in. With nothing to run before ``wake``, wait for one until then."""
        inbox = self._inbox
        if wake > -inf:
            wait = None if wake == inf else min(max(0.0, wake - self._clock.now()), threading.TIMEOUT_MAX)
            try:
                inbox.get(timeout=wait)()
            except Empty:
                return
        for _ in range(inbox.qsize()):
            inbox.get()()
        self._send_wakes([])

    def _deliver(self, outcome: StepOutcome) -> None:
        ended = dict(outcome.finished)
        last: dict[Sequence, Token] = {}
        causes: dict[Sequence, BaseException] = {}
        lost: list[TokenBuffer] = []
        if outcome.result is not None:
            for token in outcome.result.tokens:
                ready: Token | None = token
                if token.sequence in ended:  # the last one comes with the end
                    ready, last[token.sequence] = last.get(token.sequence), token
                if ready is None:
                    continue
                buffer = self._buffers[ready.sequence]
                buffer.put(ready, self._wakes)
                lost += [buffer] if buffer.lost else []
            causes = dict(outcome.result.failed) | self._output.failures
        for sequence, record in ended.items():
            readable = sequence not in causes  # else the tokenizer may have failed on the last one
            self._ended(sequence, record, causes.get(sequence), last.get(sequence) if readable else None)
        self._send_wakes(lost)
        self.listeners.tell(outcome.record, list(ended.values()))

    def _send_wakes(self, lost: list[TokenBuffer]) -> None:
        lost += self._wakes.send()
        while lost:
            buffer = lost.pop()
            if buffer.lost:
                self._end_early(buffer, FinishReason.CANCELLED, "its event loop was closed")
            lost += self._wakes.send()  # its end may have woken others

    def _add(self, request: Request, buffer: TokenBuffer) -> None:
        with self._lock:  # so that submit counts the request once: on the way or waiting
            self._on_the_way -= 1
            if self._over and self.error is not None:
                buffer.end(None, None, self.error, self._wakes)
                return
            now = self._clock.now()
            try:
                if self._closing:  # in the middle of its submit, by a signal handler
                    raise RejectedError(f"request {request.id}: {self._why_closed()}", reason="closed")
                sequence = self.core.add(request, now)
            except Exception as error:  # the scheduler has the last word on what can run, and in time
                self._forget(buffer)
                reason, cause, hint = FinishReason.REJECTED, str(error), None
                if isinstance(error, RejectedError):
                    cause, hint = error.reason, error.retry_after_s
                elif not isinstance(error, ValueError):  # a custom ordering, or whoever says how fast prompts are
                    log.warning("request %s could not be queued", request.id, exc_info=True)
                    reason, cause = (
                        FinishReason.ERROR,
                        str(error) if isinstance(error, StepFailedError) else repr(error),
                    )
                record = never_ran(request, reason, now, cause, hint)
                buffer.end(None, record, error.__cause__ if isinstance(error, StepFailedError) else error, self._wakes)
                self._inbox.put(partial(self.listeners.tell, None, [record]))
                return
        buffer.sequence = sequence
        self._buffers[sequence] = buffer
        if request.params.stop:
            self._output.attach(sequence, buffer.text)

    def _end_early(
        self, buffer: TokenBuffer, reason: FinishReason, cause: str, error: EngineClosedError | None = None
    ) -> None:
        """End the request of ``buffer`` from outside a step; nothing happens if it has already ended."""
        if reason is FinishReason.REJECTED and buffer.tokens:
            reason, cause = FinishReason.ERROR, f"rejected after its first token: {cause}"
        sequence = buffer.sequence
        if sequence is not None and not buffer.done:
            record = self.core.finish(sequence, reason, self._clock.now(), cause)
            if record is not None:
                self._ended(sequence, record, error, None)
                self.listeners.tell(None, [record])

    def _ended(
        self, sequence: Sequence, record: RequestRecord | None, cause: BaseException | None, last: Token | None
    ) -> None:
        buffer = self._buffers.pop(sequence)
        self._output.release(sequence)
        with self._lock:
            self._forget(buffer)
        buffer.end(last, record, cause, self._wakes)

    def _forget(self, buffer: TokenBuffer) -> None:
        """Needs the lock."""
        if self._live.get(buffer.request_id) is buffer:
            del self._live[buffer.request_id]

    def _close(self, drain: bool, reason: FinishReason = FinishReason.ERROR) -> None:
        """``reason``: of those that it cuts, which is no wish of their clients unless these have left with the engine."""
        self._closing = True
        if not drain:
            why = "the engine was closed"
            for buffer in list(self._buffers.values()):
                self._end_early(buffer, reason, why, EngineClosedError(why))

    def _abandoned(self) -> None:
        with self._lock:
            self._closed = True
        self._close(drain=False, reason=FinishReason.CANCELLED)

    def _finish_off(self, error: BaseException | None) -> None:
        """Leave nobody waiting: end every request and answer every call. After this the inbox gets no more."""
        with self._lock:
            self._closed = self._over = True
            self.error = error
        records, ended = [], dict(getattr(self.core, "undelivered", ()))
        for sequence in list(self._buffers):
            record = ended.get(sequence)
            if record is not None and record.completed:  # its last token is lost
                records.append(record._replace(reason=FinishReason.ERROR, cause=self._why_closed()))
                record = None
            elif record is not None:
                records.append(record)
            else:
                with suppress(Exception):  # the core may be what broke
                    records.append(
                        self.core.finish(sequence, FinishReason.ERROR, self._clock.now(), self._why_closed())
                    )
            self._ended(sequence, record, error if record is None else None, None)
        while not self._inbox.empty():
            _contained(self._inbox.get())
        with self._lock:  # whose queueing broke it: neither in the inbox nor among the buffers
            left = list(self._live.values())
            self._live.clear()
        for buffer in left:
            buffer.end(None, None, error, self._wakes)
        self._wakes.send()
        self.listeners.tell(None, [record for record in records if record is not None])


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, DeviceError) else repr(error)


def _contained(change: Callable[[], object]) -> None:
    try:
        change()
    except Exception:
        log.exception("a change of the engine failed")


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
