"""A streamed answer: each token is sent the moment it comes, and a client that goes away takes its request along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import AutotuneError, RejectedError, RequestTimeoutError, StepFailedError
from runtime.llm.stream import Completion, Stream
from runtime.records import SAME_CALL_REASON, FinishReason
from runtime.serving.answers import DONE, Events
from runtime.serving.errors import CLIENT_GONE, ApiError, api_error

log = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers tokens would undo what the engine must deliver
]


async def client_left(receive: Receive) -> None:
    """Returns when the client has closed its connection (or has its whole answer). The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def end_all(streams: Sequence[Stream], error: BaseException) -> None:
    """End what is left of ``streams``, the requests of one call, which failed by ``error``: as the one that did where that was
    the server's doing, else by the client's wish."""
    match error:
        case RejectedError():
            how = FinishReason.REJECTED, SAME_CALL_REASON
        case RequestTimeoutError():
            how = FinishReason.TIMEOUT, "with another of the same call"
        case StepFailedError():
            how = FinishReason.ERROR, "another of the same call failed"
        case _:
            how = FinishReason.CANCELLED, "by the client"
    for stream in streams:
        stream.end_for(*how)


async def completed(streams: Sequence[Stream], receive: Receive) -> list[Completion]:
    """All of ``streams``, to the end. If the client leaves before, or one of them fails, the others are ended.

    Raises what the engine raises, and :class:`ApiError` 499 if the client has left.
    """
    gone = asyncio.ensure_future(client_left(receive))
    work = asyncio.gather(*(stream.aresult() for stream in streams))
    try:
        both: set[asyncio.Future[Any]] = {gone, work}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(CLIENT_GONE, "the client closed the connection", code="client_gone")
        return await work
    except BaseException as error:
        end_all(streams, error)
        raise
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)  # else asyncio logs that nobody heard how it ended


class EventStream(Response):
    """Server-sent events of ``streams``, one choice each.

    Nothing is sent before the first token, so that a request that fails before has an error status of its own; what fails
    later is sent in an event. ``prepare`` makes the events when the streams are under way.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Sequence[Stream], prepare: Callable[[], Awaitable[Events]]) -> None:
        super().__init__()
        self._streams = streams
        self._prepare = prepare
        self._started = False
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(client_left(receive))
        gone.add_done_callback(self._cancel)
        try:
            await self._answer(send)
        except Exception as error:
            end_all(self._streams, error)
            if self._left and isinstance(error, AutotuneError):
                return
            if self._left or not self._started:
                raise
            if not isinstance(error, AutotuneError):  # of the engine's own kind are those that a client caused
                log.exception("a stream failed")
            await self._send(send, api_error(error).event + DONE, more=False)
        finally:
            gone.remove_done_callback(self._cancel)
            gone.cancel()
            self._cancel_streams()

    async def _answer(self, send: Send) -> None:
        events = await self._prepare()
        streams = self._streams
        if len(streams) == 1:
            await self._relay(0, streams[0], events, send)
        else:
            tasks = [asyncio.ensure_future(self._relay(i, s, events, send)) for i, s in enumerate(streams)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        records = [stream.record for stream in streams]
        await self._send(send, events.end([record for record in records if record is not None]), more=False)

    async def _relay(self, index: int, stream: Stream, events: Events, send: Send) -> None:
        async for event in stream:
            body = events.token(index, event)
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _cancel(self, _: asyncio.Future[None]) -> None:
        self._left = True
        self._cancel_streams()

    def _cancel_streams(self) -> None:
        for stream in self._streams:
            stream.cancel()
