"""The service that every contender batches, and the thin HTTP server in front of it.

A call with n items takes 20 + 2·n ms, n ≤ 32, one call at a time: 32 / 84 ms = 381 items/s at most. It sleeps for that
long, so what is compared is when calls are made and with how many items, and two cores are enough for it.

The server is uvicorn with a bare ASGI application: one number in, one number out, 503 for whatever the batching refuses.
``/bare`` answers without batching: what HTTP itself costs. No dependency but uvicorn, for it runs in the environments of the
contenders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

BASE_S, ITEM_S, LARGEST = 0.020, 0.002, 32
CAPACITY = LARGEST / (BASE_S + ITEM_S * LARGEST)
"""Items a second: 380.95."""

BARE_S = BASE_S + ITEM_S
SLO_S = 0.400
HTTP_S = 0.010
"""Of the SLO, what HTTP may take: whoever is told the SLO is told it less this."""

Answer = Callable[[float], Awaitable[float]]


class Refused(Exception):
    """Raised by an answer that the batching does not give: the server says 503."""


def service_s(items: int) -> float:
    """Seconds that a call with ``items`` takes."""
    if not 1 <= items <= LARGEST:
        raise ValueError(f"a call has {items} items; it must have 1 to {LARGEST}")
    return BASE_S + ITEM_S * items


def application(answer: Answer, started: Callable[[], Awaitable[None]] | None = None) -> Any:
    """An ASGI application around ``answer``; ``started`` is awaited before the first request."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send, started)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, text = 200, b"1"
        if scope["path"] != "/bare":
            try:
                text = repr(await answer(float(body))).encode()
            except Refused:
                status, text = 503, b"refused"
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    return app


async def _lifespan(receive: Any, send: Any, started: Callable[[], Awaitable[None]] | None) -> None:
    while True:
        event = (await receive())["type"].removeprefix("lifespan.")
        if event == "startup" and started is not None:
            await started()
        await send({"type": f"lifespan.{event}.complete"})
        if event == "shutdown":
            return


def uvicorn_settings(port: int) -> dict[str, Any]:
    """The same for every contender: one process, nothing logged, connections kept open through idle times."""
    return {
        "host": "127.0.0.1",
        "port": port,
        "log_level": "critical",
        "access_log": False,
        "http": "httptools",
        "loop": "uvloop",
        "timeout_keep_alive": 60,
        "backlog": 4096,
    }
