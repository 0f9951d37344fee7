"""A load over HTTP, with nothing but the standard library: streaming completions, each by a thread of its own."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Request(NamedTuple):
    """A request: seconds after the first one, prompt, and output tokens."""

    at: float
    prompt: list[int]
    output: int


class Answered(NamedTuple):
    """Seconds from when it was due to its first token and its last, and how many came. ``error``: empty, or what was wrong."""

    first_s: float
    last_s: float
    tokens: int
    error: str = ""


def load(count: int, rate: float | None, *, prompt: int, output: int, vocabulary: int, seed: int) -> list[Request]:
    """``count`` requests by Poisson at ``rate`` a second (None: all at once), of ``prompt`` and ``output`` tokens on average,
    uniform from half to one and a half times that."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        tokens = [rng.randrange(300, vocabulary) for _ in range(rng.randint(prompt // 2, prompt * 3 // 2))]
        found.append(Request(at, tokens, rng.randint(max(2, output // 2), output * 3 // 2)))
        at += 0.0 if rate is None else rng.expovariate(rate)
    return found


def send(url: str, requests: Sequence[Request], *, timeout_s: float = 120.0) -> tuple[list[Answered], float]:
    """Send each when it is due. Returns the answers, in the order of ``requests``, and the seconds until the last."""
    answers = [Answered(0.0, 0.0, 0, "it was never answered")] * len(requests)
    begun = time.perf_counter() + 0.05
    model = _model(url)

    def one(number: int, request: Request) -> None:
        time.sleep(max(0.0, begun + request.at - time.perf_counter()))
        try:
            answers[number] = _stream(url, model, request, begun + request.at, timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers[number] = Answered(0.0, 0.0, 0, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + requests[-1].at)
    return answers, time.perf_counter() - begun


def summary(answers: Sequence[Answered], seconds: float) -> dict[str, Any]:
    """Rates, and latencies in ms."""
    good = [a for a in answers if not a.error]
    found: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({a.error for a in answers if a.error})[:5],
        "requests_per_s": round(len(good) / seconds, 3),
        "tokens_per_s": round(sum(a.tokens for a in good) / seconds, 1),
    }
    each = {
        "ttft_ms": [a.first_s * 1e3 for a in good],
        "tpot_ms": [(a.last_s - a.first_s) / (a.tokens - 1) * 1e3 for a in good if a.tokens > 1],
    }
    for name, values in each.items():
        if values:
            ordered = sorted(values)
            found[name] = {
                "p50": round(statistics.median(ordered), 2),
                "p99": round(ordered[-1 - len(ordered) // 100], 2),
            }
    return found


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


def _model(url: str) -> str:
    connection = _connect(url, 30.0)
    try:
        connection.request("GET", "/v1/models")
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])
    finally:
        connection.close()


def _stream(url: str, model: str, request: Request, due: float, timeout_s: float) -> Answered:
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.output, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = _connect(url, timeout_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return Answered(0.0, 0.0, 0, f"{answer.status}: {answer.read()[:200].decode(errors='replace')}")
        first = last = tokens = 0.0
        for line in answer:
            text = line.strip()
            if not text.startswith(b"data:") or text == b"data: [DONE]":
                continue
            event = json.loads(text[5:])
            if event.get("choices"):
                last = time.perf_counter() - due
                first = first or last
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        return Answered(
            first, last, int(tokens), "" if tokens == request.output else f"{tokens} of {request.output} tokens came"
        )
    finally:
        connection.close()
