"""What a step asks of a GPU, seen without one: operations a layer, and where the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend import executor
from runtime.torch_backend.backends import PLAIN
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.padded import PaddedAttention
from tests.unit.executor_harness import tiny
from tests.unit.step_operations import DEVICE, Counted, put_elsewhere

SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "logprobs": 3,
}


def executor_of(model_type: str, layers: int) -> TorchExecutor:
    loaded = tiny(model_type, num_hidden_layers=layers)
    return TorchExecutor(loaded, kv_blocks=40, block_size=4, backend=PLAIN)


def sequences(count: int, **params: Any) -> list[Sequence]:
    made = []
    for at in range(count):
        sequence = Sequence(Request(f"r{at}", tuple(range(3, 20)), SamplingParams(**params), 20, 0.0))
        sequence.blocks = list(range(at * 6, at * 6 + 6))
        made.append(sequence)
    return made


def plan_of(decoding: list[Sequence], chunks: list[Chunk]) -> StepPlan:
    decodes = DecodeSet()
    for sequence in decoding:
        decodes.members[sequence] = None
        sequence.computed = len(sequence.request.prompt)
        sequence.output.append(5)
    decodes.version = 1
    return StepPlan(0, len(decoding), 0, tuple(chunks), decodes, 1, 1, float("inf"), 0, 64, LimitedBy.DEMAND, 0)


def decode_step(**params: Any) -> StepPlan:
    return plan_of(sequences(4, **params), [])


def mixed_step(**params: Any) -> StepPlan:
    a, b, c, d = sequences(4, **params)
    return plan_of([a], [Chunk(b, 0, 17, True), Chunk(c, 5, 6, False), Chunk(d, 0, 9, False)])


def operations(engine: TorchExecutor, plan: StepPlan, count: Counted | None = None) -> list[str]:
    """Names of all operations of launching ``plan``, but for those of the first time."""
    engine.launch(plan)
    engine.collect()
    count = count or Counted()
    count.names = []
    with count:
        engine.launch(plan)
    engine.collect()
    return list(count.names)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """A count in which each fused function, and attention, is one kernel."""
    count = Counted()

    def whole(owner: type, name: str) -> None:
        plainly = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with count.one(name):
                return plainly(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("norm", "add_norm", "rope_write", "silu_mul"):
        whole(Operations, name)
    whole(PaddedAttention, "run")
    yield count


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("plan", [decode_step, mixed_step])
def test_a_layer_is_nine_kernels(model_type: str, plan: Callable[[], StepPlan], kernels: Counted) -> None:
    """Where a device computes each fused function in one: at most 16 is what a GPU's decode step can afford."""

    few, more = (operations(executor_of(model_type, layers), plan(), kernels) for layers in (2, 4))
    assert (len(more) - len(few)) / 2 == 9
    for name in ("add_norm", "rope_write", "run", "silu_mul"):
        assert name in few
    assert more.count("add_norm") == 2 * 4 and more.count("norm") == 1  # the last is the model's own norm


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_layer_takes_fewer_plain_operations_than_its_own_code(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composite ones, such as a norm, taken apart."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # which would not take them apart

    def a_layer() -> float:
        few, more = (len(operations(executor_of(model_type, layers), decode_step())) for layers in (2, 4))
        return (more - few) / 2

    ours = a_layer()
    for name in ("fuse_norms", "fuse_layers"):
        monkeypatch.setattr(executor, name, lambda *_: 0)
    assert ours < 0.8 * a_layer()


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, SAMPLED], ids=["greedy", "logprobs", "sampled"])
@pytest.mark.parametrize("plan", [decode_step, mixed_step])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "olmo2"])
def test_launch_waits_for_nothing_and_collect_copies_once(
    model_type: str, plan: Callable[..., StepPlan], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers of ours, and with model code around the attention hook."""
    engine = executor_of(model_type, 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes a driver
    put_elsewhere(engine)
    launching, collecting = Counted(), Counted()
    made = plan(**params)
    with launching:
        engine.launch(made)
    assert engine._launched[-1].cause is None, engine._launched[-1].cause
    assert launching.waits == []
    with collecting:
        result = engine.collect()
    assert collecting.copies == 1 and len(collecting.waits) == 1
    assert len(result.tokens) == made.n_decode + sum(chunk.samples for chunk in made.chunks)
    assert all((token.logprob is not None) == ("logprobs" in params) for token in result.tokens)


@pytest.mark.parametrize("params", [{}, {"logprobs": 2, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_step_behind_one_in_flight_waits_for_nothing_either(
    model_type: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is fed tokens that only the device knows."""
    loaded = tiny(model_type)
    engine = TorchExecutor(loaded, kv_blocks=40, block_size=4, backend=PLAIN, overlaps=True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    put_elsewhere(engine)
    a, b, c, d = sequences(4, **params)
    first = plan_of([a, b], [Chunk(c, 0, 17, True)])
    engine.launch(first)
    c.computed, c.joined = 17, 0
    second = plan_of([a, b, c], [Chunk(d, 0, 17, True)])._replace(step=1)
    for sequence in (a, b, c):
        sequence.output.pop()
    with Counted() as count:
        engine.launch(second)
    assert not engine.in_trouble and count.waits == []
    for made in (first, second):
        with Counted() as count:
            result = engine.collect()
        assert count.copies == 1 and len(count.waits) == 1
        assert len(result.tokens) == made.n_decode + 1


def test_a_wait_is_seen() -> None:
    """What the test above looks for, done on purpose."""
    there = torch.zeros(3, device=DEVICE)
    with Counted() as count:
        there.cpu()
        torch.arange(3).to(DEVICE)
        torch.arange(3).to(DEVICE, non_blocking=True)
        with pytest.raises(RuntimeError, match="meta"):
            bool(there.sum() > 0)
    assert len(count.waits) == 3 and count.copies == 1
