"""The server with a real model: what it answers is what the engine says, and a client that leaves takes nothing with it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from runtime import Engine
from runtime.records import FinishReason, RequestRecord
from runtime.serving.app import Api
from tests.fakes import Heard
from tests.integration.live_server import in_thread
from tests.integration.small_model import CONTEXT, TOKENS, SmallModel, engine_for, forward_of, small_model


@pytest.fixture(scope="module")
def small() -> SmallModel:
    return small_model()


@pytest.fixture(scope="module")
def engine(small: SmallModel) -> Iterator[Engine]:
    with engine_for(small.loaded, slo="ttft=60s,tpot=10s") as engine:
        yield engine


@pytest.fixture(scope="module")
def live(engine: Engine) -> Iterator[tuple[Api, str]]:
    with in_thread(engine) as found:
        yield found


@asynccontextmanager
async def client_of(live: tuple[Api, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=live[1], timeout=60) as client:
        yield client


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    found = []
    async with client.stream("POST", path, json={"stream": True, "temperature": 0, **body}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                found.append(line.removeprefix("data: "))
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


async def test_answers_are_what_generate_says(small: SmallModel, engine: Engine, live: tuple[Api, str]) -> None:
    """All prompts at once, whole and streamed."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    expected = [tokenizer.decode(list(reference)) for reference in small.references]
    async with client_of(live) as client:
        bodies = [{"prompt": list(p), "max_tokens": TOKENS, "temperature": 0} for p in small.prompts]
        whole = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert [answer.json()["choices"][0]["text"] for answer in whole] == expected
        streamed = await asyncio.gather(*(stream(client, "/v1/completions", body) for body in bodies))
        together = (
            await client.post("/v1/completions", json=bodies[0] | {"prompt": [b["prompt"] for b in bodies]})
        ).json()
    assert ["".join(e["choices"][0]["text"] for e in events) for events in streamed] == expected
    assert all(len(events) == TOKENS for events in streamed)
    assert [choice["text"] for choice in together["choices"]] == expected


async def test_chat_goes_through_the_template(live: tuple[Api, str], engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界"}]
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 世界<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    expected = engine.generate([tokenizer.encode(written)], max_tokens=20)[0]
    body = {"messages": messages, "max_completion_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    async with client_of(live) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        events = await stream(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert whole["usage"]["prompt_tokens"] == expected.record.prompt_tokens == len(tokenizer.encode(written))
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0].pop("role") == "assistant" and all(set(delta) == {"content"} for delta in deltas)
    assert "".join(delta["content"] for delta in deltas) == expected.text
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 19 + ["length"]
    told = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
    assert [t["token"] for t in told] == [t["token"] for t in choice["logprobs"]["content"]]
    for entry in told:
        assert len(entry["top_logprobs"]) == 2 and entry["logprob"] == pytest.approx(
            entry["top_logprobs"][0]["logprob"]
        )
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]


async def test_logprobs_of_completions(live: tuple[Api, str], engine: Engine) -> None:
    expected = engine.generate([[1, 2, 3]], max_tokens=6, logprobs=3)[0]
    body = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "logprobs": 3}
    async with client_of(live) as client:
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        events = await stream(client, "/v1/completions", body)
    assert expected.logprobs is not None
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([t.logprob for t in expected.logprobs])
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3] * 6
    one_by_one = [value for event in events for value in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert one_by_one == pytest.approx(choice["logprobs"]["token_logprobs"])


async def test_a_stop_string_across_tokens(live: tuple[Api, str], engine: Engine) -> None:
    text = engine.generate([[1, 2, 3]], max_tokens=40)[0].text
    stop = text[10:14]
    body = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "stop": [stop]}
    async with client_of(live) as client:
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        events = await stream(client, "/v1/completions", body)
    assert choice == {"index": 0, "text": text[: text.index(stop)], "logprobs": None, "finish_reason": "stop"}
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


async def test_a_seed_repeats_itself_in_any_company(live: tuple[Api, str]) -> None:
    body = {"prompt": "a", "max_tokens": 20, "seed": 7, "temperature": 1.0, "top_p": 0.9, "min_p": 0.01}
    async with client_of(live) as client:
        alone = (await client.post("/v1/completions", json=body)).json()["choices"]
        others = [client.post("/v1/completions", json=body | {"seed": n}) for n in (7, 8, 9)]
        again, *rest = [answer.json()["choices"] for answer in await asyncio.gather(*others)]
    assert again == alone and all(other != alone for other in rest)


class Slow:
    """Every step takes at least ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, forward: Callable[..., Any], ids: Any, arguments: dict[str, Any]) -> Any:
        time.sleep(self.seconds)
        return forward(**arguments)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


@pytest.mark.parametrize("kind", ["streamed", "whole", "in the queue", "many prompts"])
async def test_a_client_that_leaves_frees_its_blocks(
    small: SmallModel, engine: Engine, live: tuple[Api, str], kind: str
) -> None:
    """Its connection is closed in the middle; the request ends, and its blocks come back, long before it is done."""
    heard = Heard(time.monotonic())
    stop = engine.subscribe(heard)
    prompt: Any = [list(small.prompts[0]), list(small.prompts[1])] if kind == "many prompts" else list(small.prompts[0])
    body = {"prompt": prompt, "max_tokens": 180, "stream": kind in ("streamed", "many prompts")}
    before = engine.knobs
    if kind == "in the queue":
        engine.set_knobs(before.with_(max_batch_size=1))
    try:
        with forward_of(small.loaded, Slow(0.03)):
            first = engine.submit(small.prompts[2], max_tokens=180) if kind == "in the queue" else None
            async with client_of(live) as client:
                if body["stream"]:
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        await anext(answer.aiter_lines())
                        assert engine.view().kv_free_blocks < engine.view().kv_total_blocks
                else:
                    asking = asyncio.create_task(client.post("/v1/completions", json=body))
                    await until(lambda: engine.view().running + engine.view().waiting >= (2 if first else 1))
                    asking.cancel()
            if first is not None:
                await until(lambda: engine.view().waiting == 0)
                first.cancel()
            await until(lambda: engine.view().running + engine.view().waiting == 0)
        assert engine.view().kv_free_blocks == engine.view().kv_total_blocks
        ended = [heard.request() for _ in range(2 if kind in ("in the queue", "many prompts") else 1)]
        assert {record.reason for record in ended} == {FinishReason.CANCELLED}
        assert all(record.output_tokens < 180 for record in ended)
    finally:
        stop()
        engine.set_knobs(before)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_a_client_that_hangs_up_leaves_no_traceback(
    small: SmallModel,
    engine: Engine,
    live: tuple[Api, str],
    streamed: bool,
    after_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Politely or with a reset, before the first token or between two."""
    url = httpx.URL(live[1])
    body = {"prompt": [[1, 2, 3]] * 2, "max_tokens": 180, "ignore_eos": True, "stream": streamed}
    text = json.dumps(body).encode()
    heard = Heard(time.monotonic())
    stop = engine.subscribe(heard)
    try:
        with forward_of(small.loaded, Slow(0.02)):
            for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):
                with socket.create_connection((url.host, url.port)) as raw:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    raw.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
                    await until(lambda: engine.view().running + engine.view().waiting > 0)
                    await asyncio.sleep(after_s)
                await until(lambda: not live[0].lifecycle.active)
                await until(lambda: engine.view().running + engine.view().waiting == 0)
        assert {heard.request().reason for _ in range(4)} == {FinishReason.CANCELLED}
    finally:
        stop()
    gc.collect()  # asyncio tells of a future whose end nobody heard when it goes
    await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR], caplog.text


async def test_a_reader_that_stalls_holds_nobody_up(small: SmallModel, live: tuple[Api, str]) -> None:
    host, port = live[1].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=64)
    body = json.dumps({"prompt": [1, 2], "max_tokens": 150, "stream": True, "logprobs": 5, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    async with client_of(live) as client:
        done = await client.post("/v1/completions", json={"prompt": list(small.prompts[0]), "max_tokens": 30})
    assert done.status_code == 200
    writer.close()
    await writer.wait_closed()
    del reader


class Permitted:
    """Each step waits for a permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(1)

    def __call__(self, forward: Callable[..., Any], ids: Any, arguments: dict[str, Any]) -> Any:
        assert self.permits.acquire(timeout=60), "the token before was not sent"
        return forward(**arguments)


async def test_each_token_is_sent_when_it_comes(small: SmallModel, engine: Engine, live: tuple[Api, str]) -> None:
    """The client gives the permit for a step when it has the token of the step before: it would wait for a heap for ever."""
    await until(lambda: engine.view().running + engine.view().waiting == 0)  # or another's step takes the permit
    events, steps = 0, Permitted()
    with forward_of(small.loaded, steps):
        async with client_of(live) as client:
            body = {"prompt": list(small.prompts[0]), "max_tokens": 8, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        events += 1
                        steps.permits.release()
    assert events == 8


async def test_metrics_are_the_records(small: SmallModel) -> None:
    """Of an engine of its own: what /metrics adds up to is what its records say."""
    records: list[RequestRecord] = []
    with engine_for(small.loaded, slo="ttft=60s,tpot=10s") as engine, in_thread(engine) as live:
        heard = Heard(time.monotonic())
        engine.subscribe(heard)
        async with client_of(live) as client:
            bodies = [
                {"prompt": list(p), "max_tokens": TOKENS, "stream": n % 2 == 0} for n, p in enumerate(small.prompts)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            assert all(answer.status_code == 200 for answer in answers)
            records = [heard.request() for _ in bodies]
            answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith("autotune_"))
    for name, wanted in (
        ("time_to_first_token", [r.ttft for r in records]),
        ("time_per_output_token", [r.tpot for r in records]),
        ("inter_token_latency", [gap for r in records for gap in r.itl]),
        ("e2e_latency", [r.e2e for r in records]),
    ):
        assert float(values[f"autotune_{name}_seconds_count"]) == len(wanted)
        assert float(values[f"autotune_{name}_seconds_sum"]) == pytest.approx(sum(v for v in wanted if v is not None))
    assert float(values['autotune_slo_attainment{class="default"}']) == 1
    assert float(values["autotune_output_tokens_total"]) == TOKENS * len(small.prompts)


async def test_long_texts_are_tokenised_aside(live: tuple[Api, str], engine: Engine) -> None:
    """Too long for the context, but long enough for the path: the answer names both numbers."""
    body = {"prompt": "x" * 5000, "max_tokens": 1}
    async with client_of(live) as client:
        answer = await client.post("/v1/completions", json=body)
        assert f"the context of small is {CONTEXT} tokens" in answer.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 400
    assert threading.active_count() < 50


@pytest.mark.slow
@pytest.mark.beside
def test_a_hundred_requests_leave_nothing(engine: Engine, live: tuple[Api, str]) -> None:
    """Requests one after the other over one connection: no request, block or open answer stays behind."""
    with httpx.Client(base_url=live[1], timeout=60) as client:
        for n in range(100):
            path = "/v1/completions" if n % 2 else "/v1/chat/completions"
            prompt: dict[str, Any] = {"prompt": "a"} if n % 2 else {"messages": [{"role": "user", "content": "a"}]}
            answer = client.post(path, json={**prompt, "max_tokens": 2, "stream": n % 3 == 0})
            assert answer.status_code == 200
    until = time.monotonic() + 30
    while live[0].lifecycle.active and time.monotonic() < until:  # a client has its last byte before the server is done
        time.sleep(0.01)
    assert live[0].lifecycle.active == 0
    assert engine.view().kv_free_blocks == engine.view().kv_total_blocks
