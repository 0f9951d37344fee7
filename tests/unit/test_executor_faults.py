"""What goes wrong inside a step stays with the request that brought it."""

from __future__ import annotations

import pytest
import torch

from runtime.errors import StepFailedError
from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.scheduler import Scheduler
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.backends import CPU, PLAIN, Backend
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.memory import is_out_of_memory
from tests.unit.executor_harness import TinyModel, before_forward, prompts, reads_that_fail, reference, run, tiny

BAD = 127  # a token the tests treat as poison
KNOBS = Knobs(max_batch_size=8, token_budget=64, chunk_size=32)
EACH = pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "plain"])


def _clean(lengths: list[int]) -> list[list[int]]:
    return [[3 if t == BAD else t for t in p] for p in prompts(lengths)]


def _expected(loaded: TinyModel, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    return [reference(loaded, p, n) for p, n in requests]


@EACH
def test_a_request_that_makes_the_model_raise_fails_alone(backend: Backend) -> None:
    loaded = tiny()
    requests = list(zip(_clean([5, 20, 9, 30, 12]), [8, 8, 8, 8, 8], strict=True))
    expected = _expected(loaded, requests)
    requests[2][0][4] = BAD

    def check(ids: torch.Tensor) -> None:
        if BAD in ids:
            raise ValueError("a bad token")

    before_forward(loaded, check)
    outputs, failures, _ = run(TorchExecutor(loaded, kv_blocks=32, block_size=8, backend=backend), requests, KNOBS)
    assert set(failures) == {"2"}
    assert isinstance(failures["2"], ValueError)
    assert outputs[2] == []
    assert [o for i, o in enumerate(outputs) if i != 2] == [e for i, e in enumerate(expected) if i != 2]


@EACH
def test_a_request_that_raises_while_it_decodes_fails_alone(backend: Backend) -> None:
    loaded = tiny()
    requests = list(zip(_clean([5, 20, 9]), [20, 20, 20], strict=True))
    expected = _expected(loaded, requests)
    steps = 0

    def check(ids: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps > 6 and expected[1][5] in ids[0, :]:
            raise ValueError("a bad token")

    before_forward(loaded, check)
    outputs, failures, _ = run(TorchExecutor(loaded, kv_blocks=32, block_size=8, backend=backend), requests, KNOBS)
    assert "1" in failures
    for i, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        assert output == (right[: len(output)] if str(i) in failures else right)


@EACH
def test_logits_that_are_not_finite_fail_their_own_row_and_do_not_spoil_reused_blocks(backend: Backend) -> None:
    loaded = tiny()
    lengths, counts = [21, 17, 9, 30, 12, 26, 8, 19], [8, 12, 6, 8, 9, 15, 4, 11]
    requests = list(zip(_clean(lengths), counts, strict=True))
    expected = _expected(loaded, requests)
    assert all(BAD not in e for e in expected)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[BAD] = float("nan")
    requests[0][0][7] = BAD
    requests[3][0][29] = BAD
    # 14 blocks: those of the failed requests are soon taken by others, who do not fill them at once
    executor = TorchExecutor(loaded, kv_blocks=14, block_size=8, backend=backend)
    outputs, failures, _ = run(executor, requests, KNOBS)
    assert set(failures) == {"0", "3"}
    assert all(isinstance(f, StepFailedError) and "NaN" in str(f) for f in failures.values())
    assert [o for i, o in enumerate(outputs) if i not in (0, 3)] == [
        e for i, e in enumerate(expected) if i not in (0, 3)
    ]


@EACH
def test_a_chunk_in_mid_prompt_that_is_not_finite_fails_before_its_blocks_are_shared(backend: Backend) -> None:
    loaded = tiny()
    [prompt] = _clean([60])
    [expected] = _expected(loaded, [(prompt, 6)])
    executor = TorchExecutor(loaded, kv_blocks=32, block_size=8, backend=backend)
    knobs = Knobs(max_batch_size=4, token_budget=24, chunk_size=24)
    core = EngineCore(Scheduler(kv_blocks=32, block_size=8), executor, knobs=knobs, output=OutputProcessor())
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    weight = loaded.model.get_input_embeddings().weight
    right = weight.detach().clone()
    with torch.no_grad():
        weight[prompt[20]] = float("nan")
    core.add(Request("first", tuple(prompt), params, 6, 0.0))
    result = core.step(1.0).result
    assert result is not None
    [(failed, error)] = result.failed
    assert failed.request.id == "first"
    assert isinstance(error, StepFailedError)
    assert "NaN (or infinite) keys or values between prompt tokens 0 and 23" in str(error)
    with torch.no_grad():
        weight.copy_(right)
    second = core.add(Request("second", tuple(prompt), params, 6, 2.0))
    now = 2.0
    while core.has_work:
        now = core.step(now).end
    assert second.output == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
    ids=["cuda", "cpu"],
)
@EACH
def test_a_step_that_does_not_fit_runs_in_parts(backend: Backend, error: Exception) -> None:
    loaded = tiny()
    requests = list(zip(_clean([40, 20, 9, 30, 12]), [8, 12, 8, 8, 10], strict=True))
    expected = _expected(loaded, requests)

    def check(ids: torch.Tensor) -> None:
        if ids.shape[1] > 10:
            raise error

    before_forward(loaded, check)
    executor = TorchExecutor(loaded, kv_blocks=32, block_size=8, backend=backend)
    core = EngineCore(Scheduler(kv_blocks=32, block_size=8), executor, knobs=KNOBS, output=OutputProcessor())
    sequences = [
        core.add(Request(str(i), tuple(p), SamplingParams(max_tokens=n, ignore_eos=True), n, 0.0))
        for i, (p, n) in enumerate(requests)
    ]
    first = core.step(1.0).result
    assert first is not None
    assert not first.failed
    assert min(load.tokens for load in first.oom) == 12  # 8 of one prompt and 4 of another
    assert max(load.tokens for load in first.fitted) == 10 and max(load.chunk for load in first.oom) == 32
    while core.has_work:
        core.step(2.0)
    assert [s.output for s in sequences] == expected


def test_a_request_that_does_not_fit_in_any_part_fails_with_the_cause() -> None:
    loaded = tiny()
    requests = list(zip(_clean([12, 5]), [4, 4], strict=True))
    expected = _expected(loaded, requests)
    requests[0][0][3] = BAD

    def check(ids: torch.Tensor) -> None:
        if BAD in ids:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    before_forward(loaded, check)
    outputs, failures, _ = run(TorchExecutor(loaded, kv_blocks=32, block_size=8), requests, KNOBS)
    assert set(failures) == {"0"}
    assert is_out_of_memory(failures["0"])
    assert outputs == [[], expected[1]]


@EACH
def test_an_error_that_shows_when_results_are_read_is_narrowed_down_too(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny()
    requests = list(zip(_clean([5, 20, 9]), [8, 8, 8], strict=True))
    expected = _expected(loaded, requests)
    calls = reads_that_fail(monkeypatch)
    executor = TorchExecutor(loaded, kv_blocks=32, block_size=8, backend=backend)
    outputs, failures, _ = run(executor, requests, KNOBS)
    assert len(calls) > 12
    assert not failures
    assert outputs == expected


def test_launch_and_collect_take_turns() -> None:
    executor = TorchExecutor(tiny(), kv_blocks=32, block_size=8)
    core = EngineCore(Scheduler(kv_blocks=32, block_size=8), executor, knobs=KNOBS, output=OutputProcessor())
    core.add(Request("r", (3, 4, 5), SamplingParams(max_tokens=4), 4, 0.0))
    plan = core.scheduler.schedule(1.0, KNOBS)
    with pytest.raises(RuntimeError, match="no step was launched"):
        executor.collect()
    executor.launch(plan)
    with pytest.raises(RuntimeError, match="before the last one was collected"):
        executor.launch(plan)
    assert [token.sequence.request.id for token in executor.collect().tokens] == ["r"]
    with pytest.raises(RuntimeError, match="no step was launched"):
        executor.collect()


def test_release_forgets_what_a_sequence_carried() -> None:
    executor = TorchExecutor(tiny(), kv_blocks=4)
    sequence = Sequence(Request("r", (3,), SamplingParams(), 1, 0.0))
    sequence.data = object()
    executor.release(sequence)
    assert sequence.data is None


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
