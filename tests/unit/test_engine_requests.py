"""What goes in, and what comes out of every face."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runtime import SLO, FinishReason, KnobLimits, Knobs, RequestClass, SamplingParams
from tests.engines import bench
from tests.fakes import EOS, FakeModel


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
    with bench(model=FakeModel(tokenizer=None, tokenizer_error="OSError: damaged")) as b:
        why = r"the tokenizer of fake cannot be loaded \(OSError: damaged\); "
        with pytest.raises(ValueError, match=f"{why}give it as a list of token ids"):
            b.engine.submit("text")
        with pytest.raises(ValueError, match=f"{why}use stop_token_ids"):
            b.engine.submit([1], stop="x")


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
        came = b.engine.clock.now() - 5
        record = b.engine.submit("a", params, arrival=came).result(timeout=30).record
        assert record.arrival == came and record.ttft is not None and record.ttft >= 5


def test_classes() -> None:
    chat = RequestClass("chat", SLO.parse("ttft=1s"))
    with bench(slo="ttft=500ms", classes=[chat]) as b:
        assert set(b.engine.slos) == {"default", "chat"}
        with pytest.raises(ValueError, match="request_class is 'caht'; the classes are chat, default"):
            b.engine.submit("a", request_class="caht")


def test_the_slo_can_be_changed_and_is_checked() -> None:
    with bench(slo="ttft=500ms", classes=[RequestClass("chat", "ttft=1s")]) as b:
        b.engine.set_slo("tpot=40ms")
        assert b.engine.slos == {"default": SLO(tpot_ms=40), "chat": SLO(ttft_ms=1000)}
        for wrong, message in (("tpot=40", "no unit"), (40, "slo is 40; it must be an SLO or text such as ttft=")):
            with pytest.raises(ValueError, match=message):
                b.engine.set_slo(wrong)  # type: ignore[arg-type]
        assert b.engine.submit("a", max_tokens=2).result(timeout=30).text == "bc"


def test_knobs_default_below_the_limits() -> None:
    with bench(limits=KnobLimits(max_batch_size=3)) as b:
        assert b.engine.knobs == Knobs(max_batch_size=3)


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
