"""``vllm serve --middleware autotune.engines.vllm.RejectionStatus``: a request that was rejected is answered with 429.

All that a scheduler of vLLM's can do to a request is to abort it, and vLLM's API server makes an answer without text of that,
with status 200, each endpoint in its own way; some do not even say that it was aborted. This ASGI middleware listens to what the
engine says to each HTTP request, whatever the endpoint, and holds back the beginning of the answer until a token has come for it.
If the engine says before that the request was rejected, the client gets 429 with Retry-After and the reason, and what else
belongs to the request is ended. If vLLM's own queue limits refuse one whose answer is a stream, the client gets 503 in the same
way, where vLLM would tell of it under status 200. Everything else passes as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from autotune.engines.vllm.requests import NEVER_REJECTED
from autotune.engines.vllm.scheduler import REJECTED
from runtime.serving.errors import ApiError

log = logging.getLogger("vllm.autotune")
_PRELIMINARY: Final = "-lang_detect"
"""How the id ends of a request by which vLLM finds the language of a recording, before it asks for what is said in it."""

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_RETRY_S: Final = 1.0  # after one of vLLM's own refusals, which do not say
_HEARD: Final = "autotune.rejection_status"  # of a scope: what is further out hears already


class RejectionStatus:
    """Wraps vLLM's ``app``, whose ``state.engine_client`` is vLLM's engine as its endpoints have it."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._listens: bool | None = None  # whether answers hear of the engine; None: no engine has been seen

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _HEARD in scope or not self._listen(scope):
            await self._app(scope, receive, send)
            return
        scope[_HEARD] = True
        answer = _Answer(send, scope["path"])
        before = _ANSWER.set(answer)
        try:
            await self._app(scope, answer.reads(_until(receive, answer.refused)), answer)
        except Exception:
            if not answer.refused.is_set():  # else it is about a client that has its answer
                raise
        finally:
            _ANSWER.reset(before)
        await answer.end()

    def _listen(self, scope: Message) -> bool:
        """Have each answer hear what the engine of ``scope``'s app says to it; whether that is possible."""
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if self._listens is None and engine is not None:
            try:
                engine.generate = _telling(engine.generate)
                self._listens = True
            except AttributeError as error:
                log.warning("a rejected request is an answer without text, not status 429: %s", error)
                self._listens = False
        return bool(self._listens)


def _until(receive: Receive, gone: asyncio.Event) -> Receive:
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


def _telling(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """``generate`` of vLLM's engine, which tells the answer for which it is called what it says."""

    @wraps(generate)
    def telling(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        answer = _ANSWER.get()
        if answer is None:
            return generate(*args, **kwargs)
        sampling = [one for one in (*args, *kwargs.values()) if hasattr(one, "extra_args")]
        begins = not any(isinstance(one, str) and one.endswith(_PRELIMINARY) for one in (*args[2:], *kwargs.values()))
        return _heard(generate(*args, **kwargs), sampling, answer, begins)

    return telling


async def _heard(
    outputs: AsyncGenerator[Any, None], sampling: list[Any], answer: _Answer, begins: bool
) -> AsyncGenerator[Any, None]:
    """``outputs``, of which ``answer`` hears. ``sampling``: the parameters of the request, which vLLM reads when the first output
    is asked for: not before is it known whether the answer has begun. ``begins``: whether it does by them."""
    if answer.spares:
        for one in sampling:
            one.extra_args = {**(one.extra_args or {}), NEVER_REJECTED: True}
    try:
        async for output in outputs:
            if not answer.passes:
                try:
                    answer.hear(output, begins)
                except Exception:
                    log.exception(
                        "autotune failed while it looked for a rejection; the answer goes on as vLLM makes it"
                    )
                    answer.begun = True
            yield output
    except Exception as error:
        answer.fails(error)
        raise
    finally:
        await outputs.aclose()


def _in_background(request: bytes) -> bool:
    """Whether the body of a ``request`` of ``/v1/responses`` asks for that."""
    if b'"background"' not in request:
        return False
    try:
        return bool(json.loads(request).get("background"))
    except (ValueError, AttributeError, RecursionError):
        return False


class _Answer:
    """Sends the answer to one HTTP request on, once it is known what it is."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._held: list[Message] = []
        self.begun = False
        """Whether a token has come."""
        self.passes = False
        """Whether its beginning has been sent."""
        self.in_background = False
        """Whether the client has its answer before anything is computed, and asks for the result later: of a rejection it could
        not be told."""
        self._stream = False
        self._refusal: ApiError | None = None
        self._sent = False
        self.refused = asyncio.Event()
        """Set once it is known that the client is to be told so."""

    @property
    def spares(self) -> bool:
        """Whether a request that is made for it now is never rejected: the client could not be told, or others have been computed
        for it already."""
        return self.in_background or self.begun or self.passes

    def reads(self, receive: Receive) -> Receive:
        """``receive``, by which the app reads what is asked."""
        if not self._path.endswith("/responses"):
            return receive
        parts: list[bytes] = []

        async def reading() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self.in_background = _in_background(b"".join(parts))
                    parts.clear()
            return message

        return reading

    def hear(self, output: Any, begins: bool = True) -> None:
        """The engine has said ``output``, a ``RequestOutput``, by which the answer ``begins`` if it holds a token."""
        for one in getattr(output, "outputs", ()):
            words = str(getattr(one, "stop_reason", None) or "")
            if one.finish_reason == "abort" and words.startswith(REJECTED):
                seconds, _, why = words.removeprefix(REJECTED).partition(" s: ")
                self._refuse(ApiError(429, why, code="slo", retry_after_s=float(seconds)))
            elif one.token_ids or one.finish_reason is not None:
                self.begun |= begins

    def fails(self, error: Exception) -> None:
        """The engine has raised ``error``. Those of vLLM's queue limits have a status, which a stream would not show."""
        if (status := getattr(error, "http_status", None)) is not None:
            self._refuse(ApiError(int(status), str(error), code="queue_full", retry_after_s=_RETRY_S))

    def _refuse(self, refusal: ApiError) -> None:
        if not self.passes and self._refusal is None:
            self._refusal = refusal
            self.refused.set()

    async def __call__(self, message: Message) -> None:
        if self.passes:
            await self._send(message)
        elif self._refusal is not None:
            self._held.append(message)
            await self.end()
        else:
            self._held.append(message)
            if self._known(message):
                self.passes = True
                for one in self._held:
                    await self._send(one)
                self._held.clear()

    def _known(self, message: Message) -> bool:
        """Whether there is no refusal to wait for any more."""
        if message["type"] == "http.response.start":
            self._stream = b"text/event-stream" in dict(message.get("headers", ())).get(b"content-type", b"")
            return bool(message["status"] != 200)
        if message["type"] != "http.response.body":
            return True
        return (self._stream and self.begun) or not message.get("more_body", False)

    async def end(self) -> None:
        """Send the client its refusal, if there is one, once."""
        if self._refusal is None or self._sent:
            return
        self._sent = True
        error = self._refusal
        anthropic = {"type": "error"} if self._path.endswith("/messages") else {}
        body = json.dumps({**anthropic, **error.body}).encode()
        own = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        begun = self._held[0].get("headers", ()) if self._held else ()
        kept = [(k, v) for k, v in begun if k.decode("latin-1").lower() not in own]
        headers = [*kept, *((k.encode(), v.encode()) for k, v in own.items())]
        self._held.clear()
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


_ANSWER: ContextVar[_Answer | None] = ContextVar("_ANSWER", default=None)
