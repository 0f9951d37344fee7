"""Decode steps of real models, recorded: interpreted kernels on the CPU, and recordings that really run again at each replay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import Token
from runtime.llm.scheduler import Scheduler
from runtime.records import StepRecord
from runtime.request import Request, SamplingParams
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs
from runtime.torch_backend.backends import PLAIN, Backend
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.recorded_steps import prompt_ladder
from tests.unit.executor_harness import Oracle, neighbour_of_a_row_for_nothing, prompts, reference, run, tiny
from tests.unit.kernels import DEVICE, INTERPRETED

from runtime.torch_backend.cuda.backend import CUDA, PagedAttention  # isort: skip
from runtime.torch_backend.cuda.sampler import KernelSampler  # isort: skip
from tests.unit.recording import Recorder  # isort: skip

pytestmark = pytest.mark.skipif(
    not INTERPRETED.value, reason="these models lie on the CPU, where kernels must be interpreted"
)
MOST = 5
SLOW = pytest.mark.slow


def plain(recorder: Recorder | None) -> Backend:
    """PyTorch's own operations and our sampler, whose kernel a small vocabulary keeps short."""
    return PLAIN._replace(sampler=KernelSampler, record=None if recorder is None else recorder.graphs)


def ours(recorder: Recorder | None, prompts: tuple[int, ...] = ()) -> Backend:
    """What runs on a GPU, but that contexts are split into few parts. ``prompts``: tokens for which steps with prompts are
    recorded."""
    return CUDA._replace(
        prompt_ladder=lambda most, parameters: prompts,
        attention=lambda pool, loaded: PagedAttention(pool, loaded.device, splits=3),
        record=None if recorder is None else recorder.graphs,
        overlaps=False,
    )


def executor_of(loaded: Any, backend: Backend, overlaps: bool = False, **options: Any) -> TorchExecutor:
    made: dict[str, Any] = {"kv_blocks": 24, "block_size": 8, "max_batch_size": MOST, **options}
    return TorchExecutor(loaded, backend=backend, overlaps=overlaps, **made)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("gemma2", marks=SLOW)])
def test_greedy_tokens_are_those_of_generate(model_type: str, overlaps: bool) -> None:
    """Rows come and go, steps with prompts run between, and knobs change: nothing more is recorded."""
    loaded = tiny(model_type)
    lengths, counts = [3, 19, 8, 33, 5, 12], [9, 3, 14, 6, 1, 11]
    requests = list(zip(prompts(lengths, seed=5), counts, strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    recorder = Recorder()
    executor = executor_of(loaded, plain(recorder), overlaps)
    assert executor.graphs == StepGraphs((1, 2, 4, 5)) and recorder.recorded == [5, 4, 2, 1]
    knobs = [Knobs(5, 0, 24, 12), Knobs(5, 0, 24, 12), Knobs(2, 0, 24, 3), Knobs(4, 0, 9, 12)]
    outputs, failures, _ = run(executor, requests, iter(knobs[at // 5 % 4] for at in range(1000)))
    assert not failures and outputs == expected
    assert recorder.recorded == [5, 4, 2, 1] and len(recorder.replayed) > 8
    assert len(set(recorder.replayed)) > 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_with_drafts_run_beside_recorded_ones(overlaps: bool) -> None:
    """A row that drafts is further on, perhaps in other blocks, when it is recorded again."""
    loaded = tiny()
    requests = list(zip(prompts([3, 19, 8, 5], seed=5), [29, 13, 24, 21], strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    drafter, recorder = Oracle({str(i): tokens for i, tokens in enumerate(expected)}), Recorder()
    executor = executor_of(loaded, plain(recorder), overlaps)
    heard: list[StepRecord] = []
    knobs = [Knobs(5, 0, 64, 32, drafts) for drafts in (0, 0, 3, 0, 1, 3, 0, 0)]
    outputs, failures, _ = run(
        executor, requests, iter(knobs[at % 8] for at in range(1000)), drafter=drafter, heard=heard
    )
    assert not failures and outputs == expected
    assert sum(step.accepted for step in heard) > 5 and len(recorder.replayed) > 5
    assert len(recorder.replayed) + sum(step.drafted > 0 for step in heard) <= len(heard)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "overlaps", "counts"),
    [
        ("qwen3", True, [4, 2]),
        pytest.param("llama", False, [9, 3, 14], marks=SLOW),
        pytest.param("qwen3", True, [9, 3, 14], marks=SLOW),
    ],
)
def test_the_same_by_the_kernels_of_a_gpu(model_type: str, overlaps: bool, counts: list[int]) -> None:
    loaded = tiny(model_type, num_hidden_layers=1)
    requests = list(zip(prompts([3, 19, 8][: len(counts)], seed=5), counts, strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    recorder = Recorder()
    executor = executor_of(loaded, ours(recorder), overlaps, max_batch_size=2 if len(counts) == 2 else MOST)
    outputs, failures, _ = run(executor, requests, Knobs(max_batch_size=5, token_budget=24, chunk_size=20))
    assert not failures and outputs == expected
    assert recorder.replayed


def sampled(executor: TorchExecutor, params: list[dict[str, Any]], tokens: int = 6) -> dict[str, list[Token]]:
    scheduler = Scheduler(kv_blocks=executor.pool.block_count, block_size=executor.pool.block_size)
    core = EngineCore(scheduler, executor, knobs=Knobs(5, 0, 64, 64), output=OutputProcessor())
    found: dict[str, list[Token]] = {}
    for at, (prompt, one) in enumerate(zip(prompts([7 + 5 * n for n in range(len(params))], 3), params, strict=True)):
        core.add(Request(f"r{at}", tuple(prompt), SamplingParams(max_tokens=tokens, **one), tokens, 0.0))
    while core.has_work:
        result = core.step(1.0).result
        for token in result.tokens if result is not None else ():
            found.setdefault(token.sequence.request.id, []).append(token)
    return found


@pytest.mark.slow
def test_sampled_tokens_are_those_of_steps_that_are_not_recorded() -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 1.5, "seed": -4},
        {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
        {},
    ]
    loaded, recorder = tiny(), Recorder()
    found = sampled(executor_of(loaded, plain(recorder), overlaps=True, max_batch_size=3), params, 5)
    eager = sampled(executor_of(loaded, plain(None)), params, 5)
    assert {k: [t.id for t in v] for k, v in found.items()} == {k: [t.id for t in v] for k, v in eager.items()}
    assert len(recorder.replayed) >= 4


def test_rows_with_log_probabilities_or_a_penalty_run_beside() -> None:
    loaded, recorder = tiny(), Recorder()
    params: list[dict[str, Any]] = [{"logprobs": 1}, {"repetition_penalty": 1.3}, {}]
    found = sampled(executor_of(loaded, plain(recorder)), params, 4)
    eager = sampled(executor_of(loaded, plain(None)), params, 4)
    assert {k: [t.id for t in v] for k, v in found.items()} == {k: [t.id for t in v] for k, v in eager.items()}
    assert all(token.logprob is not None for token in found["r0"])
    assert not recorder.replayed


def started(backend: Backend) -> tuple[TorchExecutor, EngineCore]:
    """Three requests that decode, at different positions."""
    executor = executor_of(tiny(), backend)
    scheduler = Scheduler(kv_blocks=24, block_size=8)
    core = EngineCore(scheduler, executor, knobs=Knobs(5, 0, 64, 64), output=OutputProcessor())
    for at, prompt in enumerate(prompts([5, 8, 21], seed=9)):
        core.add(Request(f"r{at}", tuple(prompt), SamplingParams(max_tokens=30, ignore_eos=True), 30, 0.0))
    for _ in range(3):
        core.step(1.0)
    return executor, core


def test_a_replay_computes_the_same_bits_as_the_call_and_dummies_touch_nothing() -> None:
    """The pool, the tokens and every buffer, after a replay of three rows in a graph of four, after the same call outside of one,
    and after one whose dummy is full of rubbish."""
    executor, core = started(plain(Recorder()))
    resident = executor._resident
    assert resident is not None
    rows = resident.rows
    held = [rows._whole, rows._real, rows.table, rows.sampled]
    held += [x for layer in executor.pool.layers.values() for x in (layer.keys, layer.values)]
    before = [x.clone() for x in held]
    found: list[list[torch.Tensor]] = []
    for way in ("replay", "call", "rubbish"):
        with torch.inference_mode():
            for x, y in zip(held, before, strict=True):
                x.copy_(y)
            if way == "rubbish":
                rows.tokens[3] = 77
                rows.sampled[3] = -5
                for layer in executor.pool.layers.values():
                    layer.keys[-8:], layer.values[-8:] = float("nan"), float("nan")
            if way == "replay":
                resident._graphs.replay(4)
            else:
                resident._step(4)
        found.append([x.clone() for x in held])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][0], before[0])
    whole, _, _, sampled, *layers = found[0]
    assert whole[:, 3:].eq(0).all()
    rubbish = found[2]
    assert torch.equal(rubbish[0][:, :3], whole[:, :3]) and torch.equal(rubbish[3][:3], sampled[:3])
    own = 24 * 8  # what follows are the block that pads tables, always zero, and the dummies' block
    for ours_, theirs, was in zip(layers, rubbish[4:], before[4:], strict=True):
        assert torch.equal(ours_[: own + 8], theirs[: own + 8])
        assert not ours_[own : own + 8].any()
        changed = (ours_[:own] != was[:own]).flatten(1).any(1).nonzero().flatten().tolist()
        assert len(changed) == 3  # one slot a row
    core.step(1.0)


@pytest.mark.parametrize("part", ["", "lm_head", "model.layers.0.inner.self_attn.o_proj"])
def test_a_model_that_somebody_hooks_into_runs_as_it_is(part: str) -> None:
    recorder = Recorder()
    executor, core = started(plain(recorder))
    replays, seen = len(recorder.replayed), []
    assert replays
    handle = executor.loaded.model.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    core.step(1.0)
    assert seen and len(recorder.replayed) == replays
    handle.remove()
    core.step(1.0)
    assert len(recorder.replayed) == replays + 1


class Refuses(Recorder):
    """A device that cannot record this model."""

    def record(self, call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_recorded_runs_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    loaded = tiny()
    requests = list(zip(prompts([3, 9]), [5, 3], strict=True))
    executor = executor_of(loaded, plain(Refuses()))
    assert executor.graphs == NO_GRAPHS
    assert "decode steps of test are not recorded" in caplog.text and "not permitted" in caplog.text
    assert run(executor, requests)[0] == [reference(loaded, p, n) for p, n in requests]


def test_a_failed_row_and_a_failed_replay_stay_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, recorder = tiny(), Recorder()
    requests = list(zip(prompts([5, 20, 9], seed=4), [8, 12, 6], strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    executor = executor_of(loaded, plain(recorder), overlaps=True)
    replays = executor._resident._graphs._replays  # type: ignore[union-attr,attr-defined]
    whole, calls = replays[4], []

    def broken() -> None:
        calls.append(1)
        whole()
        if len(calls) == 2:
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    replays[4] = broken
    outputs, failures, _ = run(executor, requests, Knobs(5, 0, 64, 64))
    assert len(calls) > 2 and not failures and outputs == expected


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "later"])
def test_what_a_row_for_nothing_leaves_in_its_block_does_no_harm(late: bool) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"kv_blocks": 3, "max_batch_size": 2}
    neighbour_of_a_row_for_nothing(lambda loaded: executor_of(loaded, plain(recorder), overlaps=True, **options), late)
    assert len(recorder.replayed) > 8


def test_the_kernels_are_where_the_models_are() -> None:
    assert DEVICE.type == "cpu"


PROMPTS = (4, 12, 24)
"""Tokens for which steps with prompts are recorded."""


@pytest.mark.slow
@pytest.mark.parametrize(("overlaps", "counts"), [(True, [2, 1, 2]), (False, [6, 3, 5])])
def test_steps_with_prompts_recorded_by_the_kernels_of_a_gpu(overlaps: bool, counts: list[int]) -> None:
    """Prompts whole and in chunks, alone and beside decodes, shorter and longer ones behind each other in the same tensors."""
    loaded = tiny(num_hidden_layers=1)
    requests = list(zip(prompts([3, 19, 8], seed=5), counts, strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    recorder = Recorder()
    executor = executor_of(loaded, ours(recorder, PROMPTS), overlaps, max_batch_size=3, token_budget=24)
    made = list(recorder.recorded)
    assert made[-3:] == [24, 12, 4]
    outputs, failures, _ = run(executor, requests, Knobs(max_batch_size=3, token_budget=24, chunk_size=9))
    assert not failures and outputs == expected
    assert recorder.recorded == made, "nothing is recorded later"
    assert {4, 12, 24} & set(recorder.replayed)


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "sizes"), [(256, (4,)), (1, (24,))], ids=["tokens", "sequences"])
def test_a_step_that_does_not_fit_a_recording_runs_beside(
    monkeypatch: pytest.MonkeyPatch, sequences: int, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr("runtime.torch_backend.executor._RECORDED_SEQUENCES", sequences)
    loaded = tiny(num_hidden_layers=1)
    requests = list(zip(prompts([3, 19, 8], seed=5), [2, 1, 2], strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    recorder = Recorder()
    executor = executor_of(loaded, ours(recorder, sizes), max_batch_size=2, token_budget=24)
    assert executor.graphs == StepGraphs((1, 2), sizes, min(2, sequences))
    heard: list[StepRecord] = []
    knobs = Knobs(max_batch_size=2, token_budget=24, chunk_size=24)
    outputs, failures, _ = run(executor, requests, knobs, heard=heard)
    assert not failures and outputs == expected
    with_prompts = sum(step.prefill_tokens > 0 for step in heard)
    assert recorder.replayed.count(sizes[0]) < with_prompts
    rows = [executor.graphs.rows_of(StepFeatures.of(step)) for step in heard]
    assert recorder.replayed == [size for size in rows if size], "what predicts a step knows how it runs"


@pytest.mark.slow
def test_prompts_that_cannot_be_recorded_leave_decodes_recorded(caplog: pytest.LogCaptureFixture) -> None:
    class RefusesPrompts(Recorder):
        def record(self, call: Any) -> Any:
            if call.args[0] > MOST:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(call)

    loaded = tiny(num_hidden_layers=1)
    requests = list(zip(prompts([3, 9], seed=5), [3, 2], strict=True))
    expected = [reference(loaded, p, n) for p, n in requests]
    recorder = RefusesPrompts()
    executor = executor_of(loaded, ours(recorder, (8, 24)), max_batch_size=2, token_budget=24)
    assert executor.graphs == StepGraphs((1, 2))
    assert "steps with prompts of test are not recorded: operation not permitted" in caplog.text
    outputs, failures, _ = run(executor, requests, Knobs(max_batch_size=2, token_budget=24, chunk_size=24))
    assert not failures and outputs == expected and set(recorder.replayed) <= {1, 2} and recorder.replayed


@pytest.mark.slow
def test_a_prompt_that_is_not_finite_fails_alone_in_a_recorded_step() -> None:
    loaded = tiny(num_hidden_layers=1)
    (first, spoilt, last), count = prompts([5, 7, 6], seed=5), 2
    expected = [reference(loaded, prompt, count) for prompt in (first, last)]
    used = {*first, *last, *expected[0], *expected[1]}
    poison = next(token for token in spoilt if token not in used)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poison] = float("nan")
    recorder = Recorder()
    executor = executor_of(loaded, ours(recorder, (24,)), max_batch_size=3, token_budget=24)
    requests = [(first, count), (spoilt, count), (last, count)]
    outputs, failures, _ = run(executor, requests, Knobs(max_batch_size=3, token_budget=24, chunk_size=24))
    assert recorder.replayed[0] == 24, "the three prompts are one recorded step"
    assert list(failures) == ["1"] and outputs == [expected[0], [], expected[1]]


def test_plain_attention_records_no_prompts() -> None:
    recorder = Recorder()
    executor = executor_of(tiny(), plain(recorder), token_budget=64)
    assert executor.graphs == StepGraphs((1, 2, 4, 5)) and recorder.recorded == [5, 4, 2, 1]


def test_for_how_many_tokens_steps_with_prompts_are_recorded() -> None:
    """Up to what a step may hold and what a GPU computes while the host launches it; few dummies in any step."""
    sizes = prompt_ladder(8192, 440_000_000)
    assert sizes[0] == 16 and sizes[-1] == 2048 and len(sizes) == len(set(sizes)) == 24 and list(sizes) == sorted(sizes)
    assert all(after - before <= max(16, 0.25 * before) for before, after in pairwise(sizes))
    assert prompt_ladder(8192, 7_000_000_000)[-1] == 512 and prompt_ladder(8192, 400_000_000_000) == ()
    assert prompt_ladder(100, 440_000_000)[-2:] == (96, 100) and prompt_ladder(5, 440_000_000) == (5,)
