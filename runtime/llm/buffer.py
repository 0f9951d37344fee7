"""Where the engine's thread leaves a request's tokens and readers find them.

The engine never waits for a reader: it appends, and wakes whoever has said that they wait. A reader that stops reading
costs the tokens of its own request, at most ``max_tokens`` of them. Every wait is ended by the next token, by the end of the
request, or by the end of the engine, which ends every request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

from runtime.errors import (
    EngineClosedError,
    RejectedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)
from runtime.llm.output import Detokenizer
from runtime.llm.plan import Token
from runtime.records import FinishReason, RequestRecord
from runtime.request import Sequence
from runtime.shared.wakeups import Wakeups


class TokenEvent(NamedTuple):
    """One token of a stream, the ``position``-th of the output from 0 on.

    ``token_id`` is its id in the vocabulary; ``text`` is what it adds to the text: nothing while a character or a possible
    stop string is incomplete. ``logprob`` and ``top_logprobs`` ((token id, log-probability) pairs, likeliest first) are there
    if ``logprobs`` was requested. ``finish_reason`` stands on the last token of a request that ran to its natural end.
    """

    position: int
    token_id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class TokenBuffer:
    """The tokens of one request: written by the engine's thread, read from any other.

    ``text`` turns them into text. For a request with stop strings the engine pushes each token into it before ``put``;
    otherwise the reader does, when it asks for an event.
    """

    def __init__(
        self, request_id: str, text: Detokenizer, cancel: Callable[[TokenBuffer, FinishReason, str], None]
    ) -> None:
        self.request_id = request_id
        self.text = text
        self.tokens: list[Token] = []
        self.record: RequestRecord | None = None
        self.cause: BaseException | None = None
        self.done = False
        self.sequence: Sequence | None = None  # once the engine has queued it
        self._cancel = cancel
        self._events: list[TokenEvent] = []
        self._lock = threading.Lock()  # waiters against put and end; held for a few instructions only
        self._text_lock = threading.Lock()  # readers against each other
        self._gates: list[tuple[bool, Callable[[], None]]] = []  # (wants every token, what opens the gate)
        self._futures: list[tuple[bool, asyncio.Future[None]]] = []
        self._awaited: list[asyncio.Future[None]] = []  # the same, until who waits for them has gone on

    # -- the engine's side ----------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether somebody waited for it in an event loop when that was closed, and nobody else waits for it."""
        if not self._awaited:
            return False
        with self._lock:
            closed = [future.get_loop().is_closed() for future in self._awaited]
            return not self._gates and bool(closed) and all(closed)

    def put(self, token: Token, wakes: Wakeups[TokenBuffer]) -> None:
        with self._lock:
            self.tokens.append(token)
            if self._gates or self._futures:
                self._wake(wakes, ended=False)

    def end(
        self,
        token: Token | None,
        record: RequestRecord | None,
        cause: BaseException | None,
        wakes: Wakeups[TokenBuffer],
    ) -> None:
        """The request has ended, with its last ``token`` if that came with the end."""
        with self._lock:
            if self.done:
                return
            if token is not None:
                self.tokens.append(token)
            self.record, self.cause, self.done = record, cause, True
            self._wake(wakes, ended=True)

    def _wake(self, wakes: Wakeups[TokenBuffer], ended: bool) -> None:
        for entry in [e for e in self._gates if e[0] or ended]:
            self._gates.remove(entry)
            entry[1]()
        for waiting in [f for f in self._futures if f[0] or ended]:
            self._futures.remove(waiting)
            wakes.add(waiting[1], self)

    # -- the reader's side ----------------------------------------------------------------------------------------------

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED, cause: str = "by the client") -> None:
        """Ask the engine to end the request; nothing happens if it has ended. Safe in a finalizer: it takes no lock."""
        if not self.done:
            self._cancel(self, reason, cause)

    def read_by_thread(self) -> None:
        """A thread reads it now: the end of an event loop where it is waited for no longer means that nobody reads."""
        if self._awaited:
            with self._lock:
                self._awaited.clear()

    def wait(self, seen: int | None, timeout: float | None = None) -> bool:
        """Block until there are more than ``seen`` tokens (None: no matter how many) or the request has ended.

        Returns False if ``timeout`` seconds passed before that.
        """
        self.read_by_thread()
        with self._lock:
            if self._ready(seen):
                return True
            gate = threading.Lock()
            gate.acquire()
            entry = (seen is not None, gate.release)
            self._gates.append(entry)
        if gate.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            return True
        with self._lock:
            if entry in self._gates:
                self._gates.remove(entry)
            return self._ready(seen)

    async def wait_async(self, seen: int | None) -> None:
        """As :meth:`wait`, without holding up the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._awaited:  # it is read here now, whatever other loop was closed
                self._awaited = [future for future in self._awaited if not future.get_loop().is_closed()]
            if self._ready(seen):
                return
            future: asyncio.Future[None] = loop.create_future()
            entry = (seen is not None, future)
            self._futures.append(entry)
            self._awaited.append(future)
        collected = False
        try:
            await future
        except GeneratorExit:  # a finalizer, perhaps in the middle of a thread that holds the lock
            collected = True
            raise
        finally:
            if not collected:
                with self._lock:
                    if entry in self._futures:
                        self._futures.remove(entry)
                    if future in self._awaited:
                        self._awaited.remove(future)

    def _ready(self, seen: int | None) -> bool:
        return self.done or (seen is not None and len(self.tokens) > seen)

    def event(self, index: int) -> TokenEvent | None:
        """The event of token ``index``, which has come, or None if the request ended before it."""
        self._read_to(index + 1)
        return self._events[index] if index < len(self._events) else None

    def whole_text(self) -> str:
        """The text of a request that ran to its natural end. Decoded at once if nobody has read it token by token."""
        with self._text_lock:
            untouched = not self._events and not self.text.pieces
        if untouched:
            ids = [token.id for token in self.tokens]
            if self.record is not None and self.record.reason is FinishReason.STOP:
                ids.pop()
            return self.text.whole(ids)
        self._read_to(len(self.tokens))
        return "".join([event.text for event in self._events])

    def _read_to(self, count: int) -> None:
        with self._text_lock:
            with self._lock:  # so that the last token is never seen without the end that came with it
                available, done = len(self.tokens), self.done
            while len(self._events) < min(count, available):
                self._events.append(self._next_event(last=done and len(self._events) == available - 1))

    def _next_event(self, last: bool) -> TokenEvent:
        index = len(self._events)
        token = self.tokens[index]
        reason = self.record.reason if last and self.record is not None and self.record.completed else None
        if index >= len(self.text.pieces):
            if reason is FinishReason.STOP:  # an end-of-sequence token or stop id; a stop string would have its piece
                self.text.skip()
            else:
                self.text.push(token.id)
        if reason is not None:
            self.text.flush()
        return TokenEvent(index, token.id, self.text.pieces[index], token.logprob, token.top, reason)

    def failure(self) -> Exception | None:
        """Why the request did not end well; None if it did, or has not ended. A new exception each time."""
        if not self.done or (self.record is not None and self.record.completed):
            return None
        error = self._failure()
        error.__cause__ = self.cause
        return error

    def _failure(self) -> Exception:
        record, name = self.record, f"request {self.request_id}"
        if record is None:
            return EngineClosedError(f"{name}: the engine stopped: {self.cause!r}")
        because = f": {record.cause}" if record.cause else ""
        cut = isinstance(self.cause, EngineClosedError)
        match FinishReason.CANCELLED if cut else record.reason:
            case FinishReason.CANCELLED:
                return RequestCancelledError(f"{name} was cancelled after {record.output_tokens} tokens{because}")
            case FinishReason.TIMEOUT:
                after = round(record.finished - record.arrival, 3)
                return RequestTimeoutError(f"{name} timed out after {after:g} s and {record.output_tokens} tokens")
            case FinishReason.REJECTED:
                message = (
                    str(self.cause) if isinstance(self.cause, RejectedError) else f"{name} was not accepted{because}"
                )
                return RejectedError(message, reason=record.cause or "rejected", retry_after_s=record.retry_after_s)
            case _:
                return StepFailedError(f"{name} failed after {record.output_tokens} tokens{because}")
