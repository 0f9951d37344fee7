"""The torch executor with steps that overlap and decode steps that are recorded, where there is no GPU: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch

from runtime.errors import StepFailedError
from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.engine import Engine
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import Token
from runtime.llm.scheduler import Scheduler
from runtime.request import Request, SamplingParams
from runtime.torch_backend.backends import CPU, PLAIN, Backend
from runtime.torch_backend.executor import TorchExecutor
from tests.fakes import FakeModel
from tests.unit.executor_harness import (
    SAMPLING,
    VOCAB,
    TinyModel,
    before_forward,
    neighbour_of_a_row_for_nothing,
    prompts,
    reads_that_fail,
    reference,
    run,
    tiny,
)

BAD = 127  # a token the tests treat as poison
KNOBS = Knobs(max_batch_size=6, token_budget=48, chunk_size=24)
EACH = pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "plain"])


def settings() -> Iterator[Knobs]:
    return cycle([Knobs(6, 0, 48, 24), Knobs(6, 0, 48, 24), Knobs(3, 0, 9, 4), Knobs(1, 0, 64, 64)])


def work(lengths: list[int], counts: list[int], seed: int = 0) -> list[tuple[list[int], int]]:
    clean = [[3 if token == BAD else token for token in prompt] for prompt in prompts(lengths, seed)]
    return list(zip(clean, counts, strict=True))


def overlapping(loaded: TinyModel, backend: Backend | None = None, **options: Any) -> TorchExecutor:
    return TorchExecutor(loaded, **{"kv_blocks": 40, "block_size": 8, **options}, backend=backend, overlaps=True)


class Steps:
    """Counts the steps that were launched while another was in flight."""

    def __init__(self, executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.all = 0
        launch = executor.launch

        def counted(plan: Any) -> None:
            self.ahead += bool(executor._launched)
            self.all += 1
            launch(plan)

        monkeypatch.setattr(executor, "launch", counted)


@EACH
def test_greedy_tokens_are_those_of_generate(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    requests = work([5, 40, 9, 30, 12, 60, 1, 25], [30, 12, 40, 8, 1, 20, 33, 2])
    expected = [reference(loaded, p, n) for p, n in requests]
    executor = overlapping(loaded, backend, kv_blocks=18)
    steps = Steps(executor, monkeypatch)
    outputs, failures, preemptions = run(executor, requests, settings())
    assert not failures and outputs == expected
    assert preemptions > 0 and steps.ahead > 0.5 * steps.all


PENALISED: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.4}


def sampled(executor: TorchExecutor, params: list[dict[str, Any]]) -> dict[str, list[Token]]:
    """What requests with these ``params`` yield."""
    size = executor.pool.block_size
    scheduler = Scheduler(kv_blocks=executor.pool.block_count, block_size=size)
    core = EngineCore(scheduler, executor, knobs=KNOBS, output=OutputProcessor((2, 5, 11)))
    found: dict[str, list[Token]] = {}
    for at, (prompt, one) in enumerate(zip(prompts([7 + 5 * n for n in range(len(params))], 3), params, strict=True)):
        core.add(Request(f"r{at}", tuple(prompt), SamplingParams(max_tokens=16, **one), 16, 0.0))
    while core.has_work:
        result = core.step(1.0).result
        for token in result.tokens if result is not None else ():
            found.setdefault(token.sequence.request.id, []).append(token)
    return found


@pytest.mark.parametrize("params", [SAMPLING, [*SAMPLING, PENALISED]], ids=["device", "with a penalty"])
def test_sampled_tokens_are_the_same(params: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops are found late, and a penalty needs the tokens: it is launched when they are there."""
    loaded = tiny()
    plainly = sampled(TorchExecutor(loaded, kv_blocks=40, block_size=8), params)
    executor = overlapping(loaded)
    steps = Steps(executor, monkeypatch)
    found = sampled(executor, params)
    assert found.keys() == plainly.keys()
    for name, tokens in plainly.items():
        assert [token.id for token in found[name]] == [token.id for token in tokens]
        for ours, theirs in zip(found[name], tokens, strict=True):  # a row for nothing may round sums otherwise
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
    assert steps.ahead > 3
    assert any(len(tokens) < 16 for tokens in plainly.values()), "nothing stopped early"


@EACH
def test_a_request_that_raises_fails_alone(backend: Backend) -> None:
    loaded = tiny()
    requests = work([5, 20, 9, 30, 12], [8, 8, 8, 8, 8])
    expected = [reference(loaded, p, n) for p, n in requests]
    requests[2][0][4] = BAD

    def check(ids: torch.Tensor) -> None:
        if BAD in ids:
            raise ValueError("a bad token")

    before_forward(loaded, check)
    outputs, failures, _ = run(overlapping(loaded, backend), requests, KNOBS)
    assert set(failures) == {"2"} and outputs[2] == []
    assert [o for i, o in enumerate(outputs) if i != 2] == [e for i, e in enumerate(expected) if i != 2]


@EACH
def test_logits_that_are_not_finite_fail_their_own_row(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    requests = work([21, 17, 9, 30, 12, 26, 8, 19], [8, 12, 6, 8, 9, 15, 4, 11])
    expected = [reference(loaded, p, n) for p, n in requests]
    assert all(BAD not in e for e in expected)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[BAD] = float("nan")
    requests[0][0][7] = requests[3][0][29] = BAD
    executor, again = overlapping(loaded, backend, kv_blocks=14), list[Any]()
    monkeypatch.setattr(executor, "_attempt", lambda work, *rest: again.append(work))
    outputs, failures, _ = run(executor, requests, KNOBS)
    assert not again, "a step was run again for blocks that had been scrubbed"
    assert set(failures) == {"0", "3"} and all(isinstance(error, StepFailedError) for error in failures.values())
    assert [o for i, o in enumerate(outputs) if i not in (0, 3)] == [
        e for i, e in enumerate(expected) if i not in (0, 3)
    ]


@EACH
@pytest.mark.parametrize("late", [False, True], ids=["waiting", "later"])
def test_what_a_row_for_nothing_leaves_in_its_block_does_no_harm(backend: Backend, late: bool) -> None:
    neighbour_of_a_row_for_nothing(lambda loaded: overlapping(loaded, backend, kv_blocks=3), late)


@EACH
def test_what_was_fed_by_a_step_that_failed_is_run_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows when results are read, and the step behind is in flight by then."""
    loaded = tiny()
    requests = work([5, 20, 9], [8, 3, 12])
    expected = [reference(loaded, p, n) for p, n in requests]
    calls = reads_that_fail(monkeypatch)
    outputs, failures, _ = run(overlapping(loaded, backend), requests, KNOBS)
    assert len(calls) > 12
    assert not failures and outputs == expected


@EACH
def test_a_step_that_does_not_fit_runs_in_parts(backend: Backend) -> None:
    loaded = tiny()
    requests = work([40, 20, 9, 30, 12], [8, 12, 8, 8, 10])
    expected = [reference(loaded, p, n) for p, n in requests]

    def check(ids: torch.Tensor) -> None:
        if ids.shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    before_forward(loaded, check)
    executor = overlapping(loaded, backend)
    core = EngineCore(Scheduler(kv_blocks=40, block_size=8), executor, knobs=KNOBS, output=OutputProcessor())
    sequences = [
        core.add(Request(str(i), tuple(p), SamplingParams(max_tokens=n, ignore_eos=True), n, 0.0))
        for i, (p, n) in enumerate(requests)
    ]
    while core.has_work:
        core.step(1.0)
    assert [s.output for s in sequences] == expected
    assert core.settings.effective_limits.token_budget < 48


def test_an_engine_streams_and_cancels_while_steps_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    requests = work([5, 9, 30], [40, 60, 20])
    expected = [reference(loaded, p, n) for p, n in requests]
    executor = overlapping(loaded, kv_blocks=64)
    steps = Steps(executor, monkeypatch)
    model = FakeModel(tokenizer=None, vocab_size=VOCAB, max_model_len=512, eos_token_ids=())
    with Engine(model, executor=executor, kv_tokens=512, block_size=8) as engine:  # type: ignore[arg-type]
        streams = [engine.submit(p, max_tokens=n) for p, n in requests]
        seen = []
        for event in streams[1]:
            seen.append(event.token_id)
            if len(seen) == 7:
                break  # which cancels it
        assert [list(streams[at].result(timeout=60).token_ids) for at in (0, 2)] == [expected[0], expected[2]]
        assert seen == expected[1][:7] and list(streams[1].token_ids) == expected[1][: len(streams[1].token_ids)]
        assert engine.generate([requests[0][0]], max_tokens=40)[0].token_ids == tuple(expected[0])
        view = engine.view()
    assert view.running == 0 and steps.ahead > 20
    engine._core.scheduler.check_integrity()
