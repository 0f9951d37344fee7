"""What goes in, and what comes out of every face."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from runtime import SLO, FinishReason, KnobLimits, Knobs, RejectedError, RequestClass, SamplingParams, StepFailedError
from runtime.llm.engine import Engine
from runtime.request import Sequence
from tests.engines import bench
from tests.fakes import EOS, FakeExecutor, FakeModel


def says(text: str) -> Any:
    """A sampler whose every output is ``text`` and then the end."""
    ids = [*text.encode(), EOS]
    return lambda sequence: ids[min(len(sequence.output), len(ids) - 1)]


def test_completion() -> None:
    with bench() as b:
        done = b.engine.submit("abc", max_tokens=4).result(timeout=30)
        assert (done.text, done.token_ids, done.finish_reason) == ("defg", (100, 101, 102, 103), FinishReason.LENGTH)
        assert done.logprobs is None
        assert done.record == b.heard.request()
        assert len(done.record.token_times) == 4 and done.record.prompt_tokens == 3
        assert done.record.arrival <= (done.record.scheduled or 0) <= done.record.token_times[0]


@pytest.mark.parametrize(
    ("params", "text", "tokens", "reason"),
    [
        ({}, "one, two, three", 16, FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": 20}, "one, two, three", 20, FinishReason.LENGTH),
        ({"max_tokens": 5}, "one, ", 5, FinishReason.LENGTH),
        ({"stop": "wo"}, "one, t", 8, FinishReason.STOP),
        ({"stop": ["three!", "o, th"]}, "one, tw", 12, FinishReason.STOP),
        ({"stop": "three!"}, "one, two, three", 16, FinishReason.STOP),
        ({"stop": "three!", "max_tokens": 12}, "one, two, th", 12, FinishReason.LENGTH),
        ({"stop_token_ids": [ord("w")]}, "one, t", 7, FinishReason.STOP),
        ({"stop": "e, ", "stop_token_ids": [ord(",")]}, "one", 4, FinishReason.STOP),
    ],
)
def test_how_it_ends(params: dict[str, Any], text: str, tokens: int, reason: FinishReason) -> None:
    with bench(says("one, two, three")) as b:
        whole = b.engine.submit("x", **params).result(timeout=30)
        events = list(b.engine.stream("x", **params))
        assert (whole.text, len(whole.token_ids), whole.finish_reason) == (text, tokens, reason)
        assert "".join(event.text for event in events) == text
        assert tuple(event.token_id for event in events) == whole.token_ids
        assert [event.position for event in events] == list(range(tokens))
        assert [event.finish_reason for event in events] == [None] * (tokens - 1) + [reason]


def test_a_stream_can_be_read_again_and_by_several() -> None:
    with bench(says("日本語")) as b:
        stream = b.engine.stream("x")
        first = list(stream)
        assert "".join(event.text for event in first) == "日本語" == stream.result(timeout=30).text
        results: list[list[Any]] = []
        readers = [threading.Thread(target=lambda: results.append(list(stream))) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout=30)
        assert results == [first] * 4


def test_max_tokens_none_fills_the_context() -> None:
    with bench(model=FakeModel(max_model_len=40)) as b:
        assert len(b.engine.submit([1, 2, 3], max_tokens=None).result(timeout=30).token_ids) == 37
    with bench(kv_tokens=32) as b:
        assert len(b.engine.submit([1, 2, 3], max_tokens=None).result(timeout=30).token_ids) == 29


def test_without_a_tokenizer() -> None:
    with bench(model=FakeModel(tokenizer=None)) as b:
        done = b.engine.submit([1, 2, 3], max_tokens=4).result(timeout=30)
        assert (done.text, done.token_ids) == ("", (4, 5, 6, 7))
        with pytest.raises(ValueError, match="fake has no tokenizer; give it as a list of token ids"):
            b.engine.submit("text")
        with pytest.raises(ValueError, match="no tokenizer; use stop_token_ids"):
            b.engine.submit([1], stop="x")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([1, 257], {}, "token id 257; fake has a vocabulary of 257"),
        ([1, -1, 2], {}, "token id -1; fake has a vocabulary of 257"),
        ([1.5], {}, "list of token ids"),
        (7, {}, "list of token ids"),
        (
            [1] * 10,
            {"max_tokens": 247},
            r"prompt \(10 tokens\) \+ max_tokens \(247\) is 257; the context of fake is 256",
        ),
        ([1] * 256, {"max_tokens": None}, r"is 257; the context of fake is 256"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ("half a character: \ud800", {}, "prompt cannot be tokenised"),
        ([1], {"max_tokens": 10**400}, "the context of fake is 256"),
        ([1], {"priority": 0.5}, "priority is 0.5"),
        ([1], {"priority": 10**400}, "it must be a whole number between -2147483647 and 2147483647"),
        ([1], {"tenant": ["t"]}, r"tenant is \['t'\]; it must be text"),
        ([1], {"tenant": None}, "tenant is None"),
        ([1], {"request_class": ["c"]}, "request_class is"),
        ([1], {"request_id": 7}, "request_id is 7"),
        ([1], {"deadline_s": -1}, "deadline_s is -1"),
        ([1], {"timeout_s": 0}, "timeout_s is 0"),
        ([1], {"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_what_cannot_run_is_refused_at_submit(prompt: Any, options: dict[str, Any], message: str) -> None:
    with bench(slo="ttft=500ms", ordering="fair") as b:
        with pytest.raises(ValueError, match=message):
            b.engine.submit(prompt, **options)
        assert b.engine.submit("a", max_tokens=1).result(timeout=30).text == "b"


def test_a_time_beyond_all_bounds_is_no_time() -> None:
    with bench() as b:
        done = b.engine.submit("a", max_tokens=1, deadline_s=10**400, timeout_s=float("inf")).result(timeout=30)
        assert done.text == "b"


def test_longer_than_the_pool_names_both_numbers() -> None:
    with bench(kv_tokens=64) as b:
        with pytest.raises(ValueError, match=r"prompt \(60 tokens\) \+ max_tokens \(5\) is 65; the KV pool holds 64"):
            b.engine.submit([1] * 60, max_tokens=5)
        assert len(b.engine.submit([1] * 60, max_tokens=4).result(timeout=30).token_ids) == 4


def test_options_of_submit() -> None:
    with bench() as b:
        with pytest.raises(TypeError, match=r"temprature is not an argument; .* temperature"):
            b.engine.submit("a", temprature=1.0)
        params = SamplingParams(max_tokens=2)
        assert b.engine.submit("a", params).result(timeout=30).text == "bc"
        assert b.engine.submit("a", params, max_tokens=3).result(timeout=30).text == "bcd"
        record = (
            b.engine.submit("a", params, tenant="t", request_class="chat", priority=3, request_id="mine")
            .result()
            .record
        )
        assert (record.tenant, record.request_class, record.priority, record.id) == ("t", "chat", 3, "mine")


def test_classes() -> None:
    chat = RequestClass("chat", SLO.parse("ttft=1s"))
    with bench(slo="ttft=500ms", classes=[chat]) as b:
        assert set(b.engine.slos) == {"default", "chat"}
        with pytest.raises(ValueError, match="request_class is 'caht'; the classes are chat, default"):
            b.engine.submit("a", request_class="caht")


def test_the_promise_can_be_changed_and_is_checked() -> None:
    with bench(slo="ttft=500ms", classes=[RequestClass("chat", "ttft=1s")]) as b:
        b.engine.set_slo("tpot=40ms")
        assert b.engine.slos == {"default": SLO(tpot_ms=40), "chat": SLO(ttft_ms=1000)}
        for wrong, message in (("tpot=40", "no unit"), (40, "slo is 40; it must be an SLO or text such as ttft=")):
            with pytest.raises(ValueError, match=message):
                b.engine.set_slo(wrong)  # type: ignore[arg-type]
        assert b.engine.submit("a", max_tokens=2).result(timeout=30).text == "bc"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue": 0}, "max_queue is 0"),
        ({"kv_tokens": 8}, "kv_tokens is 8; it must be a whole number of at least 16"),
        ({"prefix_cache": "all"}, "prefix_cache is 'all'"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"ordering": "lifo"}, "lifo"),
        ({"ordering": None}, "ordering is None; it must be one of priority, fcfs"),
        ({"slo": "tpot=50"}, "no unit"),
        ({"knobs": Knobs(token_budget=9000)}, "token_budget is 9000"),
        ({"kv_tokens": 10**15}, "kv_tokens is 1000000000000000; it must be at most 2147483648"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a whole number of 64 bits"),
        ({"classes": [1]}, "classes holds 1; each must be a RequestClass"),
        ({"limits": Knobs()}, r"limits is Knobs\(.*; it must be KnobLimits"),
        ({"knobs": 5}, "knobs is 5; it must be Knobs"),
    ],
)
def test_what_an_engine_cannot_be_made_of(options: dict[str, Any], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match=message):
        Engine(FakeModel(), executor=FakeExecutor(), **{"kv_tokens": 64, **options})
    assert threading.active_count() == before


def test_knobs_default_below_the_limits() -> None:
    with bench(limits=KnobLimits(max_batch_size=3)) as b:
        assert b.engine.knobs == Knobs(max_batch_size=3)


def test_queue_full() -> None:
    with bench(max_queue=2) as b:
        done = b.engine.submit("a", max_tokens=1)
        assert done.result(timeout=30) and b.heard.request()
        b.executor.hold()
        running = b.engine.submit("a", max_tokens=2)
        b.held()
        waiting = [b.engine.submit("b", max_tokens=2) for _ in range(2)]
        with pytest.raises(RejectedError, match="2 requests are waiting and max_queue is 2") as caught:
            b.engine.submit("c", request_class="chat")
        assert caught.value.reason == "queue_full"
        b.executor.go()
        rejected = b.heard.request()
        assert (rejected.reason, rejected.request_class, rejected.cause) == (
            FinishReason.REJECTED,
            "chat",
            "queue_full",
        )
        assert [s.result(timeout=30).text for s in [running, *waiting]] == ["bc", "cd", "cd"]
        assert b.engine.submit("d", max_tokens=1).result(timeout=30).text == "e"
        assert [b.heard.request().reason for _ in range(4)] == [FinishReason.LENGTH] * 4

        b.executor.hold()  # by now it knows how fast requests end
        running = b.engine.submit("a", max_tokens=2)
        b.held()
        kept = [b.engine.submit("b", max_tokens=2) for _ in range(2)]
        with pytest.raises(RejectedError) as caught:
            b.engine.submit("c")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 0
        assert not any(stream.done for stream in [running, *kept])


def test_ids_are_unique_among_live_requests() -> None:
    with bench() as b:
        b.executor.hold()
        first = b.engine.submit("a", max_tokens=1, request_id="x")
        with pytest.raises(ValueError, match="request_id is 'x', which another live request has"):
            b.engine.submit("b", request_id="x")
        b.executor.go()
        assert first.result(timeout=30).text == "b"
        assert b.engine.submit("b", max_tokens=1, request_id="x").result(timeout=30).text == "c"


def test_generate() -> None:
    with bench(max_queue=3) as b:
        prompts: list[str | Seq[int]] = [chr(97 + i) for i in range(20)] + [[97, 98]]
        done = b.engine.generate(prompts, max_tokens=2)
        assert [c.text for c in done] == [chr(98 + i) + chr(99 + i) for i in range(20)] + ["cd"]
        assert b.engine.generate([]) == []
        with pytest.raises(ValueError, match="prompts is text, 'hello'"):
            b.engine.generate("hello")


def test_generate_waits_for_room_that_others_take() -> None:
    with bench(max_queue=2, knobs=Knobs(max_batch_size=1)) as b:
        b.executor.hold()
        running = b.engine.submit("a", max_tokens=3)
        b.held()
        other = b.engine.submit("b", max_tokens=3)
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.extend(b.engine.generate(["c", "d", "e"], max_tokens=1)))
        thread.start()
        b.executor.go()
        thread.join(timeout=30)
        assert [c.text for c in result] == ["d", "e", "f"]
        assert running.result(timeout=30) and other.result(timeout=30)


def test_one_fault_does_not_lose_the_others() -> None:
    def sample(sequence: Sequence) -> int:
        if sequence.request.prompt[0] == ord("b"):
            raise RuntimeError("no b")
        return ord("z")

    with bench(sample) as b:
        a, bad, empty, c = b.engine.generate(["a", "b", "", "c"], max_tokens=2, return_exceptions=True)
        assert [getattr(x, "text", None) for x in (a, c)] == ["zz", "zz"]
        assert isinstance(bad, Exception) and isinstance(bad.__cause__, RuntimeError)
        assert isinstance(empty, ValueError)
        with pytest.raises(ValueError, match="empty"):
            b.engine.generate(["a", ""], max_tokens=200)


def test_the_first_fault_cancels_the_others() -> None:
    def sample(sequence: Sequence) -> int:
        if sequence.request.prompt[0] == ord("b"):
            b.executor.hold()  # the next step stands still
            raise RuntimeError("no b")
        return ord("z")

    with bench(sample) as b:
        with pytest.raises(StepFailedError, match="no b") as caught:
            b.engine.generate(["b", "a", "c"], max_tokens=200)
        assert caught.value.__notes__ == ["this was prompt 0 of 3, counted from 0"]
        b.executor.go()
        reasons = sorted(b.heard.request().reason for _ in range(3))
        assert reasons == [FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.ERROR]


def test_nothing_is_kept_of_what_has_ended() -> None:
    with bench() as b:
        streams = [b.engine.submit([i], max_tokens=3, stop=["zz"], timeout_s=100) for i in range(5)]
        buffers = [weakref.ref(stream._buffer) for stream in streams]
        for stream in streams:
            stream.result(timeout=30)
        loop = b.engine._loop
        b.engine.view()  # the step that ended them is over
        assert not (loop._buffers or loop._live or loop._output._texts)
        assert len(b.executor.ended) == 5
        del stream, streams
        gc.collect()
        assert [buffer() for buffer in buffers] == [None] * 5


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bench() as b:
        done = b.engine.generate(["a", "b"], max_tokens=1, progress=True)
        assert [c.text for c in done] == ["b", "c"]
    captured = capsys.readouterr()
    assert "2/2" in captured.err and captured.out == ""


async def test_async_faces() -> None:
    with bench() as b:
        pieces = [event.text async for event in b.engine.astream("a", max_tokens=3)]
        assert "".join(pieces) == "bcd"
        assert (await b.engine.agenerate("a", max_tokens=3)).text == "bcd"
        assert (await b.engine.submit("a", max_tokens=3)).text == "bcd"
        many = await asyncio.gather(*[b.engine.agenerate([i], max_tokens=5) for i in range(50)])
        assert [c.token_ids[0] for c in many] == [i + 1 for i in range(50)]


async def test_one_call_into_an_event_loop_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls = 0
    through = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return through(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    with bench() as b:
        b.executor.hold()

        async def read() -> int:
            return len([event async for event in b.engine.astream("a", max_tokens=10)])

        readers = [asyncio.create_task(read()) for _ in range(30)]
        await asyncio.sleep(0)  # let them submit and wait
        b.executor.go()
        assert await asyncio.gather(*readers) == [10] * 30
        assert 0 < calls <= len(b.heard.steps)


def test_many_threads() -> None:
    with bench(knobs=Knobs(max_batch_size=7), kv_tokens=256) as b:
        wrong: list[Any] = []

        def client(n: int) -> None:
            for i in range(10):
                start = (n * 10 + i) % 200
                if i % 2:
                    ids = [e.token_id for e in b.engine.stream([start], max_tokens=6)]
                else:
                    ids = list(b.engine.submit([start], max_tokens=6).result(timeout=60).token_ids)
                if ids != list(range(start + 1, start + 7)):
                    wrong.append((start, ids))

        clients = [threading.Thread(target=client, args=(n,)) for n in range(20)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(timeout=60)
        assert not wrong
        assert sum(b.heard.request().completed for _ in range(200)) == 200


def test_prefixes_are_shared_as_asked() -> None:
    prompt = list(range(100))
    for share, found in ((True, (96, 96)), ("tenant", (0, 96)), (False, (0, 0))):
        with bench(prefix_cache=share) as b:
            b.engine.submit(prompt, max_tokens=1, tenant="a").result(timeout=30)
            other = b.engine.submit(prompt, max_tokens=1, tenant="b").result(timeout=30).record.cached_tokens
            own = b.engine.submit(prompt, max_tokens=1, tenant="a").result(timeout=30).record.cached_tokens
            assert (other, own) == found


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    with bench() as b:
        prompt = list(range(20))
        answer = b.engine.submit(prompt, max_tokens=45).result(timeout=30).token_ids
        turn = b.engine.submit([*prompt, *answer, 7], max_tokens=1).result(timeout=30)
        assert turn.record.cached_tokens == 64
