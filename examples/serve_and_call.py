"""Serve a model, call it over HTTP as any OpenAI client would, look at its metrics, and stop it without losing a request.

    python examples/serve_and_call.py [MODEL]

Needs the extra `serve`. Everything stays on 127.0.0.1. With the openai package the calls would be

    client = OpenAI(base_url=url + "/v1", api_key="none")
    for chunk in client.completions.create(model="tiny", prompt="Once", stream=True): ...
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any


def start(model: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """The server and its URL, which it prints when it can be called; port 0 takes a free one."""
    command = [sys.executable, "-m", "autotune", "serve", model, "--slo", "ttft=2s,tpot=200ms", "--port", "0"]
    server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    if " at http://" not in line:
        raise SystemExit(server.wait() or 1)
    print(line, end="")
    return server, line.split(" at ")[1].split()[0]


def ask(url: str, path: str, **body: Any) -> HTTPResponse:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=120)
    return answer


def events(answer: HTTPResponse) -> Iterator[Any]:
    """Server-sent events, as they come."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument("--kv-tokens", default="32768", help="size of the KV pool")
    args = parser.parse_args()

    server, url = start(args.model, "--kv-tokens", args.kv_tokens)
    try:
        print("one, as it comes: ", end="")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for event in events(ask(url, "/v1/completions", prompt="Once upon a time", max_tokens=args.tokens, **options)):
            print(event["choices"][0]["text"] if event["choices"] else f"\n{event['usage']}", end="", flush=True)
        print()

        chat = [{"role": "user", "content": "Tell me."}]
        with ask(url, "/v1/chat/completions", messages=chat, max_tokens=args.tokens, seed=1) as answer:
            print("chat:", json.load(answer)["choices"][0]["message"]["content"])

        try:
            ask(url, "/v1/completions", prompt="a", temperature=500)
        except urllib.error.HTTPError as error:
            print(f"refused with {error.code}: {json.load(error)['error']['message']}")

        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(
                    ("autotune_slo_attainment{", "autotune_knob_token_budget ", "autotune_requests_total")
                ):
                    print(line)
    finally:
        server.send_signal(signal.SIGTERM)  # finishes what runs
        code = server.wait(timeout=60)
    print("stopped with", code)


if __name__ == "__main__":
    main()
