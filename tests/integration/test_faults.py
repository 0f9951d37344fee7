"""Everything that can go wrong around a real model: one request pays, at most; the engine goes on; no block is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import (
    FinishReason,
    KnobLimits,
    Knobs,
    RejectedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)
from tests.fakes import Heard
from tests.integration.small_model import CONTEXT, TOKENS, VOCABULARY, SmallModel, engine_for, forward_of, small_model
from tests.tiers import slow_but_for

Forward = Callable[..., Any]


@pytest.fixture(scope="module")
def small() -> SmallModel:
    return small_model()


class Broken(Exception):
    """What the model raises."""


def raises_on(token: int) -> Callable[[Forward, Tensor, dict[str, Any]], Any]:
    def around(forward: Forward, ids: Tensor, arguments: dict[str, Any]) -> Any:
        if bool((ids == token).any()):
            raise Broken(f"token {token}")
        return forward(**arguments)

    return around


def nan_logits_on(token: int) -> Callable[[Forward, Tensor, dict[str, Any]], Any]:
    def around(forward: Forward, ids: Tensor, arguments: dict[str, Any]) -> Any:
        out = forward(**arguments)
        rows = ids[0] if arguments.get("logits_to_keep") is None else ids[0, arguments["logits_to_keep"]]
        out.logits[0, rows == token] = torch.nan
        return out

    return around


def out_of_memory_above(tokens: int) -> Callable[[Forward, Tensor, dict[str, Any]], Any]:
    def around(forward: Forward, ids: Tensor, arguments: dict[str, Any]) -> Any:
        if ids.shape[1] > tokens:
            raise torch.OutOfMemoryError(f"out of memory: {ids.shape[1]} tokens")
        return forward(**arguments)

    return around


def test_prompts_that_can_never_run(small: SmallModel) -> None:
    with engine_for(small.loaded, kv_tokens=128) as engine:
        for prompt, options, message in (
            ([1] * CONTEXT, {"max_tokens": 1}, rf"is {CONTEXT + 1}; the context of small is {CONTEXT} tokens"),
            ([1] * 100, {"max_tokens": 29}, "is 129; the KV pool holds 128 tokens"),
            ([], {}, "prompt is empty"),
            ("", {}, "prompt is empty"),
            ([1, VOCABULARY], {}, f"token id {VOCABULARY}; small has a vocabulary of {VOCABULARY}"),
            ([-1], {}, "token id -1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(prompt, **options)  # type: ignore[arg-type]
        done = engine.submit([1] * 100, max_tokens=28, ignore_eos=True).result(timeout=60)
        assert len(done.token_ids) == 28  # exactly what fits


def test_a_model_that_raises_on_a_prompt(small: SmallModel) -> None:
    heard, poison = Heard(), small.unused_token
    with engine_for(small.loaded) as engine, forward_of(small.loaded, raises_on(poison)):
        engine.subscribe(heard)
        prompts = [*small.prompts[:3], [1, poison, 2], *small.prompts[3:6]]
        done = engine.generate(prompts, max_tokens=TOKENS, return_exceptions=True)
        failed = done.pop(3)
        assert isinstance(failed, StepFailedError) and isinstance(failed.__cause__, Broken)
        assert f"Broken: token {poison}" in str(failed)
        assert [getattr(c, "token_ids", c) for c in done] == list(small.references[:6])
        reasons = [heard.request().reason for _ in range(7)]
        assert reasons.count(FinishReason.ERROR) == 1 and reasons.count(FinishReason.LENGTH) == 6
        assert sum(record.failed for record in heard.steps) == 1


def test_a_model_that_raises_in_the_middle_of_an_answer(small: SmallModel) -> None:
    token, at = small.own_token(2)
    with engine_for(small.loaded) as engine, forward_of(small.loaded, raises_on(token)):
        streams = [engine.stream(prompt, max_tokens=TOKENS) for prompt in small.prompts]
        got = []
        with pytest.raises(StepFailedError, match=f"failed after {at + 1} tokens") as caught:
            for event in streams[2]:
                got.append(event.token_id)
        assert tuple(got) == small.references[2][: at + 1] and isinstance(caught.value.__cause__, Broken)
        for i, stream in enumerate(streams):
            if i != 2:
                assert stream.result(timeout=60).token_ids == small.references[i]


def test_a_model_that_always_raises(small: SmallModel) -> None:
    def around(forward: Forward, ids: Tensor, arguments: dict[str, Any]) -> Any:
        raise Broken("always")

    with engine_for(small.loaded) as engine:
        with forward_of(small.loaded, around):
            done = engine.generate(small.prompts, max_tokens=TOKENS, return_exceptions=True)
            assert all(isinstance(c, StepFailedError) and isinstance(c.__cause__, Broken) for c in done)
        assert engine.view().kv_free_blocks == engine.view().kv_total_blocks
        done = engine.generate(small.prompts, max_tokens=TOKENS)
        assert [c.token_ids for c in done] == list(small.references)  # type: ignore[union-attr]


def test_nan_logits_fail_their_own_row(small: SmallModel) -> None:
    token, at = small.own_token(4)
    with engine_for(small.loaded) as engine, forward_of(small.loaded, nan_logits_on(token)):
        done = engine.generate(small.prompts, max_tokens=TOKENS, return_exceptions=True)
        failed = done[4]
        assert isinstance(failed, StepFailedError) and failed.__cause__ is not None
        assert f"failed after {at + 1} tokens" in str(failed)
        for i, c in enumerate(done):
            assert i == 4 or getattr(c, "token_ids", c) == small.references[i]
        with pytest.raises(StepFailedError, match="failed after 0 tokens"):
            engine.submit([1, token], max_tokens=3).result(timeout=60)


def test_nan_in_the_kv_cache_stays_with_its_request(small: SmallModel) -> None:
    """A token whose embedding is NaN writes NaN into its KV blocks, which then go to others."""
    weight, poison = small.loaded.model.get_input_embeddings().weight, small.unused_token
    kept = weight[poison].clone()
    with engine_for(small.loaded, kv_tokens=128) as engine:
        try:
            with torch.no_grad():
                weight[poison] = torch.nan
            for length in (1, 20, 60):
                with pytest.raises(StepFailedError):
                    engine.submit([*range(length), poison, *range(40)], max_tokens=8).result(timeout=60)
                done = engine.generate(small.prompts, max_tokens=TOKENS)
                assert [c.token_ids for c in done] == list(small.references)
        finally:
            with torch.no_grad():
                weight[poison] = kept


def test_out_of_memory_halves_retries_and_lowers_the_limits(
    small: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        engine_for(small.loaded, limits=KnobLimits(token_budget=1024)) as engine,
        forward_of(small.loaded, out_of_memory_above(20)),
    ):
        before = engine.knobs
        done = engine.generate(small.prompts, max_tokens=TOKENS)
        assert [c.token_ids for c in done] == list(small.references)
        assert engine.limits.token_budget == 1024
        assert 1 <= engine.effective_limits.token_budget <= 20
        assert engine.knobs.token_budget == engine.effective_limits.token_budget < before.token_budget
        assert engine.epoch >= 1 and "ran out of memory" in caplog.text
        lowered = engine.effective_limits
        assert engine.set_knobs(Knobs(token_budget=1000)) and engine.knobs.token_budget == lowered.token_budget
        done = engine.generate(small.prompts, max_tokens=TOKENS)
        assert [c.token_ids for c in done] == list(small.references)
        assert engine.effective_limits == lowered, "it stays within what fits"


def test_out_of_memory_that_nothing_helps_against(small: SmallModel) -> None:
    with engine_for(small.loaded) as engine:
        with forward_of(small.loaded, out_of_memory_above(0)):
            for c in engine.generate(small.prompts[:3], max_tokens=TOKENS, return_exceptions=True):
                assert isinstance(c, StepFailedError) and isinstance(c.__cause__, torch.OutOfMemoryError)
        assert engine.effective_limits.token_budget < sum(map(len, small.prompts[:3])), "what failed, halved"
        done = engine.generate(small.prompts[:3], max_tokens=TOKENS)
        assert [c.token_ids for c in done] == list(small.references[:3])


def test_out_of_memory_in_the_middle_of_answers(small: SmallModel) -> None:
    """Decodes too many for the memory: they are halved, none fails, and fewer run from then on."""
    with engine_for(small.loaded) as engine, forward_of(small.loaded, out_of_memory_above(4)):
        done = engine.generate(small.prompts, max_tokens=TOKENS)
        assert [c.token_ids for c in done] == list(small.references)
        ceilings = engine.effective_limits
        assert min(ceilings.max_batch_size, ceilings.token_budget) <= 2 * 4, (
            "at most one rise above what fits is on trial"
        )


def test_close_while_busy(small: SmallModel) -> None:
    for drain in (True, False):
        with engine_for(small.loaded) as engine:
            streams = [engine.submit(prompt, max_tokens=TOKENS) for prompt in small.prompts * 4]
            next(iter_kept := iter(streams[0]))
            engine.close(drain=drain)
            ends = [stream.record.reason if stream.record else None for stream in streams]
            if drain:
                assert ends == [FinishReason.LENGTH] * len(streams)
                assert streams[-1].result().token_ids == small.references[-1]
            else:
                assert set(ends) <= {FinishReason.LENGTH, FinishReason.ERROR}
            del iter_kept


@pytest.mark.parametrize("seed", slow_but_for((0,), range(3)))
def test_everything_at_once(small: SmallModel, seed: int) -> None:
    """Cancels, timeouts, poison, a full queue, a tight pool and turning knobs: what completes is right, all else named."""
    stop, poison = threading.Event(), small.unused_token
    outcomes: list[str] = []
    with (
        engine_for(small.loaded, kv_tokens=256, block_size=8, max_queue=24) as engine,
        forward_of(small.loaded, raises_on(poison)),
    ):

        def turn() -> None:
            turning = random.Random(seed)
            while not stop.is_set():
                engine.set_knobs(
                    Knobs(
                        max_batch_size=turning.randint(1, 16),
                        token_budget=turning.randint(4, 200),
                        chunk_size=turning.randint(1, 64),
                    )
                )
                engine.view()

        def client(n: int) -> None:
            own = random.Random(1000 * seed + n)
            for _ in range(8):
                index = own.randrange(len(small.prompts))
                poisoned = own.random() < 0.1
                prompt = [*small.prompts[index], poison] if poisoned else small.prompts[index]
                timeout = 0.02 if own.random() < 0.1 else None
                try:
                    stream = engine.submit(prompt, max_tokens=TOKENS, timeout_s=timeout)
                    if own.random() < 0.2:
                        reader = iter(stream)
                        for _ in range(own.randint(0, 5)):
                            next(reader)
                        stream.cancel()
                    done = stream.result(timeout=120)
                    right = done.token_ids == small.references[index]
                    outcomes.append("right" if right and not poisoned else "wrong")
                except (StepFailedError, RequestCancelledError, RequestTimeoutError, RejectedError) as error:
                    outcomes.append(type(error).__name__)

        turner = threading.Thread(target=turn)
        turner.start()
        clients = [threading.Thread(target=client, args=(n,)) for n in range(12)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(timeout=200)
        stop.set()
        turner.join()
    assert len(outcomes) == 96 and "wrong" not in outcomes
    assert {"right", "StepFailedError", "RequestCancelledError"} <= set(outcomes)
