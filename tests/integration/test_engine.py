"""The engine with a real model: every face gives what transformers' own generate gives."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from runtime import Engine, FinishReason, Knobs, ModelError, SamplingParams, UnsupportedModelError
from runtime.llm.stream import Completion
from runtime.torch_backend.loading import from_model
from tests.integration.small_model import TOKENS, SmallModel, engine_for, reference, small_model
from tests.threads import in_threads


@pytest.fixture(scope="module")
def small() -> SmallModel:
    return small_model()


@pytest.fixture(scope="module")
def engine(small: SmallModel) -> Iterator[Engine]:
    with engine_for(small.loaded) as engine:
        yield engine


def test_the_references_hang_on_their_context(small: SmallModel) -> None:
    assert len(set(small.references)) == len(small.references)
    assert all(len(set(reference)) > 4 for reference in small.references)


def test_every_face_says_what_generate_says(small: SmallModel, engine: Engine) -> None:
    prompts, expected = small.prompts, list(small.references)
    assert [c.token_ids for c in engine.generate(prompts, max_tokens=TOKENS)] == expected
    streams = [engine.stream(prompt, max_tokens=TOKENS) for prompt in prompts]
    assert [tuple(event.token_id for event in stream) for stream in streams] == expected

    async def both() -> tuple[list[Completion], list[int]]:
        done = await asyncio.gather(*(engine.agenerate(prompt, max_tokens=TOKENS) for prompt in prompts))
        return done, [event.token_id async for event in engine.astream(prompts[0], max_tokens=TOKENS)]

    done, streamed = asyncio.run(both())
    assert [c.token_ids for c in done] == expected and tuple(streamed) == expected[0]


def test_text_in_and_out(engine: Engine) -> None:
    done = engine.submit("Grüße, 世界", max_tokens=40, temperature=1.0, seed=3).result(timeout=60)
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    assert done.record.prompt_tokens == len(tokenizer.encode("Grüße, 世界"))
    assert done.text == tokenizer.decode(list(done.token_ids))
    stream = engine.stream("Grüße, 世界", max_tokens=40, temperature=1.0, seed=3)
    assert "".join(event.text for event in stream) == done.text


def test_knobs_turned_all_the_time_and_a_tight_pool(small: SmallModel) -> None:
    """Small blocks, room for two or three requests, knobs changed by another thread: preemptions, and the same tokens."""
    rng = random.Random(0)
    stop = threading.Event()
    with engine_for(small.loaded, kv_tokens=160, block_size=4) as engine:

        def turn() -> None:
            while not stop.is_set():
                engine.set_knobs(
                    Knobs(
                        max_batch_size=rng.randint(1, 8),
                        max_wait_ms=rng.choice([0, 0, 1]),
                        token_budget=rng.randint(1, 80),
                        chunk_size=rng.randint(1, 60),
                    )
                )
                engine.view()  # one step between two settings, more or less

        turner = threading.Thread(target=turn)
        turner.start()
        try:
            done = engine.generate(small.prompts * 3, max_tokens=TOKENS)
        finally:
            stop.set()
            turner.join()
        assert [c.token_ids for c in done] == list(small.references) * 3
        assert sum(c.record.preemptions for c in done) > 0
        assert engine.epoch > 20 and any(c.record.spans_change for c in done)


def test_many_threads(small: SmallModel, engine: Engine) -> None:
    wrong: list[int] = []

    def client(n: int) -> None:
        for i in range(n, n + 4):
            index = i % len(small.prompts)
            done = engine.submit(small.prompts[index], max_tokens=TOKENS).result(timeout=120)
            if done.token_ids != small.references[index]:
                wrong.append(index)

    in_threads(client, 12, 120)
    assert not wrong


def test_a_cached_prefix_changes_nothing(small: SmallModel) -> None:
    turn = [*max(small.prompts, key=len), 5, 6, 7]
    expected = reference(small.loaded, turn)
    with engine_for(small.loaded) as engine:
        first = engine.submit(turn[:-3], max_tokens=8).result(timeout=60)
        assert first.record.cached_tokens == 0
        second = engine.submit(turn, max_tokens=TOKENS).result(timeout=60)
        assert second.record.cached_tokens == (len(turn) - 3) // 16 * 16 > 0
        assert second.token_ids == expected


def test_stop_strings_across_tokens(small: SmallModel, engine: Engine) -> None:
    events = list(engine.stream(small.prompts[0], max_tokens=TOKENS))
    whole = "".join(event.text for event in events)
    ends = [event.position for event in events if event.text]
    left, right = next(pair for pair in pairwise(ends) if pair[0] >= 4)
    stop = events[left].text[-1:] + events[right].text[:1]  # the end of one token and the beginning of the next
    assert len(stop) == 2
    done = engine.submit(small.prompts[0], max_tokens=TOKENS, stop=["never said", stop]).result(timeout=60)
    assert done.finish_reason is FinishReason.STOP
    assert done.text == whole[: whole.index(stop)] and stop not in done.text
    assert len(done.token_ids) <= right + 1
    streamed = list(engine.stream(small.prompts[0], max_tokens=TOKENS, stop=stop))
    assert "".join(event.text for event in streamed) == done.text


def test_the_end_of_a_text(small: SmallModel) -> None:
    eos, at = small.own_token(0)
    with engine_for(replace(small.loaded, eos_token_ids=(eos,))) as engine:
        prompt = small.prompts[0]
        done = engine.submit(prompt, max_tokens=TOKENS).result(timeout=60)
        assert (done.finish_reason, done.token_ids) == (FinishReason.STOP, small.references[0][: at + 1])
        on = engine.submit(prompt, max_tokens=TOKENS, ignore_eos=True).result(timeout=60)
        assert (on.finish_reason, on.token_ids) == (FinishReason.LENGTH, small.references[0])
    with engine_for(small.loaded) as engine:
        done = engine.submit(prompt, max_tokens=TOKENS, stop_token_ids=[eos], ignore_eos=True).result(timeout=60)
        assert (done.finish_reason, done.token_ids) == (FinishReason.STOP, small.references[0][: at + 1])


def test_logprobs(small: SmallModel) -> None:
    prompt, said = small.prompts[1], small.references[1]
    with torch.inference_mode():
        logits = small.loaded.model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1)
    with engine_for(small.loaded) as engine:
        done = engine.submit(prompt, max_tokens=TOKENS, logprobs=3).result(timeout=60)
        assert done.token_ids == said and done.logprobs is not None
        for row, entry in zip(expected, done.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            top = row.topk(3)
            assert [token for token, _ in entry.top] == top.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-3)
        events = list(engine.stream(prompt, max_tokens=3, logprobs=0))
        assert [event.logprob for event in events] == pytest.approx([e.logprob for e in done.logprobs[:3]], abs=1e-3)
        assert all(event.top_logprobs == () for event in events)


def test_a_seed_gives_the_same_tokens_in_any_company(small: SmallModel, engine: Engine) -> None:
    drawn = SamplingParams(max_tokens=TOKENS, temperature=1.5, seed=7)
    alone = engine.submit(small.prompts[0], drawn).result(timeout=60).token_ids
    crowd = [engine.submit(prompt, max_tokens=40, temperature=1.0) for prompt in small.prompts * 2]
    assert engine.submit(small.prompts[0], drawn).result(timeout=60).token_ids == alone
    assert all(stream.result(timeout=60) for stream in crowd)
    assert engine.submit(small.prompts[0], replace(drawn, seed=8)).result(timeout=60).token_ids != alone
    one = engine.submit(small.prompts[0], replace(drawn, top_k=1)).result(timeout=60).token_ids
    assert one == small.references[0]


@pytest.mark.slow
@pytest.mark.beside
def test_a_preset_by_name() -> None:
    with Engine("tiny", dtype="float32", kv_tokens=512, max_model_len=300, threads=1) as engine:
        assert engine.model.name == "tiny" and engine.kv_tokens == 512
        first, second = engine.generate(["hello", "hello"], max_tokens=4)
        assert first.token_ids == second.token_ids and len(first.token_ids) == 4
        with pytest.raises(ValueError, match="the context of tiny is 300"):
            engine.submit([1] * 300)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        Engine("./no-such-model")
    with pytest.raises(ModelError, match="model is a dict"):
        Engine({})  # type: ignore[arg-type]
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gptj", vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    with pytest.raises(UnsupportedModelError, match="gptj"):
        Engine(from_model(AutoModelForCausalLM.from_config(config).eval()))
