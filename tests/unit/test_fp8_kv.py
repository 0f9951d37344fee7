"""A KV pool of 8 bits: what an engine with one computes, what it holds, and where it is refused. Kernels run interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from runtime import Engine
from runtime.errors import InputError, StepFailedError, UnsupportedModelError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import StepRecord
from runtime.torch_backend import backends, executor, kv_pool, loading, pool_size
from runtime.torch_backend import self_test as self_test_module
from runtime.torch_backend.attention import PackedModel
from runtime.torch_backend.backends import CPU, PLAIN
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.cuda.backend import PagedAttention
from runtime.torch_backend.cuda.language import INTERPRETED
from runtime.torch_backend.cuda.sampler import KernelSampler
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.fused_layer import FusedLayer
from runtime.torch_backend.kv_pool import KVPool, default_kv_blocks
from runtime.torch_backend.loading import LoadedModel, from_model, load_model
from runtime.torch_backend.self_test import self_test
from tests.unit import loading_models
from tests.unit.executor_harness import Oracle, TinyModel, prompts, reference, run, tiny
from tests.unit.recording import Recorder
from tests.unit.test_cuda_backend import FEW
from tests.unit.test_self_test import SHAPE, loaded_model

pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="the models lie on the CPU: kernels must be interpreted")
SLOW = pytest.mark.slow
HOST = torch.device("cpu")
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
"""Of a model that expands keys and values from one vector, and lets transformers cache that."""
KNOBS = Knobs(max_batch_size=3, token_budget=24, chunk_size=12)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU be what a GPU is: our kernels, interpreted."""
    for module in (backends, executor, pool_size):
        monkeypatch.setattr(module, "backend_for", lambda device: FEW)


def in_8_bits(model_type: str = "qwen3", **changes: Any) -> TinyModel:
    return replace(tiny(model_type, **changes), kv_cache_dtype="fp8")


def rounded(loaded: TinyModel, prompt: list[int], count: int) -> list[int]:
    """What ``generate`` puts out where every key and value goes through 8 bits."""
    with PackedModel(loaded.model).eager(fp8=True):
        return reference(loaded, prompt, count)


# -- what it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "fused"),
    [
        ("qwen3", {"num_hidden_layers": 1}, True),
        pytest.param("llama", {}, True, marks=SLOW),
        pytest.param("mistral", {"sliding_window": 9}, True, marks=SLOW),
        pytest.param("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0}, False, marks=SLOW),
    ],
)
def test_greedy_tokens_are_those_of_generate_over_rounded_keys_and_values(
    model_type: str, changes: dict[str, Any], fused: bool
) -> None:
    """In chunks, so that keys are read back; by fused layers, and by the hook of those that are not."""
    loaded = in_8_bits(model_type, **changes)
    work = list(zip(prompts([3, 19, 8], seed=5), [3, 2, 3], strict=True))
    expected = [rounded(loaded, p, n) for p, n in work]
    made = TorchExecutor(loaded, kv_blocks=12, block_size=8, backend=FEW)
    assert any(isinstance(m, FusedLayer) for m in loaded.model.modules()) is fused
    outputs, failures, _ = run(made, work, KNOBS)
    assert not failures and outputs == expected
    assert all(layer.keys.dtype == layer.values.dtype == torch.uint8 for layer in made.pool.layers.values())


def test_eight_bits_change_the_logits_by_little() -> None:
    texts = [torch.tensor([p]) for p in prompts([23], seed=1)]
    model = PackedModel(tiny().model)
    with torch.inference_mode():
        with model.eager():
            plain = model.model(input_ids=texts[0]).logits
        with model.eager(fp8=True):
            found = model.model(input_ids=texts[0]).logits
    change = float((found - plain).norm() / plain.norm())
    assert 1e-3 < change < 0.3


@pytest.mark.slow
def test_recorded_steps_read_the_same_pool() -> None:
    loaded = in_8_bits(num_hidden_layers=1)
    work = list(zip(prompts([3, 9], seed=5), [4, 3], strict=True))
    expected = [rounded(loaded, p, n) for p, n in work]
    recorder = Recorder()
    backend = FEW._replace(record=recorder.graphs, sampler=KernelSampler)
    made = TorchExecutor(loaded, kv_blocks=12, block_size=8, backend=backend, max_batch_size=2)
    outputs, failures, _ = run(made, work, KNOBS)
    assert not failures and outputs == expected and recorder.replayed


@pytest.mark.slow
def test_sequences_that_are_preempted_or_draft_have_the_same_tokens() -> None:
    loaded = in_8_bits(num_hidden_layers=1)
    work = list(zip(prompts([13, 17], seed=2), [14, 12], strict=True))
    expected = [rounded(loaded, p, n) for p, n in work]
    heard: list[StepRecord] = []
    drafter = Oracle({str(i): tokens for i, tokens in enumerate(expected)})
    made = TorchExecutor(loaded, kv_blocks=5, block_size=8, backend=FEW)
    knobs = KNOBS.with_(draft_tokens=3)
    outputs, failures, preemptions = run(made, work, knobs, drafter=drafter, heard=heard)
    assert not failures and outputs == expected
    assert preemptions and sum(step.accepted for step in heard) > 3


@pytest.mark.slow
def test_an_engine_with_one(kernels: None) -> None:
    """From loading to tokens, which are the same whether a prefix is read from blocks of another request or computed anew."""
    model = loading_models.tiny("qwen3", num_hidden_layers=1)
    loaded = from_model(model, kv_cache_dtype="fp8")
    assert loaded.kv_bytes_per_token * 4 == from_model(model).kv_bytes_per_token
    begin, *ends = prompts([40, 5, 7], seed=3)
    found = []
    for prefix_cache in (True, False):
        with Engine(loaded, kv_tokens=320, block_size=8, prefix_cache=prefix_cache) as engine:
            facts = engine.facts
            assert facts.model is not None and facts.model.kv_cache_dtype == "fp8"
            made = engine.executor
            assert isinstance(made, TorchExecutor) and made.pool.fp8
            assert made.pool.bytes == (40 + 1) * 8 * loaded.kv_bytes_per_token
            found.append([engine.generate([begin + end], max_tokens=4)[0] for end in ends])
    assert [c.token_ids for c in found[0]] == [c.token_ids for c in found[1]]
    assert [c.record.cached_tokens for c in found[0]] == [0, 40]


# -- what it holds --------------------------------------------------------------------------------------------------------


def test_a_pool_of_the_same_memory_holds_twice_the_tokens(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    model = loading_models.tiny().bfloat16()
    half, eight = from_model(model), from_model(model, kv_cache_dtype="fp8")
    assert eight.kv_bytes_per_token * 2 == half.kv_bytes_per_token and eight.info.kv_cache_dtype == "fp8"
    available = half.kv_bytes_per_token * 16 * 1000 / 0.3 + 1
    monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert (default_kv_blocks(half, 16), default_kv_blocks(eight, 16)) == (1000, 2000)
    blocks = [pool_size.pool_blocks(each, KnobLimits(), 16) for each in (half, eight)]
    assert blocks == [1000, 2000]


def test_what_is_not_finite_is_found_and_scrubbed() -> None:
    pool = KVPool(4, 4, fp8=True)
    layer = pool.layer(torch.nn.Identity(), KVLayer((2, 8), (2, 6), torch.float32), HOST)
    key, value = torch.full((3, 2, 8), 500.0), torch.full((3, 2, 6), -0.3)
    layer.write(torch.tensor([4, 5, 6]), key, value)
    assert layer.keys[5, 0, 0] == 0x7E, "448, the largest"
    assert layer.finite(torch.arange(16)) and layer.keys.count_nonzero() == 3 * 16
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for spoiled in (key, value):
            before = spoiled[1, 1, 3].clone()
            spoiled[1, 1, 3] = wrong
            layer.write(torch.tensor([4, 5, 6]), key, value)
            assert not layer.finite(torch.tensor([5])) and layer.finite(torch.tensor([4, 6]))
            spoiled[1, 1, 3] = before
    pool.scrub([1])
    assert layer.finite(torch.arange(16)) and not layer.keys.any() and not layer.values.any()


@pytest.mark.slow
def test_a_prompt_that_writes_nan_fails_alone() -> None:
    """In a chunk that samples nothing, so that only what is in the pool tells."""
    loaded = in_8_bits(num_hidden_layers=1)
    work = list(zip(prompts([40, 9], seed=5), [2, 2], strict=True))
    expected = rounded(loaded, *work[1])
    bad = next(t for t in work[0][0][:10] if t not in work[1][0])
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[bad] = torch.nan
    made = TorchExecutor(loaded, kv_blocks=12, block_size=8, backend=FEW)
    outputs, failures, _ = run(made, work, KNOBS)
    assert set(failures) == {"0"} and isinstance(failures["0"], StepFailedError)
    assert "keys or values between prompt tokens 0 and 11" in str(failures["0"])
    assert outputs[1] == expected


# -- the self-test --------------------------------------------------------------------------------------------------------


def tried(kind: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> LoadedModel:
    return replace(loaded_model(kind, dtype, **fields), kv_cache_dtype="fp8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "head_dim": 8}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v3", {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                         "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}),
    ],
)  # fmt: skip
def test_models_pass_it(kind: str, fields: dict[str, Any], dtype: torch.dtype, kernels: None) -> None:
    self_test(tried(kind, dtype, **fields))


def _scale_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are written by a scale of 1, and read by another."""
    whole = PagedAttention.run

    def run(self: Any, state: Any, layer: Any, *others: Any) -> Tensor:
        layer.key_scale = torch.full_like(layer.key_scale, 2.0)
        try:
            return whole(self, state, layer, *others)
        finally:
            layer.key_scale = torch.ones_like(layer.key_scale)

    monkeypatch.setattr(PagedAttention, "run", run)


def _pool_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "KVPool", lambda *given, fp8, **named: KVPool(*given, **named))


def _written_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bits of mantissa instead of three."""
    whole = kv_pool.fp8_bytes
    monkeypatch.setattr(kv_pool, "fp8_bytes", lambda x, scale: whole(x, scale) & 0xFE)


@pytest.mark.parametrize("fault", [_scale_lost, _pool_of_32_bits, _written_cut_off])
def test_it_sees_a_pool_that_holds_something_else(
    fault: Callable[[pytest.MonkeyPatch], None], kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that attends by the hook; where nothing is wrong it passes."""
    fields = {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "head_dim": 8, "num_hidden_layers": 1}
    if fault is _scale_lost:
        self_test(tried("gemma2", **fields))
    fault(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="packed logits differ from the model's own"):
        self_test(tried("gemma2", **fields))


def test_what_8_bits_may_excuse_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose logits they turn into others is not judged by these: it must be near its own all the same."""
    model, texts = tried(), [list(range(12))]
    monkeypatch.setattr(self_test_module, "relative_error", lambda found, expected: 9.0 if len(found) == 100 else 0.0)
    _, slack = self_test_module._plain(model, [*texts])
    assert slack == 4 * 9.0 + 0.25 * 0.25
    _, slack = self_test_module._plain(replace(model, kv_cache_dtype="auto"), [*texts])
    assert slack == 4 * 9.0


# -- where it is refused --------------------------------------------------------------------------------------------------

ON_CPU = "kv_cache_dtype is 'fp8'; on cpu it must be auto: only the Triton kernels, on CUDA, read a KV pool of 8 bits"


def test_a_cpu_refuses_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "build_preset", lambda *_, **__: pytest.fail("it was built"))
    for name in ("nano", str(tmp_path / "nowhere")):
        with pytest.raises(InputError) as told:
            load_model(name, device="cpu", kv_cache_dtype="fp8")
        assert str(told.value) == ON_CPU
    with pytest.raises(InputError) as told:
        Engine("nano", device="cpu", kv_cache_dtype="fp8")
    assert str(told.value) == ON_CPU
    with pytest.raises(InputError) as told:
        load_model("nano", device="cpu", kv_cache_dtype="int8")
    assert str(told.value) == "kv_cache_dtype is 'int8'; it must be auto or fp8"


def test_a_model_in_memory() -> None:
    model = loading_models.tiny()
    with pytest.raises(InputError, match=r"^kv_cache_dtype is 'fp8'; on cpu it must be auto"):
        from_model(model, kv_cache_dtype="fp8")
    loaded = from_model(model)
    assert loaded.kv_cache_dtype == loaded.info.kv_cache_dtype == "auto"
    with pytest.raises(ValueError, match=r"^kv_cache_dtype is 'fp8'; it must be 'auto', as the model was loaded$"):
        Engine(loaded, kv_cache_dtype="fp8")


@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "plain"])
def test_attention_in_plain_pytorch_reads_no_bytes(backend: backends.Backend) -> None:
    """As on a GPU without Triton."""
    with pytest.raises(InputError, match=r"^kv_cache_dtype is 'fp8'; on cpu it must be auto"):
        TorchExecutor(in_8_bits(), kv_blocks=4, backend=backend)


def test_heads_that_the_kernel_does_not_take(kernels: None) -> None:
    fields = {**SHAPE, "head_dim": 272, "hidden_size": 16, "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModelError) as told:
        self_test(tried(**fields))
    assert str(told.value) == (
        "model with 4 heads of 272 on 2 KV heads: kv_cache_dtype is 'fp8'; it must be auto: the kernel takes heads of at most "
        "256, and 128 on a KV head"
    )
