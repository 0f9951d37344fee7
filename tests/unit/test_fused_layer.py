"""Fused decoder layers: which models get them, that they compute the same, and that the model stays usable by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runtime.knobs import Knobs
from runtime.torch_backend import fused_layer
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.fused_layer import FusedLayer, fuse_layers, prunes
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.norm import fuse_norms
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.straight import straight
from tests.unit.executor_harness import prompts, reference, run, tiny

KNOBS = Knobs(max_batch_size=4, token_budget=32, chunk_size=16)


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
