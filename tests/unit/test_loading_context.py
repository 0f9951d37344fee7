"""How much context a loaded model gets: as asked, and no more than its RoPE allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from runtime.errors import InputError, UnsupportedModelError
from runtime.torch_backend import loading
from runtime.torch_backend.loading import from_model, load_model
from runtime.torch_backend.rope import safe_context
from runtime.torch_backend.self_test import self_test
from tests.unit.loading_models import refusal, tiny


def test_more_context_than_the_model_has(saved_model: Path) -> None:
    message = refusal(saved_model, InputError, max_model_len=257)
    assert "max_model_len is 257; it must be at most 256" in message


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "9"])
def test_a_length_that_is_none(saved_model: Path, length: Any) -> None:
    assert f"max_model_len is {length!r}; it must be a whole number" in refusal(
        saved_model, InputError, max_model_len=length
    )


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def roped(rope: dict[str, Any]) -> PreTrainedModel:
    """A model of 256 tokens' context with this RoPE."""
    if rope is DYNAMIC:
        return tiny("llama", rope_parameters=rope)
    return tiny("phi3", pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=64)


@pytest.mark.parametrize(("rope", "safe"), [(LONGROPE, 64), (DYNAMIC, 256)])
def test_rope_that_depends_on_the_batch_is_capped(tmp_path: Path, rope: dict[str, Any], safe: int) -> None:
    roped(rope).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert loaded.max_model_len == safe
    self_test(loaded)
    assert load_model(str(tmp_path), dtype="float32", device="cpu", max_model_len=safe).max_model_len == safe
    message = refusal(tmp_path, UnsupportedModelError, max_model_len=safe + 1)
    assert f"max_model_len is {safe + 1}" in message and rope["rope_type"] in message
    assert f"at most {safe}" in message


def test_the_cap_is_where_logits_begin_to_depend_on_the_longest_position() -> None:
    """What the refusal is for: beyond the cap the same short text has other logits."""
    model = roped(LONGROPE).eval()
    ids, positions = torch.arange(10)[None], torch.arange(10)[None]

    def beside(longest: int) -> torch.Tensor:
        logits: torch.Tensor = model(
            torch.cat([ids, ids[:, :1]], 1), position_ids=torch.cat([positions, torch.tensor([[longest]])], 1)
        ).logits[0, :10]
        return logits

    with torch.inference_mode():
        alone = model(ids).logits[0]
        torch.testing.assert_close(beside(63), alone)
        assert not torch.allclose(beside(64), alone, atol=1e-3)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_moving_frequencies_are_found_even_if_the_config_hides_them(
    rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = roped(rope)
    monkeypatch.setattr(loading, "_context_length", lambda config, name, requested: 1024)
    with pytest.raises(UnsupportedModelError, match="its rotary embedding changed at position 1023"):
        from_model(model)


class _Config:
    model_type = "made-up"

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_safe_context_of_every_layer_kind_and_spelling() -> None:
    fixed = {"rope_type": "yarn", "factor": 4.0}
    assert safe_context(_Config()) == (None, "")
    assert safe_context(_Config(rope_parameters=fixed)) == (None, "")
    assert safe_context(_Config(rope_scaling={"type": "linear"}, rope_parameters=None)) == (None, "")
    nested = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert safe_context(_Config(rope_parameters=nested)) == (64, "longrope")
    both = {"full_attention": LONGROPE, "sliding_attention": DYNAMIC}
    assert safe_context(_Config(rope_parameters=both, max_position_embeddings=32)) == (32, "dynamic")
    assert safe_context(_Config(rope_scaling={"type": "dynamic"}, max_position_embeddings=99)) == (99, "dynamic")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "names no length"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "names no length"),
        ({"rope_parameters": {"rope_type": "brandnew"}}, "'brandnew' is not known"),
    ],
)
def test_no_safe_range_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        safe_context(_Config(**fields))


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("stated", "context"), [(64, 256), (256, 256), (1024, 1024)])
def test_yarn_stretches_a_context_that_the_config_leaves_as_it_was(tmp_path: Path, stated: int, context: int) -> None:
    tiny("llama", rope_parameters=YARN, max_position_embeddings=stated).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert loaded.max_model_len == context
    self_test(loaded)
    assert f"it must be at most {context}" in refusal(tmp_path, InputError, max_model_len=context + 1)


def test_what_a_generation_config_asks_for_and_nobody_applies_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    from_model(model)
    assert "generation_config" not in caplog.text
    model.generation_config.repetition_penalty = 1.05
    model.generation_config.suppress_tokens = [3, 4]
    from_model(model)
    assert (
        "its generation_config says repetition_penalty=1.05, which a server applies where a request does not say"
        in caplog.text
    )
    assert "suppress_tokens=[3, 4], which this engine does not apply" in caplog.text


def test_what_a_generation_config_says_of_sampling_is_for_servers(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    assert from_model(model).sampling_defaults == {}
    model.generation_config.temperature, model.generation_config.top_p = 0.6, 0.95
    model.generation_config.top_k = -1
    assert from_model(model).sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    model.generation_config.top_p, model.generation_config.repetition_penalty = 1.5, "1.1"
    caplog.clear()
    assert from_model(model).sampling_defaults == {"temperature": 0.6, "top_k": 0}
    assert "its generation_config is wrong, and the field is left out: top_p is 1.5" in caplog.text
    assert "repetition_penalty='1.1', which this engine does not apply" in caplog.text
