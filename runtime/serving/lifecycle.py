"""Whether the server takes work, and how much it has under way. Lives in the event loop."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serving.errors import ApiError

RETRY_AFTER_S = 1.0  # another instance, or the one that takes this one's place, answers by then


class Lifecycle:
    """``draining``: what has begun goes on, nothing new begins. ``active`` counts answers not yet wholly sent; a request begins
    when its whole body has come."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._reading: set[asyncio.Timeout] = set()  # of the bodies that have not wholly come

    def drain(self) -> None:
        self.draining = True
        while self._reading:
            self._reading.pop().reschedule(0.0)  # long past: it ends at once

    async def part_of_body(self, receive: Receive) -> Message:
        """The next message of a request that has not begun. Raises ``HTTPException`` 503, which FastAPI passes on as it is, when
        draining begins: the rest of the body may never come."""
        if self.draining:
            raise HTTPException(503)
        try:
            async with asyncio.timeout(None) as unless_drained:
                self._reading.add(unless_drained)
                try:
                    return await receive()
                finally:
                    self._reading.discard(unless_drained)
        except TimeoutError:
            raise HTTPException(503) from None

    async def idle(self) -> None:
        """Returns when no answer is under way."""
        await self._idle.wait()

    def check(self) -> None:
        """Raise :class:`ApiError` 503 while draining."""
        if self.draining:
            raise shutting_down()

    def begin(self) -> None:
        self.active += 1
        self._idle.clear()

    def end(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)


class Counted:
    """ASGI middleware: counts answers to POST, from the last byte of the request to the last of the answer."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted() -> Message:
            nonlocal begun
            if begun:
                return await receive()
            message = await self._lifecycle.part_of_body(receive)
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._lifecycle.begin()
                begun = True
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if begun:
                self._lifecycle.end()
