"""Presets: the shapes they claim, made quickly and the same each time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.torch_backend.loading import load_model
from runtime.torch_backend.presets import PRESETS, Preset, build_preset
from runtime.torch_backend.self_test import self_test

SMALL = Preset(
    "small",
    "qwen3",
    0,
    "the presets' path, made small",
    {**PRESETS["tiny"].fields, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_as_many_as_claimed(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(preset.model_type, **preset.fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.parameters


def test_shapes_are_the_published_ones() -> None:
    """From the models' cards: parameters, layers, query and KV heads, context."""
    published = {
        "qwen3-0.6b": (0.6e9, 28, 16, 8, 40960),
        "llama-3.1-8b": (8.03e9, 32, 32, 8, 131072),
        "qwen3-8b": (8.2e9, 36, 32, 8, 40960),
    }
    for name, (parameters, layers, heads, kv_heads, context) in published.items():
        fields = PRESETS[name].fields
        assert PRESETS[name].parameters == pytest.approx(parameters, rel=0.01)
        assert fields["num_hidden_layers"] == layers
        assert (fields["num_attention_heads"], fields["num_key_value_heads"]) == (heads, kv_heads)
        assert fields["max_position_embeddings"] == context


def test_tiny_loads_runs_and_passes_the_self_test() -> None:
    loaded = load_model("tiny", device="cpu")
    assert loaded.parameters == PRESETS["tiny"].parameters == pytest.approx(57e6, rel=0.01)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.layers) == (32000, 8192, 8)
    assert loaded.kv_bytes_per_token == 2 * 8 * 2 * 64 * loaded.dtype.itemsize
    assert loaded.architecture == "qwen3"
    assert loaded.eos_token_ids == (257, 260)
    assert loaded.tokenizer is not None and loaded.tokenizer.decode([104, 105]) == "hi"
    assert not loaded.model.training
    self_test(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_in_the_dtype_and_of_the_scale_asked_for(dtype: torch.dtype) -> None:
    model = build_preset(SMALL, device=CPU, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype, name
        if parameter.dim() > 1:
            assert float(parameter.detach().float().std()) == pytest.approx(0.02, rel=0.1), name
            assert abs(float(parameter.detach().float().mean())) < 0.005, name
        else:
            assert bool((parameter == 1).all()), name
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_frequencies_are_those_of_a_model_built_the_ordinary_way() -> None:
    fields = {**PRESETS["llama-3.1-8b"].fields, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 16}
    fields |= {"vocab_size": 300, "num_attention_heads": 2, "num_key_value_heads": 1}
    ours = build_preset(Preset("x", "llama", 0, "", fields), device=CPU, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)


def test_the_seed_decides_and_torchs_own_state_is_left_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat(
            [p.flatten() for p in build_preset(SMALL, device=CPU, dtype=torch.float32, seed=seed).parameters()]
        )

    before = torch.random.get_rng_state()
    first = weights(1)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_tied_embeddings_are_one_tensor() -> None:
    tied = Preset("tied", "qwen3", 0, "", {**SMALL.fields, "tie_word_embeddings": True})
    model = build_preset(tied, device=CPU, dtype=torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_page_of_models_lists_the_presets() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    rows = {m[1]: m[2].replace(",", "") for m in re.finditer(r"^\| `([^`]+)` \|.*\| ([\d,]+) \|$", text, re.MULTILINE)}
    assert rows == {name: str(preset.fields["max_position_embeddings"]) for name, preset in PRESETS.items()}
    for name, preset in PRESETS.items():
        kib = (
            4
            * preset.fields["num_hidden_layers"]
            * preset.fields["num_key_value_heads"]
            * preset.fields["head_dim"]
            // 1024
        )
        assert re.search(rf"^\| `{re.escape(name)}` \|.*\| {kib} KiB a token \|", text, re.MULTILINE), name
