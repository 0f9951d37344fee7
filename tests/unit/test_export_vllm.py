"""The table of vLLM, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.export import Export, Fit, export
from autotune.export import export as export_of
from autotune.export.vllm import VLLM
from autotune.profile import KvPool
from runtime.errors import InputError
from runtime.knobs import Knobs
from tests.sample_profile import sample_model, sample_profile


def made(knobs: Knobs | None = None, *, model_given: str | None = None, **changes: Any) -> Export:
    settings = {"balanced": knobs} if knobs else None
    return export(sample_profile(settings, **changes), VLLM, model=model_given, allow_lossy=True)


def note(export: Export, name: str) -> str:
    return next(entry.note for entry in export.entries if entry.name == name)


def test_everything_it_writes() -> None:
    knobs = Knobs(max_batch_size=24, max_wait_ms=0, token_budget=192, chunk_size=128)
    assert made(knobs).written == {
        "model": "meta-llama/Llama-3.1-8B",
        "max-model-len": 131072,
        "dtype": "bfloat16",
        "kv-cache-dtype": "auto",
        "gpu-memory-utilization": 0.87,
        "enable-prefix-caching": True,
        "tensor-parallel-size": 1,
        "max-num-seqs": 24,
        "max-num-batched-tokens": 192,
        "enable-chunked-prefill": True,
        "long-prefill-token-threshold": 128,
    }


def test_it_is_saved_where_there_is_a_folder(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "no" / "x.yaml", f"cannot be written: there is no directory {tmp_path / 'no'}"),
        (tmp_path / f"{'x' * 300}.yaml", "cannot be written (File name too long)"),
    ):
        with pytest.raises(InputError) as caught:
            made().save(path)
        assert str(caught.value) == f"--out: {path} {says}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk", [192, 193, 8192])
def test_a_chunk_that_cuts_nothing_needs_no_threshold(chunk: int) -> None:
    export = made(Knobs(max_batch_size=24, token_budget=192, chunk_size=chunk))
    assert "long-prefill-token-threshold" not in export.written and export.written["enable-chunked-prefill"] is True
    assert "not below token_budget 192" in note(export, "chunk_size")
    assert not any("chunk_size" in line for line in export.reports)


def test_a_chunk_longer_than_any_prompt_needs_none_either() -> None:
    knobs = Knobs(max_batch_size=8, token_budget=8192, chunk_size=4096)
    export = made(knobs, model=sample_model(max_model_len=4096))
    assert "long-prefill-token-threshold" not in export.written
    assert "no prompt is longer than 4096 tokens" in note(export, "chunk_size")
    assert made(knobs, model=sample_model(max_model_len=4097)).written["long-prefill-token-threshold"] == 4096


def test_a_chunk_that_cuts_is_approximate_and_said() -> None:
    export = made(Knobs(max_batch_size=8, token_budget=192, chunk_size=191))
    assert export.written["long-prefill-token-threshold"] == 191
    assert any(line.startswith("chunk_size 191 tokens is approximate: vLLM lifts") for line in export.reports)


def test_more_slots_than_tokens_are_cut_to_the_tokens() -> None:
    export = made(Knobs(max_batch_size=256, token_budget=64, chunk_size=64))
    assert export.written["max-num-seqs"] == export.written["max-num-batched-tokens"] == 64
    assert "token_budget 64 is the bound" in note(export, "max_batch_size")
    assert note(made(Knobs(max_batch_size=64, token_budget=64)), "max_batch_size") == ""


def test_no_wait_loses_nothing_and_a_wait_does() -> None:
    none = made(Knobs(max_wait_ms=0))
    assert "max_wait_ms: vLLM has no such setting (value 0 loses nothing)" in none.reports
    some = made(Knobs(max_wait_ms=2.5))
    assert "max_wait_ms 2.5 ms is dropped: vLLM has no such setting" in some.reports
    with pytest.raises(InputError) as caught:
        export(sample_profile({"balanced": Knobs(max_wait_ms=2.5)}), VLLM)
    said = "max_wait_ms=2.5 has no counterpart in vLLM; allow_lossy=True (--allow-lossy) drops it"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("dtype", "devices", "blocks", "share"),
    [
        ("bfloat16", 1, 54000, 0.87),  # (15.0 + 105.5) / 139.8 = 0.862
        ("bfloat16", 1, 24000, 0.45),  # (15.0 + 46.9) / 139.8 = 0.442
        ("float32", 1, 24000, 0.55),  # (29.9 + 46.9) / 139.8 = 0.549
        ("bfloat16", 2, 24000, 0.23),  # (15.0 + 46.9) / 279.6 = 0.221
        ("bfloat16", 1, 70000, 0.95),  # (15.0 + 136.7) / 139.8 = 1.09: more than vLLM can have
    ],
)
def test_the_memory_share_is_what_weights_and_pool_take(dtype: str, devices: int, blocks: int, share: float) -> None:
    export = made(model=sample_model(dtype=dtype), kv_blocks=blocks, engine={"parallelism": devices})
    assert export.written["gpu-memory-utilization"] == share
    assert export.written["tensor-parallel-size"] == devices
    assert ("cut to the 0.95" in note(export, "kv_pool")) == (share == 0.95)
    assert any(line.startswith("kv_pool") and "is approximate" in line for line in export.reports)


@pytest.mark.parametrize(("blocks", "length"), [(2500, 40_000), (8192, 131_072), (9000, 131_072)])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pool_of_hardly_more_than_one_request_is_given_in_bytes(blocks: int, length: int, devices: int) -> None:
    """Activations come out of a share, and vLLM does not start without room for one request."""
    export = made(kv_blocks=blocks, engine={"parallelism": devices})
    assert export.written["max-model-len"] == length and "gpu-memory-utilization" not in export.written
    held = export.written["kv-cache-memory-bytes"]
    assert isinstance(held, int)
    for block in (16, 32, 64, 128):
        assert held * devices >= 131_072 * block * (-(-length // block) + 1), "one block stands for no block"
    assert held * devices <= 131_072 * (16 * blocks + 256)
    said = note(export, "kv_pool")
    assert "a share might leave less than one request of max-model-len" in said and "CUDA graphs" not in said
    assert "gpu-memory-utilization" not in made(kv_blocks=9000).written
    assert "gpu-memory-utilization" in made(kv_blocks=9000, model=sample_model(max_model_len=8192)).written


@pytest.mark.parametrize(
    ("weights", "pool", "longest", "given", "length"),
    [
        (100, 34, 15, 0, 15),  # 0.95 of 139.8 GiB, less a tenth for activations, leaves 18.8
        (113, 24.5, 9.9, 12.8, 9.9),  # and here 5.8: of nine tenths 12.8 are left beside the weights
        (113, 24.5, 20, 12.8, 12.8),
        (126, 12, 10, 12, 10),  # nothing is left
    ],
)
def test_a_share_that_is_cut_leaves_one_request_or_bytes_do(
    weights: float, pool: float, longest: float, given: float, length: float
) -> None:
    """GiB. Where bytes do not either, the longest request is a shorter one."""
    token, gib = 131_072, 2**30
    model = sample_model(parameters=int(weights * gib / 2), max_model_len=int(longest * gib / token))
    chunk = int(length * gib / token)
    knobs = Knobs(max_batch_size=8, max_wait_ms=0, token_budget=262_144, chunk_size=chunk)
    export = made(knobs, model=model, kv_blocks=int(pool * gib / token / 16))
    held, written = export.written.get("kv-cache-memory-bytes", 0), export.written["max-model-len"]
    assert isinstance(held, int) and isinstance(written, int)
    assert (export.written.get("gpu-memory-utilization") == 0.95) == (not given)
    assert held / gib == pytest.approx(given, abs=0.05) and written * token / gib == pytest.approx(length, abs=0.05)
    assert not held or held >= (written + 256) * token
    lowered = [line for line in export.reports if line.startswith("max_model_len")]
    assert len(lowered) == (length < longest) and all("is approximate: vLLM does not start" in line for line in lowered)
    assert ("KV cache cut to 12.8 GiB" in note(export, "kv_pool")) == (given == 12.8)
    assert int(export.written.get("long-prefill-token-threshold", 0)) <= written


def test_drafts_are_looked_up_by_n_grams_there_too() -> None:
    export = made(Knobs(draft_tokens=5))
    assert json.loads(str(export.written["speculative-config"])) == {
        "method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 8, "num_speculative_tokens": 5
    }  # fmt: skip
    assert "prompts go before drafts" in note(export, "draft_tokens")
    none = made(Knobs())
    assert "speculative-config" not in none.written and "value 0 loses nothing" in note(none, "draft_tokens")


@pytest.mark.parametrize(
    ("slots", "budget", "drafts", "fit"), [(64, 200, 8, 2), (64, 576, 8, 8), (512, 128, 3, 0), (7, 21, 5, 2)]
)
def test_no_more_is_drafted_than_leaves_every_sequence_a_token(slots: int, budget: int, drafts: int, fit: int) -> None:
    """vLLM plans one sequence after the other, with all its drafts."""
    export = made(Knobs(max_batch_size=slots, token_budget=budget, chunk_size=budget, draft_tokens=drafts))
    written = export.written.get("speculative-config")
    assert (json.loads(str(written))["num_speculative_tokens"] if written else 0) == fit
    [said] = [line for line in export.reports if line.startswith(f"draft_tokens {drafts} tokens is ")]
    begins = {0: "dropped: vLLM gives", drafts: "approximate: vLLM drafts"}.get(
        fit, f"approximate: {fit} in place of {drafts}: "
    )
    assert said.removeprefix(f"draft_tokens {drafts} tokens is ").startswith(begins)
    going = budget // (1 + drafts)
    why = f"only {going} of {min(slots, budget)} sequences would go on"
    assert (why in said) is (fit < drafts)
    if not fit:
        with pytest.raises(
            InputError, match=rf"draft_tokens={drafts} has no counterpart in vLLM: vLLM gives .*{why}; allow"
        ):
            export_of(sample_profile({"balanced": export.source.knobs}), VLLM)


def test_the_share_is_left_to_vllm_when_the_profile_cannot_tell() -> None:
    cpu = made(gpu=False)
    assert "gpu-memory-utilization" not in cpu.written
    assert "default (0.92)" in note(cpu, "kv_pool") and "VLLM_CPU_KVCACHE_SPACE=106" in note(cpu, "kv_pool")
    for blocks, gib in (
        (8176, 16),
        (8177, 17),
        (8192, 17),
    ):  # of 2 MiB; 16 are of the null block and one that is not full
        assert f"VLLM_CPU_KVCACHE_SPACE={gib} " in note(made(gpu=False, kv_blocks=blocks), "kv_pool")
    other = made(model_given="./mine")
    assert "gpu-memory-utilization" not in other.written
    assert "measured beside llama-3.1-8b, not beside this model" in note(other, "kv_pool")


VLLM_ITSELF: dict[str, Any] = {
    "name": "vllm",
    "version": "0.32.0",
    "kv_pool": KvPool(block_size=128, blocks=1638),
    "kv_blocks": 1638,
    "options": {"load_format": "dummy", "enforce_eager": "true"},
}


@pytest.mark.parametrize("gpu", [True, False])
def test_what_was_measured_on_vllm_is_exact(gpu: bool) -> None:
    model = sample_model(name="/models/mine", random_weights=True, kv_bytes_per_token=1000)
    knobs = Knobs(max_batch_size=24, max_wait_ms=0, token_budget=192, chunk_size=192)
    export = made(knobs, gpu=gpu, model=model, engine=VLLM_ITSELF)
    assert export.written["model"] == "/models/mine"
    assert (export.written["block-size"], export.written["num-gpu-blocks-override"]) == (
        128,
        1639,
    )  # and the null block
    assert export.written.get("kv-cache-memory-bytes") == (None if gpu else 1639 * 128 * 1000)
    assert "gpu-memory-utilization" not in export.written
    assert {e.name: e.fit for e in export.entries if e.fit is not Fit.EXACT} == {"max_wait_ms": Fit.UNSUPPORTED}
    text = " ".join(export.text(Path("vllm.yaml")).replace("\n# ", " ").split())
    assert (
        "The figures below were measured on vLLM 0.32.0. With all its options of then, the settings are those of"
        in text
    )
    assert any("vLLM was started with enforce_eager=true when this" in line for line in export.warnings), (
        "not in the file"
    )
    plain = made(
        knobs, gpu=gpu, model=model, engine={**VLLM_ITSELF, "options": {"dtype": "half", "max_num_active_seqs": "9"}}
    )
    assert not any("was started with" in line for line in plain.warnings), "the file holds it, and the setting"
    options = {"dtype": "half", "max_model_len": "4096"}
    other = made(knobs, gpu=gpu, model_given="./other", engine={**VLLM_ITSELF, "options": options})
    assert not any("was started with" in line for line in other.warnings), "they are left to the model"
    assert "engine vllm 0.32.0, started with load_format=dummy, enforce_eager=true" in text
    assert export.as_dict(Path("vllm.yaml"))["measured_on"] == "vllm 0.32.0"
    assert not any("approximate" in line for line in export.reports)
    cut = made(Knobs(max_batch_size=8, token_budget=192, chunk_size=64), gpu=gpu, engine=VLLM_ITSELF)
    assert any(line.startswith("chunk_size 64 tokens is approximate: vLLM lifts") for line in cut.reports)


@pytest.mark.parametrize("gpu", [True, False])
def test_blocks_of_several_groups_are_all_counted(gpu: bool) -> None:
    """In blocks of the size that vLLM is told, not of what it schedules by."""
    held = {"kv_blocks": 3 * 1638, "kv_block_size": 16, "kv_bytes": 10**9}
    export = made(gpu=gpu, engine=VLLM_ITSELF | held)
    assert (export.written["block-size"], export.written["num-gpu-blocks-override"]) == (16, 3 * 1638 + 1)
    assert export.written.get("kv-cache-memory-bytes") == (None if gpu else 10**9)
    assert next(e.fit for e in export.entries if e.name == "kv_pool") is Fit.EXACT


@pytest.mark.parametrize(("gpu", "devices"), [(True, 1), (True, 2), (False, 1)])
def test_blocks_of_several_groups_of_a_size_that_is_not_known_are_left_to_vllm(gpu: bool, devices: int) -> None:
    engine = VLLM_ITSELF | {"kv_blocks": 3 * 1638, "parallelism": devices}
    export = made(gpu=gpu, model=sample_model(name="/models/mine", kv_bytes_per_token=1000), engine=engine)
    assert not {"block-size", "num-gpu-blocks-override", "gpu-memory-utilization"} & export.written.keys()
    held = 1638 * 128 * 1000 * (3 * 1638 + 1) // (3 * 1638)
    assert export.written["kv-cache-memory-bytes"] == held // devices
    [said] = [line for line in export.reports if line.startswith("kv_pool")]
    assert "is approximate: the profile does not say how many tokens a block of vLLM's pool had" in said


@pytest.mark.parametrize(
    ("each", "devices", "held"), [(1000, 1, 1639 * 128 * 1000), (1000, 2, 1639 * 64 * 1000), (0, 1, None)]
)
def test_blocks_that_a_profile_does_not_tell_are_left_to_vllm(each: int, devices: int, held: int | None) -> None:
    """For its model may take them in several groups."""
    engine = VLLM_ITSELF | {"kv_blocks": None, "parallelism": devices}
    export = made(gpu=True, model=sample_model(name="/models/mine", kv_bytes_per_token=each), engine=engine)
    assert not {"num-gpu-blocks-override", "block-size"} & export.written.keys()
    assert export.written.get("kv-cache-memory-bytes") == held
    [said] = [line for line in export.reports if line.startswith("kv_pool")]
    assert (
        "is approximate: the profile does not say how many blocks vLLM's pool had" in said and "CUDA graphs" not in said
    )


@pytest.mark.parametrize(("gpu", "engine", "said"), [(True, VLLM_ITSELF, 1), (False, VLLM_ITSELF, 0), (True, {}, 0)])
def test_it_says_that_vllm_was_measured_without_async_scheduling(gpu: bool, engine: dict[str, Any], said: int) -> None:
    """Which it has on a GPU unless told otherwise, and never on a CPU."""
    export = made(gpu=gpu, engine=engine)
    warning = (
        "the measurement ran without async scheduling, which vLLM turns on by default on a GPU: for the same, add "
        "`no-async-scheduling: true` to the file or --no-async-scheduling to the command"
    )
    assert export.warnings.count(warning) == export.reports.count(warning) == said
    text = " ".join(export.text(Path("vllm.yaml")).replace("\n# ", " ").split())
    assert text.count(f"WARNING: {warning}") == said


def test_another_model_than_the_one_measured_has_another_pool() -> None:
    export = made(model_given="./other", engine=VLLM_ITSELF)
    assert not {"num-gpu-blocks-override", "block-size", "kv-cache-memory-bytes"} & export.written.keys()
    assert next(e.fit for e in export.entries if e.name == "kv_pool") is Fit.APPROXIMATE


@pytest.mark.parametrize("given", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
def test_the_measured_model_may_be_named(given: str) -> None:
    assert made(model_given=given).written == made().written
    assert not any("exported for" in line for line in made(model_given=given).warnings)


def test_a_preset_that_is_named_stands_for_the_published_model_of_its_shape() -> None:
    other = made(model_given="qwen3-8b")
    assert other.written["model"] == "Qwen/Qwen3-8B" and "dtype" not in other.written
    assert "vllm serve Qwen/Qwen3-8B " in other.command(Path("vllm.yaml"))
    same = made(model=sample_model(name="Qwen/Qwen3-8B", random_weights=False), model_given="qwen3-8b")
    assert same.written["model"] == "Qwen/Qwen3-8B" and same.written["dtype"] == "bfloat16"


@pytest.mark.parametrize("preset", ["nano", "tiny"])
def test_a_shape_that_nobody_has_published_cannot_be_served(preset: str) -> None:
    for measured in ("tiny", "llama-3.1-8b"):
        with pytest.raises(InputError) as caught:
            made(model=sample_model(name=measured), model_given=preset)
        assert str(caught.value) == (
            f"--model: {preset} is a shape with random weights that nobody has published; name a directory or hub id"
        )


def test_a_chunk_may_cut_prompts_of_a_longer_model() -> None:
    knobs = Knobs(max_batch_size=8, token_budget=8192, chunk_size=4096)
    export = made(knobs, model=sample_model(max_model_len=4096), model_given="./longer")
    assert export.written["long-prefill-token-threshold"] == 4096


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 2048, "seq_length": 4096}, 2048),
        ({"max_position_embeddings": 1024, "model_max_length": 8192}, 8192),
        ({"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 4097}}, 4097),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "mrope"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full": {"rope_type": "linear", "factor": 8.0}}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": "linear"}, None),
        ({"max_position_embeddings": "long"}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_a_threshold_is_not_above_the_context_of_another_model(
    config: object, longest: int | None, tmp_path: Path
) -> None:
    """vLLM would not start. Where the length is not known the file says so."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    export = made(Knobs(max_batch_size=8, token_budget=8192, chunk_size=4096), model_given=str(tmp_path))
    assert ("long-prefill-token-threshold" in export.written) is (longest is None or longest > 4096)
    said = note(export, "chunk_size")
    assert ("does not start if the threshold is longer than the model's context" in said) is (longest is None)
    assert (f"no prompt is longer than {longest} tokens" in said) is (longest is not None and longest <= 4096)


def test_it_says_on_whose_engine_the_figures_were_measured() -> None:
    for engine, said in (
        ({}, "this project's own engine (autotune-runtime 0.1.0)"),
        ({"name": "other"}, "other 0.1.0"),
    ):
        text = " ".join(made(engine=engine).text(Path("vllm.yaml")).replace("\n# ", " ").split())
        assert f"The figures below were measured on {said}, not on vLLM." in text


def test_the_length_is_what_the_measured_engine_accepted() -> None:
    export = made(kv_blocks=100)
    assert export.written["max-model-len"] == 1600
    assert "the model allows 131072" in note(export, "max_model_len")


def test_the_prefix_cache_is_switched_off_by_the_negated_flag() -> None:
    """vLLM drops `enable-prefix-caching: false` without a word in some versions."""
    written = made(engine={"prefix_cache": False}).written
    assert written["no-enable-prefix-caching"] is True and "enable-prefix-caching" not in written


def test_a_profile_vllm_cannot_take_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        made(model=sample_model(dtype="int8"))
    assert str(caught.value) == "vLLM would refuse this: dtype is int8; it must be one of float32, bfloat16, float16"
    assert made(model=sample_model(dtype="int8"), model_given="./other").written


def test_the_model_is_the_published_one_of_a_presets_shape() -> None:
    assert made().written["model"] == "meta-llama/Llama-3.1-8B"
    assert "model" not in made(model=sample_model(name="tiny")).written
    assert made(model=sample_model(name="tiny"), model_given="./tiny").written["model"] == "./tiny"
    for name in ("./my models/llama", "org/name"):
        taken = made(model=sample_model(name=name, random_weights=False))
        assert taken.written["model"] == name


@pytest.mark.parametrize("name", ["", "  ", "--trust-remote-code", "a\nb"])
def test_a_name_no_command_line_can_carry_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="--model is"):
        made(model_given=name)
    if name:  # a profile holds no empty one
        with pytest.raises(InputError, match=r"model\.name is"):
            made(model=sample_model(name=name, random_weights=False))


def test_the_command_can_be_pasted() -> None:
    export = made(model=sample_model(name="./my models/llama", random_weights=False))
    assert export.command(Path("a b.yaml")) == "vllm serve './my models/llama' --config 'a b.yaml'"
