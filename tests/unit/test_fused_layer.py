"""Fused decoder layers: which models get them, that they compute the same, and that the model stays usable by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from runtime.knobs import Knobs
from runtime.torch_backend import fused_layer
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.fused_layer import FusedLayer, fuse_layers, prunes
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.norm import fuse_norms
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.straight import straight
from tests.unit.executor_harness import SHAPE, prompts, reference, run, tiny

KNOBS = Knobs(max_batch_size=4, token_budget=32, chunk_size=16)
SCALED: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 30, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "fused"),
    [
        ("llama", {}, 2),
        ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("qwen2", {}, 2),
        ("qwen3", {}, 2),
        ("mistral", {"sliding_window": 20}, 2),
        ("granite", {"residual_multiplier": 0.5}, 0),  # a scaled residual
        ("gemma2", {"query_pre_attn_scalar": 8}, 0),  # more norms
        ("cohere", {}, 0),  # parallel attention and MLP, interleaved rotary pairs
        ("llama", {"hidden_act": "gelu"}, 0),
        ("gpt2", {}, 0),
        ("ministral3", {"rope_parameters": SCALED}, 0),  # queries that grow with their position
    ],
)
def test_layers_are_fused_where_they_compute_the_same(model_type: str, changes: dict[str, Any], fused: int) -> None:
    loaded = tiny(model_type, **changes)
    work = [(p, 12) for p in prompts([3, 40, 17, 25, 31], seed=1)]
    expected = [reference(loaded, p, n) for p, n in work]
    fuse_norms(loaded.model)
    assert fuse_layers(loaded.model, Operations()) == fused
    assert fuse_layers(loaded.model, Operations()) == 0
    assert prunes(loaded.model) == (fused > 0)
    executor = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    assert run(executor, work, KNOBS)[0] == expected
    assert [reference(loaded, p, n) for p, n in work] == expected  # the model's own code, over the merged weights


def test_bfloat16_layers_differ_by_rounding_only() -> None:
    plain, changed = (tiny("qwen3", dtype=torch.bfloat16) for _ in range(2))
    fuse_norms(changed.model)
    assert fuse_layers(changed.model, Operations()) == 2
    ids = torch.tensor(prompts([50], seed=2))
    with torch.inference_mode():
        expected = plain.model(input_ids=ids, use_cache=False).logits.float()
        found = changed.model(input_ids=ids, use_cache=False).logits.float()
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_add_little_to_their_input_are_fused(dtype: torch.dtype) -> None:
    """As those of a preset do: there the rounding of a sum is large beside what is added."""
    model = load_model("nano", dtype=dtype, device="cpu").model
    fuse_norms(model)
    assert fuse_layers(model, Operations()) == 4
    assert straight(model) is not None


def test_weights_are_held_once() -> None:
    loaded = tiny("qwen3")
    before = sum(p.numel() for p in loaded.model.parameters())
    layer = loaded.model.model.layers[0]
    weights = [layer.self_attn.k_proj.weight.clone(), layer.mlp.up_proj.weight.clone()]
    fuse_norms(loaded.model)
    fuse_layers(loaded.model, Operations())
    assert sum(p.numel() for p in loaded.model.parameters()) == before
    fused = loaded.model.model.layers[0]
    assert isinstance(fused, FusedLayer)
    assert torch.equal(fused.inner.self_attn.k_proj.weight, weights[0])  # type: ignore[union-attr]
    assert torch.equal(fused.inner.mlp.up_proj.weight, weights[1])  # type: ignore[union-attr]
    assert fused.self_attn is fused.inner.self_attn


def test_a_layer_that_someone_listens_to_or_shares_weights_is_left_alone() -> None:
    hooked, shared = tiny("llama"), tiny("llama")
    hooked.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    assert fuse_layers(hooked.model, Operations()) == 1
    layers = shared.model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    assert fuse_layers(shared.model, Operations()) == 0
    assert not any(isinstance(m, FusedLayer) for m in shared.model.modules())


def test_layers_that_memory_has_no_room_for_keep_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama", num_hidden_layers=3)
    work = [(p, 6) for p in prompts([3, 20, 9], seed=4)]
    expected = [reference(loaded, p, n) for p, n in work]
    merged, made = fused_layer._merged, []

    def runs_out(*linears: nn.Linear) -> nn.Linear:
        made.append(linears)
        if len(made) == 4:  # the second product of the second layer
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96 MiB")
        return merged(*linears)

    monkeypatch.setattr(fused_layer, "_merged", runs_out)
    executor = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    assert [isinstance(layer, FusedLayer) for layer in loaded.model.model.layers] == [True, False, False]
    assert run(executor, work, KNOBS)[0] == expected


def test_a_probe_leaves_no_trace_in_a_layer_that_differs() -> None:
    loaded = tiny("granite", residual_multiplier=0.5)
    names = [name for name, _ in loaded.model.named_parameters()]
    implementation = loaded.model.config._attn_implementation
    assert fuse_layers(loaded.model, Operations()) == 0
    assert [name for name, _ in loaded.model.named_parameters()] == names
    assert loaded.model.config._attn_implementation == implementation
    assert all(isinstance(m, nn.Module) for m in loaded.model.model.layers)


def test_the_last_layer_computes_only_the_rows_that_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")
    executor = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    rows: list[tuple[int, int]] = []
    last = loaded.model.model.layers[-1]
    compute = FusedLayer.compute

    def counted(self: FusedLayer, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        added, total = compute(self, x, *args)
        assert added.shape == total.shape
        if self is last:
            rows.append((len(x), len(added)))
        return added, total

    monkeypatch.setattr(FusedLayer, "compute", counted)
    work = [(p, 5) for p in prompts([30, 12], seed=3)]
    outputs = run(executor, work, KNOBS)[0]
    assert any(given > kept for given, kept in rows)
    assert all(given >= kept for given, kept in rows)
    assert min(kept for _, kept in rows) == 1
    assert outputs == [reference(loaded, p, n) for p, n in work]


def test_a_window_that_is_in_the_models_mask_alone_holds_here_too() -> None:
    loaded = tiny("phimoe", sliding_window=20, num_local_experts=4, num_experts_per_tok=2)
    work = [(p, 12) for p in prompts([3, 40, 31], seed=1)]
    expected = [reference(loaded, p, n) for p, n in work]
    wide = [reference(tiny("phimoe", num_local_experts=4, num_experts_per_tok=2), p, n) for p, n in work]
    assert expected != wide, "the window must matter"
    executor = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    assert run(executor, work, KNOBS)[0] == expected


def test_a_window_that_no_model_code_reads_is_none() -> None:
    """A config holds whatever its file says."""
    loaded = tiny("llama", sliding_window=20)
    assert loaded.model.config.sliding_window == 20
    work = [(p, 12) for p in prompts([3, 40, 31], seed=1)]
    expected = [reference(tiny("llama"), p, n) for p, n in work]
    executor = TorchExecutor(loaded, kv_blocks=60, block_size=8)
    assert run(executor, work, KNOBS)[0] == expected


@pytest.mark.parametrize(("context", "fused"), [(20, 2), (None, 0), (100, 0)])
def test_layers_are_the_same_as_far_as_is_served(context: int | None, fused: int) -> None:
    stretched = SCALED | {"original_max_position_embeddings": 64}
    loaded = tiny("ministral3", rope_parameters=stretched, max_position_embeddings=64 if context == 100 else 128)
    fuse_norms(loaded.model)
    assert fuse_layers(loaded.model, Operations(), context) == fused


def test_layers_of_a_text_model_in_a_larger_one_are_fused() -> None:
    """A composite config names its layers in the text's own."""
    config = LlavaConfig(
        text_config=AutoConfig.for_model("llama", **{**SHAPE, "num_hidden_layers": 2}),
        vision_config=CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ),
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    fuse_norms(model)
    assert fuse_layers(model, Operations()) == 2


@pytest.mark.parametrize("width", [64, 2048])
def test_norms_by_one_plus_a_weight_are_as_exact_as_the_models_own(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, width, generator=generator), torch.randn(width, generator=generator) * 0.3
    half = x.bfloat16()
    own = Gemma2RMSNorm(width, eps=1e-6).bfloat16()
    with torch.no_grad():
        own.weight.copy_(weight)
    holder = nn.ModuleDict({"norm": own})
    assert fuse_norms(holder) == 1
    wide = half.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + own.weight.double())
    with torch.inference_mode():
        errors = [float((norm(half).double() - exact).norm() / exact.norm()) for norm in (own, holder["norm"])]
        found = Operations().norm(half, holder["norm"].scale, 1e-6)
    assert errors[1] <= errors[0] * 1.01 and torch.equal(found, holder["norm"](half)) and found.dtype == torch.bfloat16
