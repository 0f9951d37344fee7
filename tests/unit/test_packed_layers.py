"""Linear layers and norms in faster forms: the same results, and only where that is certain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.knobs import Knobs
from runtime.torch_backend.backends import PLAIN
from runtime.torch_backend.cpu import linear
from runtime.torch_backend.cpu.linear import PackedLinear, pack_linears, padded_rows
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.norm import FusedRMSNorm, fuse_norms
from tests.unit.executor_harness import TinyModel, prompts, run, tiny

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
pytestmark = needs_onednn
PACKS_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
needs_bfloat16 = pytest.mark.skipif(
    not PACKS_BFLOAT16, reason="oneDNN packs bfloat16 with AVX-512 or AVX-NE-CONVERT only"
)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every layer, however small: on a busy machine a measurement may say anything."""
    monkeypatch.setattr(linear, "_pays", lambda *_: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)], ids=str)
def test_packed_linear_computes_the_same(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=dtype)
    packed = PackedLinear(plain)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    with torch.inference_mode():
        for shape in [(1, 48), (7, 48), (1, 33, 48), (2, 3, 48), (1, 0, 48)]:
            x = torch.randn(shape, dtype=dtype)
            torch.testing.assert_close(packed(x), plain(x), **tolerance)
        x = torch.randn(5, 96, dtype=dtype)[:, ::2]
        torch.testing.assert_close(packed(x), plain(x), **tolerance)
        assert torch.equal(packed.weight, plain.weight)  # asked for, it comes back
        assert torch.equal(packed(x), plain(x))  # and the layer is a plain one


def test_a_packed_model_computes_the_same(always: None) -> None:
    loaded = tiny()
    ids = torch.tensor(prompts([40]))
    with torch.inference_mode():
        expected = loaded.model(ids).logits
        layers = sum(type(m) is nn.Linear for m in loaded.model.modules())
        assert pack_linears(loaded.model) == layers == 15
        assert pack_linears(loaded.model) == 15  # which stay
        torch.testing.assert_close(loaded.model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_bfloat16_model_is_packed_only_where_the_processor_can(always: None) -> None:
    model = tiny(dtype=torch.bfloat16).model
    assert pack_linears(model) == (15 if PACKS_BFLOAT16 else 0)
    with torch.inference_mode():
        assert model(torch.tensor(prompts([8]))).logits.isfinite().all()


def test_packing_does_not_keep_the_plain_weights(always: None) -> None:
    model = tiny().model
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = [p for p in model.parameters() if p is weight]
    pack_linears(model)
    assert kept
    assert not [p for p in model.parameters() if p is weight]


def test_tied_weights_are_copied_only_where_memory_allows(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(tie_word_embeddings=True).model
    ids = torch.tensor(prompts([9]))
    with torch.inference_mode():
        expected = model(ids).logits
        monkeypatch.setattr(linear, "COPY_SHARE", 0.0)
        assert pack_linears(model) == 14
        assert type(model.lm_head) is nn.Linear
        monkeypatch.setattr(linear, "COPY_SHARE", 0.1)
        assert pack_linears(model) == 15
        assert isinstance(model.lm_head, PackedLinear)
        assert model.get_input_embeddings().weight.shape == (128, 32)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_more_than_a_linear_are_left_alone(always: None) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    half = nn.Linear(4, 4, dtype=torch.float16)
    assert pack_linears(nn.Sequential(Scaled(4, 4), hooked, half)) == 0


def test_a_layout_that_is_not_faster_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 0.96, 1.0, 0.9])
    monkeypatch.setattr(linear, "_fastest", lambda call: next(times))
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    assert pack_linears(model) == 1
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], PackedLinear)


def test_few_numbers_of_rows_are_multiplied() -> None:
    sizes = {padded_rows(rows) for rows in range(8193)}
    assert len(sizes) == 33 + 8 * 16  # 0 to 32, and sixteen to each power of two
    assert all(rows <= padded_rows(rows) <= 1.0625 * rows for rows in range(8193))
    assert [padded_rows(rows) for rows in (1, 31, 32, 33, 64, 65, 1000, 8191)] == [1, 31, 32, 34, 64, 68, 1024, 8192]


def with_loud_dummies(head_dim: int) -> TinyModel:
    """A model in which token 0, which dummies are, has keys and values that are not zero."""
    loaded = tiny(head_dim=head_dim)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[0] = 1.0
    return loaded


@pytest.mark.parametrize("head_dim", [32, 24])  # the kernel of attention takes the one, PyTorch the other
def test_steps_run_with_dummies_and_yield_the_same(
    head_dim: int, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [(prompt, 24 + at % 9) for at, prompt in enumerate(prompts([1 + 7 * at % 61 for at in range(50)]))]
    knobs = Knobs(max_batch_size=44, token_budget=157, chunk_size=80)
    generic = TorchExecutor(with_loud_dummies(head_dim), kv_blocks=600, block_size=8, backend=PLAIN)
    expected = run(generic, work, knobs)[0]
    executor = TorchExecutor(with_loud_dummies(head_dim), kv_blocks=600, block_size=8)
    multiplied: set[int] = set()
    forward = PackedLinear.forward

    def seen(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        multiplied.add(len(x))
        return forward(self, x)

    monkeypatch.setattr(PackedLinear, "forward", seen)
    assert run(executor, work, knobs)[:2] == (expected, {})
    assert {44, 160} <= multiplied == {padded_rows(rows) for rows in multiplied}
    zero = executor.pool.pad_block * 8
    assert all(not layer.keys[zero : zero + 8].any() for layer in executor.pool.layers.values())
    assert all(layer.keys[zero + 8 : zero + 16].any() for layer in executor.pool.layers.values()), "where dummies write"


@pytest.mark.parametrize("part", ["whole", "head"])
def test_a_model_with_hooks_gets_no_dummies(part: str, always: None) -> None:
    loaded = tiny()
    executor = TorchExecutor(loaded, kv_blocks=100, block_size=8)
    seen: list[int] = []
    if part == "whole":
        loaded.model.register_forward_pre_hook(
            lambda model, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
    else:
        loaded.model.lm_head.register_forward_pre_hook(lambda head, args: seen.append(len(args[0])))
    knobs = Knobs(max_batch_size=33, token_budget=64, chunk_size=64)
    if part == "whole":
        run(executor, [(prompt, 1) for prompt in prompts([33])], knobs)
    else:
        run(executor, [(prompt, 1) for prompt in prompts([1] * 33)], knobs)
    assert seen == [33]


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma2", "olmo2"])
def test_norms_are_fused_with_the_same_result(model_type: str) -> None:
    changes = {"query_pre_attn_scalar": 8} if model_type == "gemma2" else {}
    model = tiny(model_type, **changes).model
    torch.manual_seed(1)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        ids = torch.tensor(prompts([40]))
        expected = model(ids).logits
        norms = sum("RMSNorm" in type(m).__name__ for m in model.modules())
        assert fuse_norms(model) == norms > 0
        assert fuse_norms(model) == 0
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_norms_that_compute_something_else_are_left_alone() -> None:
    class BaseRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (8,), self.weight, self.eps)

    class ScaledRMSNorm(BaseRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.01 * super().forward(x)

    class OtherEpsRMSNorm(BaseRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (8,), self.weight, 1e-3)

    class GatedRMSNorm(BaseRMSNorm):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * gate

    model = nn.Sequential(BaseRMSNorm(), ScaledRMSNorm(), OtherEpsRMSNorm(), GatedRMSNorm())
    assert fuse_norms(model) == 1
    assert [isinstance(m, FusedRMSNorm) for m in model] == [True, False, False, False]
