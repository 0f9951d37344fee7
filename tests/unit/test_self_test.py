"""The load-time self-test notices each way in which packing can go wrong. (Which models pass: test_architectures.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.errors import ModelError, UnsupportedModelError
from runtime.torch_backend import attention, fused_layer
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import LoadedModel, from_model
from runtime.torch_backend.self_test import self_test
from tests.unit.loading_models import FIELDS

SHAPE: dict[str, Any] = {**FIELDS, "vocab_size": 100, "initializer_range": 0.2}


def loaded_model(kind: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> LoadedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SHAPE, **fields})
        return from_model(AutoModelForCausalLM.from_config(config, dtype=dtype))


def refusal(loaded: LoadedModel, kind: type[Exception] = UnsupportedModelError) -> str:
    with pytest.raises(kind) as raised:
        self_test(loaded)
    return str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_model_passes(dtype: torch.dtype) -> None:
    self_test(loaded_model(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_has_the_softcap_that_sdpa_does_not_take(dtype: torch.dtype) -> None:
    """transformers 5.17 gives Gemma 2 SDPA, which drops the softcap; 5.23 raises there."""
    loaded = loaded_model("gemma2", dtype, attn_logit_softcapping=1.0, query_pre_attn_scalar=8, head_dim=8)
    loaded.model.config._attn_implementation = "sdpa"
    self_test(loaded)
    assert loaded.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_lone_decode_whose_keys_lie_head_by_head(dtype: torch.dtype) -> None:
    self_test(loaded_model("gpt_oss", dtype, num_local_experts=4, num_experts_per_tok=2))


def test_passing_twice_and_after_another_executor() -> None:
    loaded = loaded_model()
    TorchExecutor(loaded, kv_blocks=4)
    self_test(loaded)
    self_test(loaded)


def _break_terms(monkeypatch: pytest.MonkeyPatch, field: str, value: Any) -> None:
    """Let our attention forget one of the terms a layer asks for, in fused layers and in the hook."""
    whole, names = attention.terms_of, ("scaling", "sliding_window", "softcap", "s_aux")

    def forgetful(dim: int, *given: Any) -> attention.Terms:
        return whole(dim, **{**dict(zip(names, given, strict=True)), field: value})

    for module in (attention, fused_layer):
        monkeypatch.setattr(module, "terms_of", forgetful)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fields", "field", "value"),
    [
        ("llama", {}, "scaling", 1.0),
        ("mistral", {"sliding_window": 8}, "sliding_window", None),
        ("gemma2", {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8, "head_dim": 8}, "softcap", None),
    ],
)
def test_attention_that_forgets_a_term(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, fields: dict[str, Any], field: str, value: Any
) -> None:
    self_test(loaded_model(kind, dtype, **fields))
    _break_terms(monkeypatch, field, value)
    assert refusal(loaded_model(kind, dtype, **fields)).startswith(
        f"model {kind}: packed logits differ from the model's own ("
    )


def test_decode_rows_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.torch_backend.inputs import DecodeRows

    right = DecodeRows.positions.fget
    assert right is not None
    monkeypatch.setattr(DecodeRows, "positions", property(lambda self: right(self) + 1))
    message = refusal(loaded_model())
    assert "decode" in message or "fails in a packed batch" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_rows_written_to_the_wrong_slots(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """On a CPU this shows only where a row is read back from the pool."""
    from runtime.torch_backend.inputs import DecodeRows

    def lost(self: DecodeRows, positions: Any) -> Any:
        return 0 * positions + self.pad_block * self.block_size

    monkeypatch.setattr(DecodeRows, "slots", lost)
    assert "packed logits differ from the model's own (decode" in refusal(loaded_model(dtype=dtype))


def test_too_few_hooked_layers() -> None:
    loaded = loaded_model()
    loaded.model.config.num_hidden_layers = 3  # as if a layer had its own attention
    more = from_model(loaded.model)
    assert "its attention cannot be hooked (2 of 3 layers called ours)" in refusal(more)


def test_a_model_whose_own_forward_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_model()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such mode\nmore")

    monkeypatch.setattr(loaded.model, "forward", broken)
    assert (
        refusal(loaded) == "model llama: its own forward fails: no such mode; supported: see docs/reference/models.md"
    )


def test_logits_that_are_not_finite_are_not_taken_for_equal() -> None:
    loaded = loaded_model()
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[:] = float("nan")
    assert "packed logits differ" in refusal(loaded)


def test_out_of_memory_is_no_verdict_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_model()

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(TorchExecutor, "logits", full)
    with pytest.raises(ModelError) as raised:
        self_test(loaded)
    assert not isinstance(raised.value, UnsupportedModelError)
    assert "out of memory in its self-test" in str(raised.value)


def test_a_context_too_short_to_test() -> None:
    loaded = from_model(loaded_model().model, max_model_len=25)
    assert "a context of 25 tokens is too short" in refusal(loaded)
    self_test(from_model(loaded.model, max_model_len=26))
