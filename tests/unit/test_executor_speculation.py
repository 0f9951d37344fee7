"""Drafts verified by the torch executor: greedy tokens are those of ``generate``, sampled ones those that come without drafts,
and their distribution is the model's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.drafts import Drafter, NgramDrafter, verified
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import Token
from runtime.llm.scheduler import Scheduler
from runtime.records import StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.backends import CPU, PLAIN, Backend
from runtime.torch_backend.executor import TorchExecutor
from tests.tiers import slow_but_for
from tests.unit.executor_harness import SAMPLING, VOCAB, Oracle, TinyModel, changing, prompts, reference, run, tiny

EACH = pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "plain"])


FLAVOURS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("mistral", {"sliding_window": 9}),
    ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
]


@EACH
@pytest.mark.parametrize(
    ("model_type", "changes"), slow_but_for(FLAVOURS[2:], FLAVOURS), ids=[name for name, _ in FLAVOURS]
)
def test_greedy_tokens_are_those_of_generate(model_type: str, changes: dict[str, Any], backend: Backend) -> None:
    loaded = tiny(model_type, **changes)
    given = prompts([1, 5, 40, 17, 33, 2, 61, 16])
    counts = [19, 35, 14, 18, 22, 35, 3, 1]
    expected = [reference(loaded, p, n) for p, n in zip(given, counts, strict=True)]
    drafter = Oracle({str(i): tokens for i, tokens in enumerate(expected)})
    heard: list[StepRecord] = []
    executor = TorchExecutor(loaded, kv_blocks=9, block_size=8, backend=backend)
    requests = list(zip(given, counts, strict=True))
    outputs, failures, preemptions = run(executor, requests, changing(1, 0, 1, 3, 7), drafter=drafter, heard=heard)
    assert not failures
    assert outputs == expected
    assert preemptions > 0
    drafted, accepted = sum(step.drafted for step in heard), sum(step.accepted for step in heard)
    assert 10 < accepted < drafted
    assert any(step.drafted and step.chunks for step in heard), "drafts beside prompts"


def test_drafts_of_its_own_text_shorten_a_repetition() -> None:
    loaded = tiny()
    prompt = prompts([6])[0] * 4
    wanted = reference(loaded, prompt, 60)
    heard: list[StepRecord] = []
    executor = TorchExecutor(loaded, kv_blocks=40, block_size=8)
    outputs, _, _ = run(executor, [(prompt, 60)], Knobs(draft_tokens=6), drafter=NgramDrafter(), heard=heard)
    assert outputs == [wanted]
    assert sum(step.sampled for step in heard) == 60
    assert len(heard) == 60 - sum(step.accepted for step in heard)


def sampled(
    executor: TorchExecutor, drafter: Drafter | None, params: list[dict[str, Any]]
) -> tuple[dict[str, list[Token]], int]:
    """What requests with these ``params`` yield, and how many drafts were right."""
    scheduler = Scheduler(kv_blocks=executor.pool.block_count, block_size=executor.pool.block_size, drafter=drafter)
    knobs = Knobs(6, 0, 96, 24, 5 if drafter else 0)
    core = EngineCore(scheduler, executor, knobs=knobs, output=OutputProcessor((2, 5, 11)))
    found: dict[str, list[Token]] = {}
    accepted = 0
    for at, (prompt, one) in enumerate(zip(prompts([7 + 5 * n for n in range(len(params))], 3), params, strict=True)):
        core.add(Request(f"r{at}", tuple(prompt), SamplingParams(max_tokens=16, **one), 16, 0.0))
    while core.has_work:
        outcome = core.step(1.0)
        if outcome.record is not None:
            accepted += outcome.record.accepted
        for token in outcome.result.tokens if outcome.result is not None else ():
            found.setdefault(token.sequence.request.id, []).append(token)
    scheduler.check_integrity()
    return found, accepted


def test_sampled_tokens_are_the_same() -> None:
    """Of all requests, with a seed or without, and their log-probabilities; those that stop do so with the same token."""
    loaded = tiny()
    plainly, _ = sampled(TorchExecutor(loaded, kv_blocks=40, block_size=8), None, SAMPLING)
    answers = {name: [token.id for token in tokens] for name, tokens in plainly.items()}
    executor = TorchExecutor(loaded, kv_blocks=40, block_size=8)
    found, accepted = sampled(executor, Oracle({n: [*ids, *[9] * 16] for n, ids in answers.items()}), SAMPLING)
    assert {name: [token.id for token in tokens] for name, tokens in found.items()} == answers
    assert accepted > 10
    for name, tokens in plainly.items():
        for ours, theirs in zip(found[name], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


class Guesses:
    """Drafts by ``guess``, of what a sequence has said."""

    def __init__(self, guess: Callable[[tuple[int, ...]], Seq[int]]) -> None:
        self.guess = guess

    def begin_step(self) -> None:
        pass

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        return self.guess(tuple(sequence.output))[:most]

    def forget(self, sequence: Sequence) -> None:
        pass


def law(
    loaded: TinyModel, prompt: list[int], temperature: float, top_k: int, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every answer of ``length`` tokens, from the model's own forward."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for answer, probability in answers.items():
            with torch.inference_mode():
                logits = loaded.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double()
            best = logits.topk(top_k)
            each = torch.softmax(best.values / temperature, 0).tolist()
            for token, one in zip(best.indices.tolist(), each, strict=True):
                longer[*answer, token] = probability * one
        answers = longer
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["likeliest", "unlikeliest", "any"])
def test_the_distribution_is_the_models(guess: str) -> None:
    """Chi-square over the 27 answers of three tokens out of three, two of them verified in one step, whatever is guessed."""
    loaded, [prompt], count = tiny(), prompts([6], 5), 2000
    flat = next(t for t in (1.0, 4.0, 16.0, 64.0) if min(law(loaded, prompt, t, 3, 3).values()) > 0.004)
    exact = law(loaded, prompt, flat, 3, 3)
    dice = random.Random(3)

    def guesses(said: tuple[int, ...]) -> Seq[int]:
        rest = {answer: p for answer, p in exact.items() if answer[: len(said)] == said}
        if guess == "any":
            return dice.choice(list(rest))[len(said) :]
        chosen = (max if guess == "likeliest" else min)(rest, key=rest.__getitem__)
        return chosen[len(said) :]

    executor = TorchExecutor(loaded, kv_blocks=256, block_size=8)
    scheduler = Scheduler(kv_blocks=256, block_size=8, drafter=Guesses(guesses))
    core = EngineCore(scheduler, executor, knobs=Knobs(64, 0, 1024, 1024, 2), output=OutputProcessor())
    params = SamplingParams(max_tokens=4, temperature=flat, top_k=3, ignore_eos=True)  # the last one is not looked at
    rows = [core.add(Request(f"r{i}", tuple(prompt), params, 4, 0.0)) for i in range(count)]
    accepted = drafted = 0
    while core.has_work:
        record = core.step(1.0).record
        assert record is not None
        accepted, drafted = accepted + record.accepted, drafted + record.drafted
    seen = Counter(tuple(row.output[:3]) for row in rows)
    assert seen.keys() <= exact.keys() and drafted > count and 0 < accepted < drafted
    observed, wanted = np.array([seen[answer] for answer in exact]), np.array([exact[answer] for answer in exact])
    assert stats.chisquare(observed, wanted * observed.sum()).pvalue > 1e-3


def test_how_far_drafts_are_right() -> None:
    row = Sequence(Request("r", (1,), SamplingParams(), 9, 0.0))
    for drafted, ids, right in [
        ((4, 5), (4, 5, 6), 2), ((4, 5), (4, 6, 6), 1), ((4, 5), (6, 5, 6), 0), ((4,), (4, 4), 1), ((4, 5), (5, 5, 5), 0),
    ]:  # fmt: skip
        assert verified(drafted, [Token(row, token) for token in ids]) == right
    error = ValueError("NaN")
    first, right, wrong = Token(row, 4), Token(row, 5), Token(row, 9)
    assert verified((4, 5), [error, right, wrong]) is error
    assert verified((4, 5), [wrong, error, error]) == 0, "what is behind a wrong draft says nothing"
    assert verified((4, 5), [first, wrong, error]) == 1
    assert verified((4, 5), [first, error, wrong]) == 0, "the draft is kept as the token, and computed again"
    assert verified((4, 5), [first, right, error]) == 1
    with pytest.raises(ValueError, match="3 tokens were sampled for 1 drafted ones; there must be one more"):
        verified((4,), [Token(row, 1)] * 3)


def poisoned(
    backend: Backend,
    spoils: Callable[[TinyModel, TorchExecutor, int], None],
    place: Callable[[list[int], int, int], list[int]],
) -> tuple[list[list[int]], list[list[int]], dict[str, BaseException], list[StepRecord]]:
    """(expected, outputs, failures, steps) of three requests, the second of which is drafted for by ``place(coming, most,
    poison)``. ``spoils`` makes whatever is computed of the token ``poison`` NaN."""
    loaded = tiny()
    given = prompts([5, 9, 12])
    expected = [reference(loaded, p, 20) for p in given]
    poison = next(token for token in range(3, VOCAB) if token not in {*chain(*given, *expected)})

    class Poisons(Oracle):
        def draft(self, sequence: Sequence, most: int) -> Seq[int]:
            if sequence.request.id != "1":
                return super().draft(sequence, most)
            return place(expected[1][len(sequence.output) :], most, poison)

    executor = TorchExecutor(loaded, kv_blocks=20, block_size=8, backend=backend)
    spoils(loaded, executor, poison)
    drafter, heard = Poisons({str(i): tokens for i, tokens in enumerate(expected)}, wrong=0.0), list[StepRecord]()
    requests = [(p, 20) for p in given]
    outputs, failures, _ = run(executor, requests, Knobs(8, 0, 64, 32, 3), drafter=drafter, heard=heard)
    return expected, outputs, failures, heard


def spoils_logits(loaded: TinyModel, executor: TorchExecutor, poison: int) -> None:
    forward = executor._logits

    def logits(ids: torch.Tensor, positions: torch.Tensor, step: Any, wanted: torch.Tensor | None) -> torch.Tensor:
        found = forward(ids, positions, step, wanted)
        rows = ids if wanted is None else ids[wanted]
        return torch.where((rows == poison)[:, None], torch.nan, found)

    executor._logits = logits  # type: ignore[method-assign]


def spoils_keys_and_values(loaded: TinyModel, executor: TorchExecutor, poison: int) -> None:
    """In every layer: attention behind it reads them."""
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poison] = float("nan")


@EACH
@pytest.mark.parametrize("spoils", [spoils_logits, spoils_keys_and_values])
@pytest.mark.parametrize("right", [0, 1, 2])
def test_what_is_not_finite_behind_a_wrong_draft_fails_nobody(
    backend: Backend, spoils: Callable[[TinyModel, TorchExecutor, int], None], right: int
) -> None:
    def place(coming: list[int], most: int, poison: int) -> list[int]:
        return ([*coming[:right], poison, poison] if len(coming) > 4 else coming)[:most]

    expected, outputs, failures, heard = poisoned(backend, spoils, place)
    assert not failures and outputs == expected
    assert sum(step.drafted for step in heard) > 20 and (right == 0 or sum(step.accepted for step in heard) > 5)


@EACH
def test_what_is_not_finite_without_drafts_too_fails_the_request_alone(backend: Backend) -> None:
    """One of its own tokens is the poison, and drafted for rightly: behind it the request would fail in any case."""

    def spoils(loaded: TinyModel, executor: TorchExecutor, poison: int) -> None:
        forward = executor._logits

        def logits(ids: torch.Tensor, positions: torch.Tensor, step: Any, wanted: torch.Tensor | None) -> torch.Tensor:
            found = forward(ids, positions, step, wanted)
            ids, positions = (ids, positions) if wanted is None else (ids[wanted], positions[wanted])
            return torch.where(((positions == 9 + at) & (ids == answers[1][at]))[:, None], torch.nan, found)

        executor._logits = logits  # type: ignore[method-assign]

    answers = [reference(tiny(), p, 20) for p in prompts([5, 9, 12])]
    at = next(n for n in range(6, 16) if answers[1][n] not in (answers[0][n + 4], answers[2][n - 3]))  # theirs there
    expected, outputs, failures, heard = poisoned(backend, spoils, lambda coming, most, poison: coming[:most])
    assert failures.keys() == {"1"} and "NaN" in str(failures["1"])
    assert outputs[1] == expected[1][: at + 1], "all tokens that there are without drafts"
    assert [outputs[0], outputs[2]] == [expected[0], expected[2]]
    assert sum(step.accepted for step in heard) > 20


def test_out_of_memory_runs_the_step_without_drafts() -> None:
    """A sequence whose drafts do not fit even alone goes on by one token; others keep theirs."""
    loaded = tiny()
    given = prompts([5, 9, 12])
    expected = [reference(loaded, p, 12) for p in given]
    executor = TorchExecutor(loaded, kv_blocks=30, block_size=8)
    forward = executor._logits

    def logits(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if 5 < len(ids) < 12:  # prompts fit, one by one or together
            raise torch.OutOfMemoryError("too many tokens")
        return forward(ids, *rest)

    executor._logits = logits  # type: ignore[method-assign]
    drafter = Oracle({str(i): tokens for i, tokens in enumerate(expected)}, wrong=0.0)
    outputs, failures, _ = run(executor, [(p, 12) for p in given], Knobs(8, 0, 64, 32, 7), drafter=drafter)
    assert not failures and outputs == expected
