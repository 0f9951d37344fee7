"""Loading: directories that are whole, broken in every way, or of a kind that is not supported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from runtime import Engine
from runtime.errors import InputError, ModelError, UnsupportedModelError
from runtime.torch_backend import loading
from runtime.torch_backend.checks import check_directory
from runtime.torch_backend.loading import from_model, load_model
from runtime.torch_backend.self_test import self_test
from runtime.torch_backend.tokenizer import byte_tokenizer
from tests.unit.loading_models import edit, refusal, tiny


@pytest.fixture
def model_dir(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def test_a_directory(saved_model: Path) -> None:
    loaded = load_model(str(saved_model), dtype="float32", device="cpu")
    assert loaded.name == str(saved_model)
    assert (loaded.architecture, loaded.vocab_size, loaded.max_model_len, loaded.layers) == ("llama", 300, 256, 2)
    assert loaded.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert loaded.parameters == sum(p.numel() for p in tiny().parameters())
    assert loaded.eos_token_ids == (7, 257)  # the model's, then the tokenizer's
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("a") == [97]
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(ids).logits, tiny().eval()(ids).logits)
    self_test(loaded)


def test_dtype_and_length_as_asked(saved_model: Path) -> None:
    loaded = load_model(str(saved_model), dtype="bfloat16", device="cpu", max_model_len=100)
    assert loaded.dtype == torch.bfloat16 and loaded.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert loaded.max_model_len == 100


@pytest.mark.parametrize(
    ("generation", "ends"),
    [({"eos_token_id": [15, 16]}, (15, 16, 257)), ({}, (2, 257)), ({"eos_token_id": []}, (2, 257))],
)
def test_texts_end_at_the_tokens_that_the_generation_config_names(
    model_dir: Path, generation: dict[str, object], ends: tuple[int, ...]
) -> None:
    """A config that names no such token has the default of its class, 2; it counts only where the generation config names none
    either."""
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("eos_token_id")
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(str(model_dir), dtype="float32", device="cpu").eos_token_ids == ends


def test_without_a_tokenizer_it_takes_token_ids(model_dir: Path) -> None:
    for file in model_dir.glob("tokenizer*"):
        file.unlink()
    loaded = load_model(str(model_dir), dtype="float32", device="cpu")
    assert loaded.tokenizer is None and loaded.eos_token_ids == (7,) and loaded.tokenizer_error == ""


def _damaged(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def _without_its_vocabulary(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def _of_a_library_that_is_missing(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()
    (path / "tokenizer.model").write_bytes(b"junk")


@pytest.mark.parametrize(
    ("breaking", "why"),
    [
        (_damaged, "JSONDecodeError: Expecting property name"),
        (_without_its_vocabulary, "ValueError: Couldn't instantiate the backend tokenizer"),
        (_of_a_library_that_is_missing, "ValueError: "),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_not_none_at_all(
    model_dir: Path, breaking: Callable[[Path], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    breaking(model_dir)
    loaded = load_model(str(model_dir), dtype="float32", device="cpu")
    assert loaded.tokenizer is None and loaded.tokenizer_error.startswith(why) and len(loaded.tokenizer_error) <= 300
    (said,) = [text for text in caplog.messages if "its tokenizer cannot be loaded" in text]
    assert said.startswith(f"model {model_dir}: ") and said.endswith(f"token ids: {loaded.tokenizer_error}")
    assert "\n" not in said
    engine = Engine(loaded, kv_tokens=64)
    with engine, pytest.raises(ValueError, match=r"the tokenizer of .* cannot be loaded \(\w+Error: "):
        engine.submit("text")


def test_a_tokenizer_of_the_hub_is_looked_for_where_it_was_downloaded_to(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no such thing")

    asked: list[tuple[str, str, str | None]] = []

    def cached(repo: str, file: str, *, revision: str | None) -> str | None:
        asked.append((repo, file, revision))
        return str(model_dir / "config.json") if revision else None

    monkeypatch.setattr("runtime.torch_backend.loading.AutoTokenizer.from_pretrained", broken)
    monkeypatch.setattr(loading, "try_to_load_from_cache", cached)
    assert loading._tokenizer_of("me/mine", False, {"revision": "v2"}) == (None, "OSError: no such thing")
    assert loading._tokenizer_of("me/mine", False, {}) == (None, ""), "nothing is known of its files"
    assert asked == [("me/mine", "config.json", "v2"), ("me/mine", "config.json", None)]
    for file in model_dir.glob("tokenizer*"):
        file.unlink()
    assert loading._tokenizer_of("me/mine", False, {"revision": "v2"}) == (None, "")


def test_pytorch_bin_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    torch.save(tiny().state_dict(), model_dir / "pytorch_model.bin")
    self_test(load_model(str(model_dir), dtype="float32", device="cpu"))


def _no_config(path: Path) -> None:
    (path / "config.json").unlink()


def _corrupt_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "llama",')


def _config_is_a_list(path: Path) -> None:
    (path / "config.json").write_text("[]")


def _binary_config(path: Path) -> None:
    (path / "config.json").write_bytes(b"\xff\xfe\x00\x01")


def _no_model_type(path: Path) -> None:
    (path / "config.json").write_text("{}")


def _unknown_model_type(path: Path) -> None:
    edit(path, model_type="nosuchmodel")


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _truncated_weights(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _missing_shard(path: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    (path / "model.safetensors").rename(path / first)
    index = {"weight_map": {"a": first, "b": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _corrupt_index(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text("oops")


def _missing_layer(path: Path) -> None:
    edit(path, num_hidden_layers=3)


def _wrong_shape(path: Path) -> None:
    edit(path, intermediate_size=64)


@pytest.mark.parametrize(
    ("breaking", "says"),
    [
        (_no_config, "no config.json"),
        (_corrupt_config, "config.json cannot be read"),
        (_config_is_a_list, "config.json holds a list"),
        (_binary_config, "config.json cannot be read"),
        (_no_model_type, "config.json has no model_type"),
        (_unknown_model_type, "nosuchmodel"),
        (_no_weights, "no weights in it"),
        (_truncated_weights, ""),
        (_missing_shard, "1 weight files are missing, such as model-00002-of-00002.safetensors"),
        (_corrupt_index, "model.safetensors.index.json cannot be read"),
        (_missing_layer, "lack 9 of its weights, such as model.layers.2."),
        (_wrong_shape, "6 of its weights in its files have another shape, such as model.layers.0.mlp."),
    ],
)
def test_a_broken_directory_is_one_clear_line(model_dir: Path, breaking: Callable[[Path], None], says: str) -> None:
    breaking(model_dir)
    message = refusal(model_dir)
    assert str(model_dir) in message and says in message


def test_an_index_of_files_that_are_not_loaded_is_left_alone(model_dir: Path) -> None:
    """What a download of a repository with both formats leaves that leaves out ``*.bin``."""
    shards = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (model_dir / "pytorch_model.bin.index.json").write_text(json.dumps(shards))
    check_directory(model_dir)
    for path in model_dir.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelError, match="1 weight files are missing, such as pytorch_model-00001"):
        check_directory(model_dir)


def test_a_whole_file_is_loaded_and_a_stale_index_beside_it_is_not_looked_at(model_dir: Path) -> None:
    shards = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (model_dir / index).write_text(json.dumps(shards))
        check_directory(model_dir)
    for path in model_dir.glob("*.safetensors*"):
        path.unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"")
    check_directory(model_dir)


def test_no_such_directory(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")
    assert "no such directory" in refusal("./absent")
    (tmp_path / "file").write_text("")
    assert "not a directory" in refusal(tmp_path / "file")


def test_a_name_nobody_knows_when_the_hub_cannot_be_reached() -> None:
    """The tests run with the hub switched off."""
    for name in ("tinny", "someone/some-model"):
        message = refusal(name)
        assert name in message and "tiny, qwen3-0.6b" in message and "cannot be reached" in message


def test_a_hub_that_does_not_answer_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from runtime.torch_backend.loading import hub_offline

    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub_offline()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not hub_offline()  # behind a proxy only the client can tell


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    assert "it must be a preset" in refusal(name, InputError)


def test_quantised_weights(model_dir: Path) -> None:
    edit(model_dir, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised weights" in refusal(model_dir, UnsupportedModelError)


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    assert "GGUF weights, which are quantised" in refusal(tmp_path)


def test_lora_adapters(model_dir: Path) -> None:
    (model_dir / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(model_dir, UnsupportedModelError)


def test_tensor_parallelism(saved_model: Path) -> None:
    assert "tensor_parallel=2" in refusal(saved_model, UnsupportedModelError, tensor_parallel=2)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind, is_encoder_decoder=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert f"model {kind}: encoder-decoder" in refusal(tmp_path, UnsupportedModelError)


@pytest.mark.parametrize("kind", ["mamba", "jamba", "rwkv", "falcon_h1", "recurrent_gemma"])
def test_recurrent_layers(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # refused before any weight is read
    message = refusal(tmp_path, UnsupportedModelError)
    assert message.startswith(f"model {kind}: layers ") and "not supported" in message


def test_a_model_already_in_memory() -> None:
    model = tiny()
    model.train()
    loaded = from_model(model, byte_tokenizer(300), "mine")
    assert loaded.name == "mine" and not loaded.model.training and model.training
    assert loaded.tokenizer is not None
    assert from_model(model).tokenizer is None
    hf = byte_tokenizer(300).tokenizer
    assert from_model(model, hf).tokenizer.decode([104, 105]) == "hi"


def test_kv_bytes_are_measured_where_keys_and_values_differ() -> None:
    """DeepSeek's latent attention is expanded: heads × (key width + value width), not what the config's head_dim says."""
    model = tiny(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )
    assert from_model(model).kv_bytes_per_token == 2 * 4 * (8 + 4 + 6) * 4
