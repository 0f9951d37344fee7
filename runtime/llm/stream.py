"""What ``submit`` returns: a request's tokens as they come, and its completion."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from runtime.llm.buffer import TokenBuffer, TokenEvent
from runtime.records import FinishReason, RequestRecord


class TokenLogprob(NamedTuple):
    """The log-probability of one output token, and of the likeliest in its place, in the unmodified distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that ran to its natural end.

    ``request_id`` is that of :meth:`runtime.Engine.submit`. ``token_ids`` holds every sampled token, the one that ended it
    included; ``text`` ends before an end-of-sequence token, stop id or stop string. ``finish_reason``: ``length`` or
    ``stop``. ``logprobs`` is None unless requested. ``record`` has its times.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    record: RequestRecord


class Stream:
    """A submitted request.

    Iterate over it (``for`` or ``async for``) to get a :class:`TokenEvent` a token, or call :meth:`result` (``await`` it)
    for the whole. Each iteration begins at the first token. The request is cancelled when the stream is closed, when it is
    forgotten (garbage-collected), and when an iteration is left before its end. All calls may come from any thread.

    Errors, from :meth:`result` at once and from an iteration behind the tokens there were: RequestCancelledError,
    RequestTimeoutError, StepFailedError (``__cause__`` is what the model raised), EngineClosedError.
    """

    __slots__ = ("__weakref__", "_buffer", "_check", "_keep")

    def __init__(self, buffer: TokenBuffer, keep: object, check: Callable[[], None]) -> None:
        self._buffer = buffer
        self._keep = keep  # the engine: it lives as long as one of its streams
        self._check = check  # raises where waiting would wait for itself

    @property
    def request_id(self) -> str:
        return self._buffer.request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._buffer.done

    @property
    def record(self) -> RequestRecord | None:
        """Its times, once it has ended."""
        return self._buffer.record

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far; they stay when the request fails."""
        return tuple(token.id for token in self._buffer.tokens)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises ``TimeoutError`` after ``timeout`` seconds (the request goes on), or its own error."""
        if not self._buffer.done:
            self._check()
            if not self._buffer.wait(None, timeout):
                raise TimeoutError(f"request {self.request_id} has not finished within {timeout:g} s")
        return self._completion()

    async def aresult(self) -> Completion:
        """As :meth:`result`, in an event loop. Cancelling the waiting task leaves the request running."""
        if not self._buffer.done:
            self._check()
        await self._buffer.wait_async(None)
        return self._completion()

    def __await__(self) -> Generator[object, None, Completion]:
        return self.aresult().__await__()

    def __iter__(self) -> TokenIterator:
        return TokenIterator(self)

    def __aiter__(self) -> AsyncTokenIterator:
        return AsyncTokenIterator(self)

    def cancel(self) -> None:
        """End the request, whatever its state. Returns at once; nothing happens if it has already ended."""
        self._buffer.cancel()

    close = cancel

    def end_for(self, reason: FinishReason, cause: str) -> None:
        """As :meth:`cancel`, by no wish of the client's: the record has this ``reason`` and ``cause``."""
        self._buffer.cancel(reason, cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._buffer.cancel()

    def __repr__(self) -> str:
        state = "running" if self.record is None else self.record.reason.value
        return f"<Stream {self.request_id} {state} tokens={len(self._buffer.tokens)}>"

    def _completion(self) -> Completion:
        buffer = self._buffer
        if (error := buffer.failure()) is not None:
            raise error
        record = buffer.record
        assert record is not None
        logprobs = [TokenLogprob(t.id, t.logprob, t.top) for t in buffer.tokens if t.logprob is not None]
        return Completion(
            request_id=self.request_id,
            text=buffer.whole_text(),
            token_ids=self.token_ids,
            finish_reason=record.reason,
            logprobs=tuple(logprobs) if logprobs else None,
            record=record,
        )


class _Reading:
    """One pass over a stream. Dropping it before its end cancels the request."""

    __slots__ = ("_index", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._index = 0

    def _take(self) -> TokenEvent | None:
        event = self._stream._buffer.event(self._index)
        if event is not None:
            self._index += 1
        elif (error := self._stream._buffer.failure()) is not None:
            raise error
        return event

    def close(self) -> None:
        self._stream.cancel()

    def __del__(self) -> None:
        self._stream.cancel()


class TokenIterator(_Reading):
    """``for event in stream``."""

    __slots__ = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        stream = self._stream
        stream._buffer.read_by_thread()
        if not stream.done and len(stream._buffer.tokens) <= self._index:
            stream._check()
            stream._buffer.wait(self._index)
        event = self._take()
        if event is None:
            raise StopIteration
        return event


class AsyncTokenIterator(_Reading):
    """``async for event in stream``."""

    __slots__ = ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        stream = self._stream
        if not stream.done and len(stream._buffer.tokens) <= self._index:
            stream._check()
        await stream._buffer.wait_async(self._index)
        event = self._take()
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        self._stream.cancel()
