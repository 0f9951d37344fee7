"""A paid HTTP API with a rate limit: fewer, fuller calls, none of them refused.

    pip install '.[examples]'     # for httpx
    python examples/rate_limited_api.py [--items 200]

The API here is a server on this machine that takes lists, counts its calls, and answers 429 beyond ten a second. The
function is asynchronous, knows the limit, and may have two calls under way. Every call costs money, so the Batcher is set to
hold items back as long as the SLO allows (``call_price_ms=inf``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx

from runtime import SLO, Batcher

CALLS_A_SECOND = 10


class Api(BaseHTTPRequestHandler):
    """``POST [1, 2, 3]`` → ``[1, 4, 9]``, if it is not asked too often."""

    protocol_version = "HTTP/1.1"
    calls: ClassVar[deque[float]] = deque(maxlen=CALLS_A_SECOND)
    answered = refused = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        numbers = json.loads(self.rfile.read(int(self.headers["content-length"])))
        now = time.monotonic()
        with self.lock:
            allowed = len(self.calls) < CALLS_A_SECOND or now - self.calls[0] >= 1.0
            if allowed:
                self.calls.append(now)
                Api.answered += 1
            else:
                Api.refused += 1
        if allowed:
            time.sleep(0.02 + 0.001 * len(numbers))
        body = json.dumps([n * n for n in numbers] if allowed else {"error": "too many calls"}).encode()
        self.send_response(200 if allowed else 429)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class Limit:
    """At most ``calls`` in any ``seconds``: a call waits until the one so many before it is long enough ago."""

    def __init__(self, calls: int, seconds: float) -> None:
        self._times: deque[float] = deque([-math.inf] * calls, maxlen=calls)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        at = max(time.monotonic(), self._times[0] + self._seconds)
        self._times.append(at)
        await asyncio.sleep(at - time.monotonic())

    async def __aexit__(self, *_: object) -> None:
        pass


async def send(batcher: Any, items: int, rate: float) -> list[int]:
    rng = random.Random(3)
    calls = []
    for number in range(items):
        calls.append(asyncio.ensure_future(batcher(number)))
        await asyncio.sleep(rng.expovariate(rate))
    squares: list[int] = await asyncio.gather(*calls)
    return squares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--rate", type=float, default=100.0, help="items a second")
    parser.add_argument("--slo", default="e2e=2s@99%", help="latency target; what cannot meet it is rejected")
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")
    for name in ("items", "rate"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    limit = Limit(CALLS_A_SECOND - 1, 1.05)  # a little below, for clocks differ
    url = f"http://127.0.0.1:{server.server_port}/square"

    async def square(numbers: list[int]) -> list[int]:
        async with limit, httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(url, json=numbers, timeout=10)
        answer.raise_for_status()
        squares: list[int] = answer.json()
        return squares

    with Batcher(square, slo=slo, call_price_ms=math.inf, concurrency=2) as batcher:
        squares = asyncio.run(send(batcher, args.items, args.rate))
    server.shutdown()
    server.server_close()

    right = sum(found == number * number for number, found in enumerate(squares))
    print(f"{right} of {args.items} right, in {Api.answered} calls; {Api.refused} calls were refused")
    print(f"one item a call, the limit would have taken {args.items / CALLS_A_SECOND:.0f} s")


if __name__ == "__main__":
    main()
