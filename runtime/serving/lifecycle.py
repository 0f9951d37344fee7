"""Whether the server takes work, and how much it has under way. Lives in the event loop."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.serving.errors import ApiError

RETRY_AFTER_S = 1.0  # another instance, or the one that takes this one's place, answers by then


class Lifecycle:
    """``draining``: what has begun goes on, nothing new begins. ``active`` counts answers not yet wholly sent."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        self.draining = True

    async def idle(self) -> None:
        """Returns when no answer is under way."""
        await self._idle.wait()

    def check(self) -> None:
        """Raise :class:`ApiError` 503 while draining."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)

    def begin(self) -> None:
        self.active += 1
        self._idle.clear()

    def end(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()


class Counted:
    """ASGI middleware: counts answers to POST, from the first byte of the request to the last of the answer."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._lifecycle.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.end()
