"""``vllm serve --middleware autotune.engines.vllm.RejectionStatus``: a request that was rejected is answered with 429.

All that a scheduler of vLLM's can do to a request is to abort it, and vLLM's API server answers that with 200, ``finish_reason``
"abort" and no text; in a stream of completions with nothing but ``[DONE]``. This ASGI middleware holds back the beginning of an
answer of ``/v1/completions`` or ``/v1/chat/completions`` until the first token is in it, which is when vLLM sends it, and makes
one that ends without any into 429 with Retry-After and the reason. Everything else passes as it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal

from autotune.engines.vllm.scheduler import REJECTED
from runtime.serving.errors import ApiError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]
_UNKNOWN: Final = "it was ended before its first token: it could not meet its SLO any more, or the server stops"
_Found = Literal["more", "answer", "rejected"]


class RejectionStatus:
    """Wraps vLLM's ``app``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            await self._app(scope, receive, send)
            return
        answer = _Beginning(send)
        try:
            await self._app(scope, _until(receive, answer.rejected), answer)
        except Exception:
            if not answer.rejected.is_set():  # else it is about a client that has its answer
                raise


def _until(receive: Callable[[], Awaitable[Message]], gone: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """What ``receive`` says, and that the client has gone once ``gone`` is set."""

    async def either() -> Message:
        if gone.is_set():
            return {"type": "http.disconnect"}
        says, ends = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait((says, ends), return_when=asyncio.FIRST_COMPLETED)
            return says.result() if says.done() else {"type": "http.disconnect"}
        finally:
            ends.cancel()
            says.cancel()

    return either


class _Beginning:
    """Sends one answer on, once it is known what it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self._body = b""
        self._found: _Found = "more"
        self._words = ""  # of the scheduler
        self.rejected = asyncio.Event()
        """Set once the client has been told so."""

    async def __call__(self, message: Message) -> None:
        if self._found == "answer":
            await self._send(message)
        elif self._found == "more":
            self._held.append(message)
            self._found = self._judge(message)
            if self._found == "rejected":
                await self._reject()
            elif self._found == "answer":
                for one in self._held:
                    await self._send(one)
                self._held.clear()

    def _judge(self, message: Message) -> _Found:
        if message["type"] == "http.response.start":
            self._stream = b"text/event-stream" in dict(message.get("headers", ())).get(b"content-type", b"")
            return "more" if message["status"] == 200 else "answer"
        if message["type"] != "http.response.body":
            return "answer"
        self._body += message.get("body", b"")
        last = not message.get("more_body", False)
        if self._stream:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                if event.startswith(b":"):  # a comment, by which vLLM keeps a connection open
                    continue
                if (found := self._event(event.removeprefix(b"data: ").strip())) != "more":
                    return found
            return "answer" if last else "more"
        return self._whole() if last else "more"

    def _event(self, event: bytes) -> _Found:
        """Of a stream in which no token has come so far."""
        if event == b"[DONE]":
            return "rejected"
        said = _object(event)
        if "choices" not in said:
            return "answer"  # an error
        for choice in said["choices"]:
            if choice.get("finish_reason") == "abort":
                if self._note(choice):
                    return "rejected"
            elif choice.get("finish_reason") is not None or "role" not in choice.get("delta", {}):
                return "answer"
        return "more"  # the beginning of a chat, or how much was used

    def _whole(self) -> _Found:
        if b'"abort"' not in self._body:
            return "answer"
        said = _object(self._body)
        choices = said.get("choices") or [{}]
        if any([self._note(choice) for choice in choices]):
            return "rejected"
        if any(choice.get("finish_reason") != "abort" for choice in choices) or said["usage"]["completion_tokens"]:
            return "answer"
        return "rejected"

    def _note(self, choice: dict[str, Any]) -> bool:
        """Whether the scheduler rejected it; remember its words."""
        words = str(choice.get("stop_reason") or "")
        if choice.get("finish_reason") != "abort" or not words.startswith(REJECTED):
            return False
        self._words = words.removeprefix(REJECTED)
        return True

    async def _reject(self) -> None:
        seconds, _, why = self._words.partition(" s: ")
        error = ApiError(429, why or _UNKNOWN, code="slo", retry_after_s=float(seconds or 1.0))
        body = json.dumps(error.body).encode()
        own = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        kept = [(k, v) for k, v in self._held[0].get("headers", ()) if k.decode("latin-1").lower() not in own]
        headers = [*kept, *((k.encode(), v.encode()) for k, v in own.items())]
        self._held.clear()
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        self.rejected.set()


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
