"""An open-loop HTTP client in a process of its own, and its honest account: when each request was due and when it was answered.

Requests are due at Poisson times whatever became of the earlier ones, and a latency counts from when the request was due, so
what this client is late itself counts against whoever is measured; how late it was is part of the account. Standard library
only, plain HTTP/1.1 over connections that stay open, as many as it takes.

``python -m benchmarks.batcher.load`` reads a :class:`Load` as JSON and writes an :class:`Account` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import selectors
import sys
import time
from typing import NamedTuple


class Load(NamedTuple):
    """``phases``: (seconds, requests a second), one after the other. Nobody waits for an answer longer than ``patience_s``."""

    port: int
    path: str
    phases: list[tuple[float, float]]
    seed: int
    patience_s: float = 3.0


class Account(NamedTuple):
    """For each request when it was due (s from the start), its latency (s) and status (0: no answer); how late the client was."""

    due: list[float]
    latency: list[float]
    status: list[int]
    late_p99_s: float
    late_max_s: float


class Connection(asyncio.Protocol):
    """One request at a time; the answer says how long it is (``content-length``)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[int] | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def ask(self, request: bytes) -> asyncio.Future[int]:
        self._buffer = b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or self._answer is None:
            return
        lower = head.lower()
        start = lower.find(b"content-length:")
        length = int(lower[start + 15 :].split(b"\r\n", 1)[0])
        if len(body) >= length and not self._answer.done():
            self._answer.set_result(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)

    def close(self) -> None:
        self._transport.close()


class OnTime(selectors.DefaultSelector):
    """Wakes to the microsecond. Linux' epoll counts whole milliseconds and rounds up: each request would be half a one late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        return found


class Client:
    """Sends the requests of one load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._idle: list[Connection] = []
        body = b"1.5"
        headers = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}")
        self._request = "\r\n".join((f"POST {load.path} HTTP/1.1", *headers, "", "")).encode() + body
        self._due: list[float] = []
        self._latency: list[float] = []
        self._status: list[int] = []
        self._late: list[float] = []

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._load.port)
        return connection

    async def _one(self, number: int, due: float) -> None:
        connection = None
        try:
            while self._idle and connection is None:
                connection = self._idle.pop()
                connection = connection if connection.open else None
            if connection is None:
                connection = await self._connect()
            async with asyncio.timeout_at(due + self._load.patience_s):
                status = await connection.ask(self._request)
        except (TimeoutError, OSError):
            status = 0
        self._latency[number] = time.monotonic() - due
        self._status[number] = status
        if connection is not None:
            if status and connection.open:
                self._idle.append(connection)
            else:
                connection.close()

    async def run(self) -> Account:
        rng = random.Random(self._load.seed)
        self._idle = [await self._connect() for _ in range(16)]
        tasks = []
        begun = due = ends = time.monotonic()
        for seconds, rate in self._load.phases:
            due, ends = ends, ends + seconds  # Poisson forgets: each phase may begin anew
            while (due := due + rng.expovariate(rate)) < ends:
                if (early := due - time.monotonic()) > 0:
                    await asyncio.sleep(early)
                self._late.append(time.monotonic() - due)
                number = len(self._due)
                self._due.append(due - begun)
                self._latency.append(0.0)
                self._status.append(0)
                tasks.append(asyncio.create_task(self._one(number, due)))
        await asyncio.gather(*tasks)
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)  # they close in the loop's next turn
        late = sorted(self._late) or [0.0]
        return Account(self._due, self._latency, self._status, late[int(len(late) * 0.99)], late[-1])


def main() -> None:
    load = Load(**json.load(sys.stdin))
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(OnTime())) as runner:
        print(json.dumps(runner.run(Client(load).run())._asdict()))


if __name__ == "__main__":
    main()
