"""The application over a real engine whose model is a stand-in: routes, errors, health, what a stream looks like."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models

from runtime.errors import DeviceError
from runtime.llm.engine import Engine
from runtime.llm.plan import StepPlan, StepResult, Token
from runtime.llm.prefill_rate import RateSource
from runtime.llm.stream import TokenLogprob
from runtime.records import FinishReason
from runtime.request import Sequence
from runtime.serving.answers import ChatShape, CompletionShape, TokenText
from runtime.serving.app import Api, create_app
from runtime.serving.run import CUT_SHORT, DONE, Server, _until_stopped
from runtime.slo import SLO, RequestClass
from tests.engines import Bench, bench
from tests.fakes import EOS, ByteTokenizer, FakeExecutor, FakeModel, count_up

ABC = [97, 98, 99]  # continued by the stand-in with "defgh…"


class Client(httpx.AsyncClient):
    """Speaks to an application in this process."""

    def __init__(self, api: Api) -> None:
        self.api = api
        transport = httpx.ASGITransport(create_app(api), raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://test")

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", json={"prompt": ABC, "max_tokens": 4, **body})


@asynccontextmanager
async def served(
    sample: Callable[[Sequence], int] = count_up, model: FakeModel | None = None, **options: Any
) -> AsyncIterator[tuple[Client, Bench]]:
    with bench(sample, model, **options) as b:
        async with Client(Api(b.engine)) as client:
            yield client, b


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event but the last, which must be the mark of the end."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = response.text.split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: {") and "\n" not in part for part in parts)
    return [json.loads(part[6:]) for part in parts]


async def test_requests_are_sampled_as_the_model_says_where_they_do_not() -> None:
    seen: list[float] = []

    def sample(sequence: Sequence) -> int:
        seen.append(sequence.request.params.temperature)
        return count_up(sequence)

    async with served(sample, FakeModel(sampling_defaults={"temperature": 0.6})) as (client, _):
        await client.complete(max_tokens=1)
        await client.complete(max_tokens=1, temperature=0.2)
    assert seen == [0.6, 0.2]


class FragileTokenizer(ByteTokenizer):
    """Knows no token behind the letter that it is made with, as a vocabulary that is padded."""

    def __init__(self, last: int) -> None:
        self.last = last

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        if any(token > self.last for token in ids):
            raise IndexError("no such piece")
        return super().decode(ids)


class ChattingTokenizer(ByteTokenizer):
    """With a chat template: the contents, one behind the other."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


class WatchedTokenizer(ChattingTokenizer):
    """Remembers in which threads it was asked."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, text: str) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text)


async def test_a_whole_answer() -> None:
    async with served() as (client, b):
        answer = (await client.complete(model="fake")).json()
        record = b.heard.request()
    assert answer.pop("id") == record.id and record.id.startswith("cmpl-")
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "defg", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip


async def test_the_user_of_a_request_is_the_tenant_of_the_engine() -> None:
    async with served() as (client, b):
        for body, tenant in (({"user": "alice"}, "alice"), ({"user": None}, ""), ({}, "")):
            await client.complete(**body)
            assert b.heard.request().tenant == tenant


async def test_a_stream_has_an_event_for_each_token() -> None:
    async with served() as (client, _):
        found = events(await client.complete(stream=True))
    assert len({event["id"] for event in found}) == 1
    assert [event["choices"] for event in found] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in (("d", None), ("e", None), ("f", None), ("g", "length"))
    ]
    assert all(event["object"] == "text_completion" and "usage" not in event for event in found)


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_in_a_stream(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    async with served() as (client, _):
        *tokens, last = events(await client.complete(prompt="abc", stream=True, stream_options=options))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4 and last["usage"]["prompt_tokens"] == 3
    so_far = [{"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n} for n in (1, 2, 3, 4)]
    assert [event["usage"] for event in tokens] == (so_far if continuous else [None] * 4)


async def test_many_prompts_are_many_choices() -> None:
    prompts = [[97], [100], [103]]
    async with served() as (client, _):
        whole = (await client.complete(prompt=prompts)).json()
        assert [choice["text"] for choice in whole["choices"]] == ["bcde", "efgh", "hijk"]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert whole["usage"]["prompt_tokens"] == 3 and whole["usage"]["completion_tokens"] == 12
        found = events(await client.complete(prompt=prompts, stream=True))
    texts = ["", "", ""]
    for event in found:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["bcde", "efgh", "hijk"] and len(found) == 12


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with served() as (client, _):
        (choice,) = (await client.complete(stop=["fg"], max_tokens=20)).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("de", "stop")
        found = events(await client.complete(stop="fg", max_tokens=20, stream=True))
    assert "".join(event["choices"][0]["text"] for event in found) == "de"
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


async def test_ignore_eos() -> None:
    def sample(sequence: Sequence) -> int:
        return EOS if len(sequence.output) == 1 else 120

    async with served(sample) as (client, _):
        (choice,) = (await client.complete()).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("x", "stop")
        (choice,) = (await client.complete(ignore_eos=True)).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("xxx", "length")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"echo": True}, "echo", "echo is true; it is not supported here"),
        ({"n": 2}, "n", "n is 2; it is not supported here: it must be 1"),
        ({"temperature": 500}, "temperature", "temperature is 500.0; it must be at least 0 and at most 100"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be a whole number at least 1"),
        ({"max_tokens": 999}, "prompt", "prompt (3 tokens) + max_tokens (999) is 1002; the context of fake is 256"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": [1, 999]}, "prompt", "prompt holds token id 999; fake has a vocabulary of 257"),
        ({"prompt": [[97], [999]]}, "prompt", "prompt holds token id 999"),
    ],
)
async def test_bad_input_is_400_and_names_field_value_and_bound(body: dict[str, Any], param: str, says: str) -> None:
    async with served() as (client, b):
        answer = await client.complete(**body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == param
        assert error["message"].startswith(says)
        assert (await client.complete()).status_code == 200
        assert b.engine.view().running == 0


async def test_a_body_that_is_no_json() -> None:
    async with served() as (client, _):
        json_type = {"content-type": "application/json"}
        broken = await client.post("/v1/completions", content=b'{"prompt": ', headers=json_type)
        assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]["message"]
        for body in (b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}"):
            answer = await client.post("/v1/completions", content=body, headers=json_type)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        form = await client.post("/v1/completions", data={"prompt": "a"})
        assert form.status_code == 400 and "content-type: application/json" in form.json()["error"]["message"]


async def test_what_is_not_here_is_404() -> None:
    async with served() as (client, _):
        answer = await client.complete(model="gpt-5")
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "model is 'gpt-5'; this server has 'fake'",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert (await client.get("/v1/models/gpt-5")).status_code == 404
        assert (await client.get("/v2")).json()["error"]["message"] == "GET /v2: there is no such path"
        other = await client.get("/v1/completions")
        assert other.status_code == 405
        assert other.json()["error"]["message"] == "GET /v1/completions: this path takes POST"
        assert other.json()["error"]["code"] == "method_not_allowed"


async def test_models() -> None:
    async with served() as (client, _):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["id"] == "fake" and card["object"] == "model" and card["max_model_len"] == 256
        assert (await client.get("/v1/models/fake")).json() == card


@pytest.mark.parametrize(("options", "longest"), [({"max_model_len": 40}, 40), ({"kv_tokens": 64}, 64)])
async def test_the_context_of_the_model_card_is_what_the_engine_takes(options: dict[str, Any], longest: int) -> None:
    async with served(**options) as (client, _):
        assert (await client.get("/v1/models/fake")).json()["max_model_len"] == longest
        assert (await client.complete(max_tokens=longest - len(ABC))).status_code == 200
        assert (await client.complete(max_tokens=longest - len(ABC) + 1)).status_code == 400


async def test_a_model_without_a_chat_template() -> None:
    async with served() as (client, _):
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert "use /v1/completions" in answer.json()["error"]["message"]


async def test_a_chat_without_a_tokenizer_says_why_there_is_none() -> None:
    why = "the tokenizer of fake cannot be loaded (OSError: damaged)"
    for error, said in (("", "fake has no tokenizer"), ("OSError: damaged", why)):
        async with served(model=FakeModel(tokenizer=None, tokenizer_error=error)) as (client, _):
            answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"messages: {said}; ")


async def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    async with served(max_queue=1) as (client, b):
        b.executor.hold()
        first = asyncio.create_task(client.complete())
        await asyncio.to_thread(b.held)
        second = asyncio.create_task(client.complete())
        while b.engine._loop._on_the_way == 0:
            await asyncio.sleep(0.001)
        third = await client.complete()
        several = await client.complete(prompt=[[97], [98]])
        b.executor.go()
        assert (await first).status_code == (await second).status_code == 200
        for refused in (third, several):
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1 and int(refused.headers["retry-after-ms"]) >= 1


async def test_a_list_of_prompts_is_refused_as_a_whole() -> None:
    """Those that had been queued before one found the queue full were refused by the server: they are misses, as that one."""
    async with served(max_queue=2) as (client, b):
        b.executor.hold()
        first = asyncio.create_task(client.complete(max_tokens=2))
        await asyncio.to_thread(b.held)
        refused = await client.complete(prompt=[[97], [98], [99], [100]])
        b.executor.go()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        await first
        ended = [b.heard.request() for _ in range(4)]
        told = (await client.get("/metrics")).text
    for why, count in (("queue_full", 1), ("same_call", 2)):
        assert f'autotune_requests_rejected_total{{why="{why}"}} {count}.0' in told
    assert Counter((r.reason, r.cause) for r in ended) == {
        (FinishReason.LENGTH, ""): 1,
        (FinishReason.REJECTED, "queue_full"): 1,
        (FinishReason.REJECTED, "same_call"): 2,  # and the fourth was never sent
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_where_one_of_a_list_fails_the_others_are_no_wish_of_the_client(stream: bool) -> None:
    def sample(sequence: Sequence) -> int:
        if sequence.request.prompt == (98,):
            raise ArithmeticError("overheated")
        return count_up(sequence)

    async with served(sample) as (client, b):
        answer = await client.complete(prompt=[[97], [98]], max_tokens=200, stream=stream)
        assert "overheated" in answer.text
        ended = [b.heard.request() for _ in range(2)]
    assert {r.reason for r in ended} <= {FinishReason.ERROR, FinishReason.LENGTH}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_closing_server_cuts_is_a_miss_and_its_client_hears_as_before(stream: bool) -> None:
    async with served(slo="ttft=9s") as (client, b):
        b.executor.hold()
        answer = asyncio.create_task(client.complete(max_tokens=200, stream=stream))
        await asyncio.to_thread(b.held)
        closing = asyncio.create_task(asyncio.to_thread(b.engine.close, False))
        while not b.engine.closed:
            await asyncio.sleep(0.001)
        b.executor.go()
        await closing
        if not stream:
            assert (await answer).status_code == 503
        assert '"code":"cancelled"' in (await answer).text.replace(" ", "")
        record = b.heard.request()
        told = (await client.get("/metrics")).text
    assert (record.reason, record.cause) == (FinishReason.ERROR, "the engine was closed")
    assert 'autotune_slo_violations_total{metric="completion"} 1.0' in told
    assert 'autotune_requests_total{reason="error"} 1.0' in told


async def test_what_would_come_too_late_is_429_with_a_hint_streamed_or_not() -> None:
    class Slow(RateSource):
        prefill_rate = 0.5

    async with served(slo="ttft=100ms", admission=True) as (client, b):
        b.engine.set_admission(True, source=Slow())
        assert (await client.complete()).status_code == 200, "with nothing before it, the first is let in"
        for refused in (await client.complete(), await client.complete(stream=True)):
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "slo"
            assert "its first token is predicted after" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 5
        told = (await client.get("/metrics")).text
        assert 'autotune_requests_rejected_total{why="slo"} 2.0' in told
        assert 'autotune_requests_rejected_total{why="queue_timeout"} 0.0' in told


async def test_what_is_relegated_is_answered_and_counted_by_class() -> None:
    class Slow(RateSource):
        prefill_rate = 0.5

    batch = RequestClass("batch", SLO(ttft_ms=100), 0.2)
    async with served(slo="ttft=100ms", classes=[batch], admission=True) as (client, b):
        b.engine.set_admission(True, source=Slow())
        assert (await client.complete()).status_code == 200, "with nothing before it, the first is let in"
        assert (await client.complete(request_class="batch")).status_code == 200
        assert (await client.complete()).status_code == 429
        told = (await client.get("/metrics")).text
        assert 'autotune_requests_relegated_total{class="batch"} 1.0' in told
        assert 'autotune_requests_relegated_total{class="default"} 0.0' in told
        assert 'autotune_requests_rejected_total{why="slo"} 1.0' in told


def fails_at(count: int) -> Callable[[Sequence], int]:
    def sample(sequence: Sequence) -> int:
        if len(sequence.output) == count:
            raise ArithmeticError("overheated")
        return count_up(sequence)

    return sample


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_500(stream: bool) -> None:
    async with served(fails_at(0)) as (client, _):
        answer = await client.complete(stream=stream)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error" and answer.json()["error"]["code"] == "step_failed"
    assert "overheated" in answer.json()["error"]["message"]


async def test_a_failure_later_is_an_event() -> None:
    async with served(fails_at(2)) as (client, _):
        answer = await client.complete(stream=True)
        assert answer.status_code == 200
        *tokens, error = events(answer)
        assert [event["choices"][0]["text"] for event in tokens] == ["d", "e"]
        assert error["error"]["code"] == "step_failed"
        assert (await client.complete()).status_code == 500


async def test_health_and_what_a_dead_engine_answers() -> None:
    async with served() as (client, b):
        assert (await client.get("/health")).json() == {"status": "ok"}
        b.engine.close()
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        answer = await client.complete()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_closed"
        assert "autotune_up 0.0" in (await client.get("/metrics")).text


async def test_a_lost_device_ends_what_runs_and_the_health_check_names_it() -> None:
    async with served() as (client, b):
        b.executor.hold()
        running = asyncio.create_task(client.complete())
        await asyncio.to_thread(b.held)
        b.executor.error = DeviceError("cuda:0 cannot be used any more")
        b.executor.go()
        answer = await running
        assert answer.status_code == 503 and "cuda:0 cannot be used any more" in answer.json()["error"]["message"]
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "dead", "error": "cuda:0 cannot be used any more"}
        refused = await client.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_closed"
        assert "cuda:0 cannot be used any more" in refused.json()["error"]["message"]


async def test_draining_finishes_what_there_is_and_takes_nothing_new() -> None:
    async with served() as (client, b):
        b.executor.hold()
        running = asyncio.create_task(client.complete(stream=True))
        await asyncio.to_thread(b.held)
        client.api.lifecycle.drain()
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining", "active": 1})
        refused = await client.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
        idle = asyncio.create_task(client.api.lifecycle.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        b.executor.go()
        assert len(events(await running)) == 4
        await asyncio.wait_for(idle, 10)


async def test_a_body_that_never_comes_does_not_hold_up_the_drain() -> None:
    """Nor one that begins to come while the server drains: both are answered at once, and count as nothing under way."""
    reading = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        reading.set()
        await asyncio.Event().wait()

    async with served() as (client, _):
        before = asyncio.create_task(client.post("/v1/completions", content=body()))
        await reading.wait()
        assert client.api.lifecycle.active == 0
        client.api.lifecycle.drain()
        during = client.post("/v1/completions", content=body())
        for answer in (await asyncio.wait_for(before, 10), await asyncio.wait_for(during, 10)):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
            assert answer.headers["retry-after"] == "1"
        await asyncio.wait_for(client.api.lifecycle.idle(), 10)


async def test_a_body_in_parts_begins_with_the_last_of_them() -> None:
    async with served() as (client, b):
        active: list[int] = []

        async def body() -> AsyncIterator[bytes]:
            for part in (b'{"prompt": [97],', b' "max_tokens": 2', b"}"):
                yield part
                active.append(client.api.lifecycle.active)

        b.executor.hold()
        answer = asyncio.create_task(
            client.post("/v1/completions", content=body(), headers={"content-type": "application/json"})
        )
        await asyncio.to_thread(b.held)
        assert active == [0, 0, 0] and client.api.lifecycle.active == 1
        b.executor.go()
        assert (await answer).json()["choices"][0]["text"] == "bc"
        assert client.api.lifecycle.active == 0


class Interrupted(Server):
    """Is told to stop as soon as it serves."""

    def __init__(self) -> None:
        self.should_exit = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        signal.raise_signal(signal.SIGTERM)
        while not self.should_exit:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("active", [0, 1])
async def test_without_grace_only_what_is_active_is_cut(active: int, caplog: pytest.LogCaptureFixture) -> None:
    with bench() as b, socket.socket() as bound:
        api = Api(b.engine)
        for _ in range(active):
            api.lifecycle.begin()
        assert await _until_stopped(api, Interrupted(), bound, 0.0) == (CUT_SHORT if active else DONE)
    assert ("cutting 1 request after 0 s of grace" in caplog.messages) is bool(active)


async def test_priorities_reach_the_engine() -> None:
    async with served(ordering="priority") as (client, b):
        for priority in (3, -2):
            await client.complete(priority=priority)
            assert b.heard.request().priority == priority
        assert (await client.complete(priority="high")).json()["error"]["param"] == "priority"


async def test_classes_reach_the_engine_and_others_are_refused() -> None:
    classes = [RequestClass("chat", SLO(ttft_ms=300), 2.0)]
    async with served(slo="ttft=500ms", classes=classes) as (client, b):
        for name in ("chat", "default"):
            await client.complete(request_class=name)
            assert b.heard.request().request_class == name
        answer = await client.complete(request_class="caht")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_class"
        assert "'caht'; the classes are chat, default" in answer.json()["error"]["message"]


async def test_a_tokenizer_that_fails_in_mid_stream_is_an_event_too() -> None:
    async with served(model=FakeModel(tokenizer=FragileTokenizer(ord("f")))) as (client, _):
        answer = await client.complete(stream=True, max_tokens=8)
    assert answer.status_code == 200
    *tokens, error = events(answer)
    assert tokens and error["error"]["code"] == "internal_error" and "no such piece" in error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "\ud83d"}, "suffix"),
        ({"stop": ["\ud83d", ""]}, "stop"),
        ({"\ud83d": 1}, None),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"user": "\ud83d"}, "user"),
    ],
)
async def test_half_an_emoji_is_400(body: dict[str, Any], param: str | None) -> None:
    async with served() as (client, _):
        content = json.dumps({"prompt": ABC, **body}).encode()  # escaped, as browsers send it
        answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param is None or error["message"].startswith(param)


async def test_many_short_texts_are_tokenised_beside_the_event_loop() -> None:
    tokenizer = WatchedTokenizer()
    async with served(model=FakeModel(tokenizer=tokenizer, max_model_len=1000)) as (client, _):
        few = await client.complete(prompt=["abc"] * 3, max_tokens=1)
        here = {*tokenizer.threads}
        tokenizer.threads.clear()
        many = await client.complete(prompt=["a" * 400] * 20, max_tokens=1)
    assert (few.status_code, many.status_code) == (200, 200)
    assert here == {threading.get_ident()} and threading.get_ident() not in tokenizer.threads


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 200,
        [{"role": "r" * 5000, "content": "a"}],
        [{"role": "user", "content": "a", "name": "n" * 5000}],
        [{"role": "user", "content": [{"type": "text", "text": "a" * 100}] * 50}],
    ],
    ids=["many messages", "long role", "long name", "long parts"],
)
async def test_a_long_chat_is_tokenised_beside_the_event_loop(messages: list[Any]) -> None:
    tokenizer = WatchedTokenizer()
    async with served(model=FakeModel(tokenizer=tokenizer, max_model_len=6000), kv_tokens=6016) as (client, _):
        for chat, aside in (([{"role": "user", "content": "a"}] * 3, False), (messages, True)):
            tokenizer.threads.clear()
            answer = await client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 1})
            assert answer.status_code == 200
            assert (threading.get_ident() not in tokenizer.threads) is aside


async def test_many_token_ids_are_checked_and_hashed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    submit = Engine.submit

    def watched(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return submit(*args, **options)

    monkeypatch.setattr(Engine, "submit", watched)
    async with served() as (client, _):
        for prompts, aside in (([ABC] * 3, False), ([[97] * 200] * 25, True), ([ABC] * 200, True)):
            threads.clear()
            assert (await client.complete(prompt=prompts, max_tokens=1)).status_code == 200
            assert (threading.get_ident() not in threads) is aside


@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_text_arrives_when_it_is_asked_for_not_when_a_thread_is_free_to_tokenise_it(chat: bool) -> None:
    gate, busy = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert gate.wait(30)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    text = "a" * 5000
    async with served(model=FakeModel(tokenizer=ChattingTokenizer(), max_model_len=6000), kv_tokens=6016) as (
        client,
        b,
    ):
        holding = asyncio.ensure_future(asyncio.to_thread(hold))
        while not busy.is_set():
            await asyncio.sleep(0.001)
        body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = asyncio.create_task(client.post(path, json={"max_tokens": 2, **body}))
        await asyncio.sleep(0.2)  # it waits for the thread by now
        freed = b.engine.clock.now()
        gate.set()
        await holding
        assert (await answer).status_code == 200
        record = await asyncio.to_thread(b.heard.request)
    assert record.arrival < freed and record.ttft is not None and record.ttft > freed - record.arrival


async def test_an_answer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []
    monkeypatch.setattr(Api, "_accepts", lambda api, body: checks.append(body))
    async with served(model=FakeModel(tokenizer=ChattingTokenizer())) as (client, _):
        await client.complete(max_tokens=1)
        await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        )
    assert len(checks) == 2


@pytest.mark.parametrize("chat", [False, True])
async def test_what_does_not_fit_into_the_context_has_the_code_that_clients_cut_prompts_by(chat: bool) -> None:
    async with served(model=FakeModel(tokenizer=ChattingTokenizer())) as (client, _):
        path, body = "/v1/completions", {"prompt": "a" * 300}
        if chat:
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}
        answer = await client.post(path, json={**body, "max_tokens": 1})
        wrong = await client.complete(prompt=[1, 999])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == ("messages" if chat else "prompt")
    assert answer.json()["error"]["message"].endswith("is 301; the context of fake is 256 tokens")
    assert wrong.json()["error"]["code"] == "invalid_value"


LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("decoder", [LLAMA_2, decoders.Metaspace(prepend_scheme="always")])
def test_a_token_has_its_space_where_the_tokenizer_drops_that_of_a_whole_text(decoder: Any) -> None:
    pieces = ["<unk>", "▁Hello", "▁world", "world", "▁", "!"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoder
    text = TokenText(tokenizer.decode)
    assert [text(token_id) for token_id in range(1, 6)] == [" Hello", " world", "world", " ", "!"]
    token = TokenLogprob(2, -0.1, ((2, -0.1), (3, -2.0)))
    told = CompletionShape(text).logprobs([token], [0])
    assert (told["tokens"], told["top_logprobs"]) == ([" world"], [{" world": -0.1, "world": -2.0}])
    (entry,) = ChatShape(text).logprobs([token], [0])["content"]
    assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [b" world", b"world"]


def test_a_piece_of_a_character_is_named_by_its_id() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = LLAMA_2
    text = TokenText(tokenizer.decode)
    assert (text(1), text.raw(1), text(2)) == ("token_id:1", None, "token_id:2")


def test_of_tokens_with_one_text_the_likeliest_is_named_by_it() -> None:
    shape = CompletionShape(TokenText(lambda ids: "".join("aab"[token_id] for token_id in ids)))
    told = shape.logprobs([TokenLogprob(0, -3.0, ((1, -0.5), (2, -1.0))), TokenLogprob(1, -0.5, ((1, -0.5),))], [0, 1])
    assert told["tokens"] == ["token_id:0", "a"]
    assert told["top_logprobs"] == [{"a": -0.5, "b": -1.0, "token_id:0": -3.0}, {"a": -0.5}]


def test_the_text_of_a_token_is_made_once() -> None:
    calls: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        calls.append(ids)
        return "x" * len(ids)

    CompletionShape(TokenText(decode)).logprobs([TokenLogprob(7, -1.0, ((7, -1.0),))] * 50, [0] * 50)
    assert len(calls) == 2


class Scored(FakeExecutor):
    """Says of every token that it has −3 and two others −1 and −∞."""

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        result = super().execute(plan, now, until)
        top = ((ord("a"), -1.0), (ord("b"), -math.inf))
        return result._replace(tokens=[Token(token.sequence, token.id, -3.0, top) for token in result.tokens])


async def test_log_probabilities_are_the_same_whole_and_streamed() -> None:
    """Offsets are places in the text, the sampled token is always told, and every number is one in JSON."""
    executor = Scored(lambda sequence: b"\xc3\xa9xy"[len(sequence.output)])
    body = {"max_tokens": 4, "logprobs": 2}
    with closing(Engine(FakeModel(), executor=executor, kv_tokens=1024)) as engine:
        async with Client(Api(engine)) as client:
            (choice,) = (await client.complete(**body)).json()["choices"]
            streamed = [event["choices"][0]["logprobs"] for event in events(await client.complete(**body, stream=True))]
    names = ["token_id:195", "token_id:169", "x", "y"]
    assert choice["text"] == "éxy" and choice["logprobs"] == {
        "tokens": names,
        "token_logprobs": [-3.0] * 4,
        "top_logprobs": [{"a": -1.0, "b": -9999.0, name: -3.0} for name in names],
        "text_offset": [0, 0, 1, 2],
    }
    assert {field: [value for told in streamed for value in told[field]] for field in choice["logprobs"]} == choice[
        "logprobs"
    ]


async def test_housekeeping_that_fails_is_tried_again_and_keeps_nobody_else_from_theirs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runtime.serving.app.HOUSEKEEPING_S", 0.01)
    calls: list[str] = []

    def full() -> None:
        calls.append("full")
        raise OSError(28, "No space left on device")

    with bench() as b:
        api = Api(b.engine, keep=(full, lambda: calls.append("other")))
        async with api.lifespan(create_app(api)):
            while calls.count("other") < 3:
                await asyncio.sleep(0.01)
    assert calls.count("full") >= 3
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


async def test_the_last_housekeeping_waits_for_one_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the file of records is closed while it writes."""
    monkeypatch.setattr("runtime.serving.app.HOUSEKEEPING_S", 0.01)
    begun, inside = threading.Event(), list[int]()
    beside: list[int] = []

    def slow() -> None:
        inside.append(0)
        beside.append(len(inside))
        begun.set()
        time.sleep(0.1)
        inside.pop()

    with bench() as b:
        api = Api(b.engine, keep=(slow,))
        async with api.lifespan(create_app(api)):
            await asyncio.to_thread(begun.wait, 30)
        assert not inside
    assert len(beside) >= 2 and set(beside) == {1}
