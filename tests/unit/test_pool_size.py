"""The KV pool is allocated when an engine is made, by what is free beside the weights and, where a device tells, the largest
step; one that does not fit is refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.engines.own import OwnSource
from runtime.errors import ModelError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.request import SamplingParams, Sequence
from runtime.step_model import StepGraphs
from runtime.torch_backend import backends, kv_pool
from runtime.torch_backend.attention import AttentionBackend
from runtime.torch_backend.backends import CPU, PLAIN, Backend
from runtime.torch_backend.contract import KVLayer, Loaded
from runtime.torch_backend.cuda.memory import CUDAMemory
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.inputs import PackedBatch
from runtime.torch_backend.kv_pool import KVPool, LayerKV, check_pool
from runtime.torch_backend.loading import LoadedModel, from_model
from runtime.torch_backend.pool_size import MARGIN, largest_step, mixed_steps, pool_blocks
from runtime.torch_backend.sampling import Columns, Drawn, Sampler
from tests.unit import loading_models
from tests.unit.recording import Recorder


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have so many bytes be available, of a machine that has far more."""

    def now(size: int) -> None:
        monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=size, total=1 << 60))

    return now


def loaded_model() -> LoadedModel:
    return from_model(loading_models.tiny())


def test_a_pool_larger_than_what_is_free(free: Callable[[int], None]) -> None:
    loaded = loaded_model()
    free(1000 * loaded.kv_bytes_per_token)
    check_pool(loaded, 1000)
    with pytest.raises(ValueError) as refused:
        Engine(loaded, kv_tokens=1001)
    said = str(refused.value)
    assert said.startswith(
        "kv_tokens is 1001; that KV pool takes 0.000239 GiB, and 0.000238 GiB of cpu are free beside"
    )
    assert said.endswith("it must be at most 992")  # whole blocks of 16


def test_the_pool_is_there_before_the_first_step() -> None:
    loaded = loaded_model()
    executor = TorchExecutor(loaded, kv_blocks=10, block_size=16)
    assert executor.pool.bytes == (10 + 2) * 16 * loaded.kv_bytes_per_token
    with Engine(loaded, kv_tokens=160) as engine:
        assert isinstance(engine.executor, TorchExecutor)
        before = engine.executor.pool.bytes
        engine.generate([[1, 2, 3]], max_tokens=3)
        assert engine.executor.pool.bytes == before == 12 * 16 * loaded.kv_bytes_per_token
        assert len(engine.executor.pool.layers) == loaded.layers


def test_layers_take_the_tensors_of_their_shape_whatever_the_order_of_their_calls() -> None:
    wide, narrow = KVLayer((2, 8), (2, 4), torch.float32), KVLayer((1, 6), (1, 6), torch.bfloat16)
    pool = KVPool(3, 4, [wide, narrow])
    held = pool.bytes
    assert held == 16 * (4 * (16 + 8) + 2 * (6 + 6))
    cpu = torch.device("cpu")
    layer = pool.layer(torch.nn.Identity(), narrow, cpu)
    assert layer.keys.shape == (16, 1, 6) and layer.keys.dtype == torch.bfloat16 and pool.bytes == held
    pool.layer(torch.nn.Identity(), wide, cpu)
    assert pool.bytes == held and pool.kept == (narrow, wide)
    pool.layer(torch.nn.Identity(), narrow, cpu)
    assert pool.bytes > held, "one that the probe has not seen"


def test_memory_that_runs_out_while_the_pool_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free and what can be had in one piece are two things, and others may have taken it since."""
    allocated = []

    def zeros(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
        if len(allocated) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        allocated.append(shape)
        return torch.empty(0)

    monkeypatch.setattr(kv_pool, "_zeros", zeros)
    with pytest.raises(
        ValueError, match=r"kv_tokens is 160; memory of cpu ran out after 3 of 4 layers .* 120 tokens fit"
    ):
        KVPool(10, 16, [KVLayer((2, 8), (2, 8), torch.float32)] * 4)


# -- on a device that tells what its memory holds ---------------------------------------------------------------------------

LIMITS = KnobLimits(max_batch_size=6, token_budget=40, chunk_size=16)


class Device:
    """Says of its memory what it is told to say, in turn, and remembers the pools that were there when it was last asked."""

    def __init__(self, *free: int, peak: int, most_tokens: int = 1 << 30) -> None:
        self.says, self.peak_bytes, self.most_tokens = list(free), peak, most_tokens
        self.steps: list[tuple[int, int]] = []
        """Sequences and tokens of each."""
        self.peaks: list[tuple[int, int]] = []
        self._pools: list[weakref.ref[KVPool]] = []
        self.pools_left = -1

    def free(self) -> int:
        if self._there():  # as any device that is asked
            gc.collect()
        self.pools_left = self._there()
        return self.says.pop(0)

    def _there(self) -> int:
        return sum(pool() is not None for pool in self._pools)

    def peak(self, call: Callable[[], object]) -> int:
        before = len(self.steps)
        call()
        self.peaks += self.steps[before:]
        return self.peak_bytes

    @property
    def backend(self) -> Backend:
        """The CPU's, which runs whatever is asked of this device."""
        return CPU._replace(attention=lambda pool, loaded: Watched(self, pool, loaded), memory=lambda device: self)

    def watch(self, pool: KVPool) -> None:
        self._pools.append(weakref.ref(pool))


class Watched:
    """The CPU's attention, which runs out of memory where a step is too large for ``device``."""

    def __init__(self, device: Device, pool: KVPool, loaded: Loaded) -> None:
        device.watch(pool)
        self._device, self._inner = device, CPU.attention(pool, loaded)

    def plan(self, batch: PackedBatch) -> Any:
        found = self._inner.plan(batch)
        tokens = len(batch.rows.sequences) + sum(chunk.count for chunk in batch.chunks)
        if tokens > self._device.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._device.steps.append((len(batch.rows.sequences) + len(batch.chunks), tokens))
        return found

    def run(self, *given: Any) -> torch.Tensor:
        return self._inner.run(*given)


def protocol_holds(watched: Watched) -> AttentionBackend:
    return watched


def test_the_pool_gets_what_is_free_behind_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole engine: it runs the largest step with the weights loaded, lets go of that, and allocates once."""
    loaded = loaded_model()
    block = 16 * loaded.kv_bytes_per_token
    device = Device(999, 1000 * block, peak=300 * block)
    monkeypatch.setattr(backends, "CPU", device.backend)
    with Engine(loaded, limits=LIMITS) as engine:
        blocks = int((1000 - 300 - 2) * (1 - MARGIN))
        assert engine.facts.kv_tokens == blocks * 16 == 677 * 16
        assert isinstance(engine.executor, TorchExecutor)
        assert engine.executor.pool.bytes == (677 + 2) * block
        assert not device.says and device.pools_left == 0, "a pool was still there when what is free was asked"
        assert device.peaks == [(6, 40)] * 2, "as many sequences and tokens as the ceilings allow"
        before = engine.executor.pool.bytes
        engine.generate([[1, 2, 3]], max_tokens=3)
        assert engine.executor.pool.bytes == before
    assert OwnSource(loaded).default_kv_tokens() is None, "it is known when an engine has been started"


def test_tokens_that_do_not_fit_beside_weights_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_model()
    block = 16 * loaded.kv_bytes_per_token
    monkeypatch.setattr(backends, "CPU", Device(0, 1 << 30, peak=(1 << 30) - 102 * block).backend)
    with Engine(loaded, limits=LIMITS, kv_tokens=100 * 16) as engine:
        assert engine.facts.kv_tokens == 1600
    monkeypatch.setattr(backends, "CPU", Device(0, 1 << 30, peak=(1 << 30) - 102 * block).backend)
    with pytest.raises(ValueError) as refused:
        Engine(loaded, limits=LIMITS, kv_tokens=101 * 16)
    assert str(refused.value) == (
        "kv_tokens is 1616; that KV pool takes 0.000385 GiB, and 1 GiB of cpu are free beside the weights of llama, of which a "
        "step of 6 sequences and 40 tokens takes 1 GiB and its graphs 0 GiB; it must be at most 1600"
    )


def test_no_block_is_left_beside_weights_and_step() -> None:
    loaded = loaded_model()
    with pytest.raises(ValueError, match=r"limits\.token_budget is 40 and limits\.max_batch_size 6; .*lower them"):
        pool_blocks(loaded, LIMITS, 16, backend=Device(0, 5000, peak=4000).backend)


def test_a_largest_step_that_does_not_fit_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    """Ceilings are lowered as steps run out of memory; what such a step would take is not kept free."""
    loaded = loaded_model()
    block = 16 * loaded.kv_bytes_per_token
    device = Device(0, 100 * block, peak=10 * block, most_tokens=20)
    assert pool_blocks(loaded, LIMITS, 16, backend=device.backend) == int(88 * (1 - MARGIN))
    assert device.peaks == [(3, 20)] * 2
    assert "a step of 40 tokens does not fit beside the weights of llama" in caplog.text
    with pytest.raises(ModelError, match="model llama: a step of one token does not fit beside its weights on cpu"):
        pool_blocks(loaded, LIMITS, 16, backend=Device(peak=0, most_tokens=0).backend)


def test_room_is_left_for_a_step_whose_rows_are_all_penalised_and_scored() -> None:
    """Which copies all logits; and no request waits until that is compiled."""
    loaded = loaded_model()
    block, sampled = 16 * loaded.kv_bytes_per_token, list[set[SamplingParams]]()

    class Noting(Sampler):
        def draw(self, logits: torch.Tensor, sequences: Seq[Sequence], *given: Any, **named: Any) -> Drawn:
            sampled.append({sequence.request.params for sequence in sequences})
            return super().draw(logits, sequences, *given, **named)

    class Copying(Device):
        def peak(self, call: Callable[[], object]) -> int:
            super().peak(call)
            (params,) = sampled[-1]
            return (100 + 200 * (params.repetition_penalty != 1 and params.logprobs is not None)) * block

    device = Copying(0, 1000 * block, peak=0)
    backend = device.backend._replace(sampler=Noting)
    assert pool_blocks(loaded, LIMITS, 16, backend=backend) == int((1000 - 300 - 2) * (1 - MARGIN))
    assert device.peaks == [(6, 40)] * 2


def test_never_more_than_sequences_of_the_whole_context_fill() -> None:
    loaded = loaded_model()
    assert pool_blocks(loaded, LIMITS, 16, backend=Device(0, 1 << 60, peak=0).backend) == 4096 * 16


@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 200), st.integers(1, 100))
def test_the_largest_step_fills_the_ceilings(batch: int, budget: int, chunk: int, context: int) -> None:
    limits = KnobLimits(max_batch_size=batch, token_budget=budget, chunk_size=chunk)
    plan = largest_step(limits, context, 4, 7)
    sequences, tokens = plan.n_decode + len(plan.chunks), plan.n_decode + plan.prefill_tokens
    assert sequences <= batch and tokens <= budget
    assert all(part.count <= min(chunk, context) and part.samples for part in plan.chunks)
    longest = min(chunk, context)
    assert tokens == budget or sequences == batch == len(plan.chunks)
    assert sequences == min(batch, budget) or (tokens == budget and len(plan.chunks) <= -(-budget // longest))
    contexts = [s.computed + 1 for s in plan.decode_rows()]
    assert contexts == [max(2, context), *[2] * (len(contexts) - 1)] or not contexts
    assert plan.decode_context == sum(contexts)
    blocks = [b for s in (*plan.decode_rows(), *(c.sequence for c in plan.chunks)) for b in s.blocks]
    assert set(blocks) <= set(range(7))


class Likeliest(Sampler):
    """Greedy whatever is asked for, so that a step can be recorded."""

    def choose_from(self, logits: torch.Tensor, columns: Columns, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(logits.argmax(1))

    def seed_of(self, sequence: Sequence) -> int:
        return 0

    def top_k_of(self, params: SamplingParams) -> int:
        return 0


class Refuses(Recorder):
    """A device that cannot record this model."""

    def record(self, call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


class Blind:
    """Attention that sees nothing, but whose steps with prompts can be recorded, too."""

    def __init__(self, pool: KVPool, loaded: Loaded) -> None:
        self._plain = PLAIN.attention(pool, loaded)
        self.plan = self._plain.plan

    def fixed(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        pass

    def refresh(self, state: None, context: object) -> None:
        pass

    def fixed_step(self, table: torch.Tensor, tokens: int) -> None:
        pass

    def refresh_step(self, state: None, new: object, context: object) -> None:
        pass

    def run(
        self, state: Any, layer: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Any
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[2])


@pytest.mark.slow
@pytest.mark.parametrize("with_prompts", [False, True])
def test_the_pool_leaves_room_for_all_graphs(with_prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest is recorded to see what it takes, then the two largest, then all of those with prompts; and once the pool is
    there, all of them, once."""
    loaded = loaded_model()
    block, recorder = 16 * loaded.kv_bytes_per_token, Recorder()
    prompts, says = ([16, 32, 40], [870 * block]) if with_prompts else ([], [])
    device = Device(900 * block, 800 * block, 795 * block, *says, 1000 * block, peak=50 * block)

    def attention(pool: KVPool, loaded: Loaded) -> AttentionBackend:
        device.watch(pool)
        return Blind(pool, loaded) if with_prompts else PLAIN.attention(pool, loaded)

    recorded = PLAIN._replace(attention=attention, sampler=Likeliest, record=recorder.graphs, memory=lambda _: device)
    monkeypatch.setattr(backends, "CPU", recorded)
    if with_prompts:
        monkeypatch.setattr(
            "runtime.torch_backend.self_test.self_test", lambda loaded: None
        )  # it would see that we are blind
    with Engine(loaded, limits=LIMITS) as engine:
        tables = 8 * 6 * (loaded.max_model_len // 16)
        graphs = 100 * block + 3 * 5 * block + tables + with_prompts * (30 * block + tables)
        assert engine.facts.kv_tokens == int((948 * block - graphs) * (1 - MARGIN)) // block * 16
        assert engine.facts.graphs == StepGraphs((1, 2, 4, 6), tuple(prompts), 6 if prompts else 0)
        made = [6, 6, 4, 1, *reversed(prompts), 6, 4, 2, 1, *reversed(prompts)]
        assert recorder.recorded == made and not device.says and device.pools_left == 0
        for knobs in (Knobs(5, 0, 24, 12), Knobs(2, 0, 9, 3)):
            engine.set_knobs(knobs)
            engine.generate([[1, 2, 3], [4, 5]], max_tokens=3)
        assert recorder.recorded == made and recorder.replayed, "no knob has a step recorded"
    device.says = [900 * block, 1000 * block]
    refuses = recorded._replace(record=Refuses().graphs)
    assert pool_blocks(loaded, LIMITS, 16, backend=refuses) == int(948 * (1 - MARGIN)), (
        "no graphs, and no room for them"
    )


def test_what_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    reserved = iter([5000, 9500])

    def said(name: str, value: Callable[[], Any] = lambda: None) -> None:
        def answer(device: object = None) -> Any:
            calls.append(name)
            return value()

        monkeypatch.setattr(torch.cuda, name, answer)

    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        said(name)
    said("mem_get_info", lambda: (700, 1000))
    said("memory_reserved", lambda: next(reserved))
    said("max_memory_reserved", lambda: next(reserved))
    memory = CUDAMemory(torch.device("cuda"))
    assert memory.free() == 700 and calls == ["collect", "synchronize", "empty_cache", "mem_get_info"]
    calls.clear()
    assert memory.peak(lambda: calls.append("step")) == 4500
    settled = ["collect", "synchronize", "empty_cache", "memory_reserved", "reset_peak_memory_stats"]
    assert calls == [*settled, "step", "synchronize", "max_memory_reserved"]


def test_steps_that_have_kernels_compiled_run_and_stay_within_the_ceilings() -> None:
    loaded = loaded_model()
    executor = TorchExecutor(loaded, kv_blocks=64, block_size=16)
    wide = list(mixed_steps(KnobLimits(), loaded.max_model_len, 16, 64))
    assert {chunk.count for plan in wide for chunk in plan.chunks} >= {1, 2, 4, 8, 16, 28, 60}
    assert {len(plan.chunks) for plan in wide} == {1, 20} and all(plan.n_decode == 1 for plan in wide)
    for plan in wide[:5]:
        assert not executor.execute(plan, 0.0, 0.0).failed
    for plan in mixed_steps(LIMITS, loaded.max_model_len, 16, 64):
        assert plan.budget_used <= LIMITS.token_budget and 1 + len(plan.chunks) <= LIMITS.max_batch_size
