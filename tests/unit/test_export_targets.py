"""The tables of SGLang, TensorRT-LLM, Triton and Ray Serve, value by value; what a callable's profile becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.main import run
from autotune.export import TARGETS, Export, export
from autotune.profile import ModelFacts
from autotune.profile.callable import BatcherSetting, save_callable_profile
from runtime.batching.options import BATCHER_LIMITS
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.callable_profile import ADAPTIVE, DYNAMIC, SLOWER, profile_of
from tests.sample_profile import sample_model, sample_profile

KNOBS = Knobs(max_batch_size=24, max_wait_ms=0, token_budget=192, chunk_size=128)


def made(to: str, knobs: Knobs = KNOBS, *, model: str | None = None, **changes: Any) -> Export:
    return export(sample_profile({"balanced": knobs}, **changes), TARGETS[to], model=model, allow_lossy=True)


def export_of(model: ModelFacts, to: str) -> Export:
    return export(sample_profile(model=model), TARGETS[to], allow_lossy=True)


def note(export: Export, name: str) -> str:
    return next(entry.note for entry in export.entries if entry.name == name)


def test_everything_sglang_gets() -> None:
    export = made("sglang", kv_blocks=8192)
    assert export.written == {
        "model-path": "meta-llama/Llama-3.1-8B", "context-length": 131072, "dtype": "bfloat16", "kv-cache-dtype": "auto",
        "max-total-tokens": 131072,
        "disable-radix-cache": False, "tp-size": 1, "max-running-requests": 24, "chunked-prefill-size": 192,
        "max-prefill-tokens": 192, "enable-mixed-chunk": True,
    }  # fmt: skip
    fewer = made("sglang", Knobs(max_batch_size=256, token_budget=64, chunk_size=64))
    assert fewer.written["max-running-requests"] == 64 and "is the bound" in note(fewer, "max_batch_size")
    assert any(line.startswith("chunk_size 128 tokens is dropped: SGLang bounds") for line in export.reports)
    assert export.command(Path("x.yaml")) == "python -m sglang.launch_server --config x.yaml"
    shape = export_of(sample_model(name="tiny"), "sglang")
    assert shape.command(Path("x.yaml")) == "python -m sglang.launch_server --model-path MODEL --config x.yaml"


@pytest.mark.parametrize(
    ("to", "keys"),
    [
        ("vllm", {"max-model-len", "dtype"}),
        ("sglang", {"context-length", "dtype"}),
        ("tensorrt-llm", {"max_seq_len", "dtype"}),
    ],
)
def test_length_and_dtype_are_left_to_another_model(to: str, keys: set[str], tmp_path: Path) -> None:
    """One that the user names now, or later: both are of the model that was measured."""
    for left, measured in (
        (made(to, model="./other"), "llama-3.1-8b"),
        (export_of(sample_model(name="tiny"), to), "tiny"),
    ):
        assert not keys & left.written.keys()
        said = f"left to the model (what was measured is that of {measured})"
        assert f"max_model_len, dtype: {said}" in left.reports
        assert said in " ".join(left.text(Path("x.yaml")).replace("\n#", " ").split())
        (tmp_path / "x.yaml").write_text("".join(f"{key}: 7\n" for key in keys))
        assert not keys & left.changes_to(tmp_path / "x.yaml").keys(), "the user's word stands"
    assert keys <= made(to).written.keys()


def test_sglang_does_not_mix_steps_while_it_drafts() -> None:
    export = made("sglang", KNOBS.with_(draft_tokens=5))
    assert export.written["enable-mixed-chunk"] is False
    assert export.written["speculative-algorithm"] == "NGRAM" and export.written["speculative-num-draft-tokens"] == 6
    assert "the budget is that of prompts" in note(export, "token_budget")


def test_everything_tensorrt_llm_gets() -> None:
    export = made("tensorrt-llm", kv_blocks=8192)
    assert yaml.safe_load(export.text(Path("x.yaml"))) == {
        "model": "meta-llama/Llama-3.1-8B", "max_seq_len": 131072, "dtype": "bfloat16", "tensor_parallel_size": 1,
        "kv_cache_config": {"dtype": "auto", "max_tokens": 131072, "enable_block_reuse": True}, "max_batch_size": 24,
        "cuda_graph_config": {"max_batch_size": 24, "enable_padding": True}, "max_num_tokens": 192,
        "enable_chunked_prefill": True,
    }  # fmt: skip
    assert any(line.startswith("chunk_size 128 tokens is approximate: TensorRT-LLM cuts") for line in export.reports)
    assert export.command(Path("x.yaml")) == "trtllm-serve meta-llama/Llama-3.1-8B --extra_llm_api_options x.yaml"


def test_the_window_that_would_hold_back_decodes_is_not_written() -> None:
    export = made("tensorrt-llm", KNOBS.with_(max_wait_ms=5))
    assert not any("wait" in key for key in export.written)
    assert any(
        line.startswith("max_wait_ms 5 ms is dropped: TensorRT-LLM's batch_wait_timeout_ms") for line in export.reports
    )


def test_drafts_of_tensorrt_llm_are_a_section_and_switch_overlap_off() -> None:
    written = yaml.safe_load(made("tensorrt-llm", KNOBS.with_(draft_tokens=3)).text(Path("x.yaml")))
    assert written["speculative_config"] == {
        "decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 8, "is_public_pool": False
    }  # fmt: skip
    assert written["disable_overlap_scheduler"] is True


def test_no_more_is_drafted_by_tensorrt_llm_than_leaves_every_sequence_a_token() -> None:
    some = made("tensorrt-llm", KNOBS.with_(max_batch_size=64, draft_tokens=5))
    assert some.written["speculative_config.max_draft_len"] == 2
    assert note(some, "draft_tokens").startswith("2 in place of 5: TensorRT-LLM gives one sequence after the other")
    none = made("tensorrt-llm", KNOBS.with_(max_batch_size=128, draft_tokens=5))
    assert not any("specul" in key or "overlap" in key for key in none.written)
    assert any(line.startswith("draft_tokens 5 tokens is dropped: TensorRT-LLM gives") for line in none.reports)


def test_a_budget_below_a_block_would_stop_every_prompt_of_tensorrt_llm() -> None:
    least = KNOBS.with_(token_budget=32)
    assert made("tensorrt-llm", least).written["max_num_tokens"] == 32
    with pytest.raises(InputError, match="token_budget=31 has no counterpart in TensorRT-LLM"):
        export(sample_profile({"balanced": least.with_(token_budget=31)}), TARGETS["tensorrt-llm"])
    dropped = made("tensorrt-llm", least.with_(token_budget=31))
    assert "max_num_tokens" not in dropped.written and "whole blocks of 32 tokens" in note(dropped, "token_budget")


@pytest.mark.parametrize(
    ("to", "key"), [("sglang", "max-total-tokens"), ("tensorrt-llm", "kv_cache_config.max_tokens")]
)
def test_a_pool_that_says_nothing_there_is_left_out(to: str, key: str) -> None:
    assert key in made(to).written
    assert key not in made(to, gpu=False).written and "CPU's memory" in note(made(to, gpu=False), "kv_pool")
    other = made(to, model="./mine")
    assert key not in other.written and "measured beside llama-3.1-8b" in note(other, "kv_pool")


@pytest.mark.parametrize("to", ["sglang", "tensorrt-llm"])
def test_a_dtype_that_they_do_not_have_is_refused(to: str) -> None:
    with pytest.raises(InputError, match="would refuse this: dtype is int8"):
        export_of(sample_model(dtype="int8"), to)


def test_a_diff_finds_keys_in_sections_and_leaves_the_model_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: ./m\nmax_batch_size: 8\nkv_cache_config:\n  enable_block_reuse: true\n  max_tokens: 5\n")
    changes = made("tensorrt-llm", kv_blocks=8192).changes_to(file)
    assert changes["kv_cache_config.max_tokens"] == (5, 131072) and changes["max_batch_size"] == (8, 24)
    assert not {"model", "kv_cache_config.enable_block_reuse"} & {*changes}


def test_a_diff_knows_a_mapping_from_the_json_that_says_the_same(tmp_path: Path) -> None:
    file, drafting = tmp_path / "mine.yaml", made("vllm", KNOBS.with_(draft_tokens=3))
    lookup = "{method: ngram, prompt_lookup_min: 2, prompt_lookup_max: 8, num_speculative_tokens: %d}\n"
    file.write_text("speculative-config: " + lookup % 3)
    assert "speculative-config" not in drafting.changes_to(file)
    file.write_text("speculative_config: " + lookup % 5)
    assert drafting.changes_to(file)["speculative-config"][0]["num_speculative_tokens"] == 5


def test_a_language_models_setting_for_batchers_of_calls() -> None:
    knobs = Knobs(max_batch_size=24, max_wait_ms=2.5, token_budget=192, chunk_size=192)
    triton, ray = made("triton", knobs), made("ray-serve", knobs)
    assert triton.written == {"max_batch_size": 24, "dynamic_batching.max_queue_delay_microseconds": 2500}
    assert ray.written == {
        "max_ongoing_requests": 48, "user_config.max_batch_size": 24, "user_config.batch_wait_timeout_s": 0.0025
    }  # fmt: skip
    for reports in (triton.reports, ray.reports):
        assert any(
            line.startswith("max_batch_size 24 sequences is approximate: ") and "a batch of" in line for line in reports
        )
        assert any(line.startswith("token_budget 192 tokens is dropped") for line in reports)
        assert any(line.startswith("model, max_model_len, dtype, kv_cache_dtype, kv_pool") for line in reports), (
            "on one line"
        )


@pytest.mark.parametrize("to", ["triton", "ray-serve"])
def test_the_best_fixed_setting_of_a_callable_is_taken_where_the_recommended_one_is_adaptive(to: str) -> None:
    made = export(profile_of(ADAPTIVE, SLOWER, DYNAMIC), TARGETS[to])
    assert made.source.knobs == DYNAMIC.knobs
    assert any("the recommended strategy is adaptive" in line and "simulated" in line for line in made.reports)
    recommended = export(profile_of(DYNAMIC, SLOWER), TARGETS[to])
    assert recommended.source.knobs == DYNAMIC.knobs and recommended.source.purpose == "recommended"
    assert not any("adaptive" in line for line in recommended.reports)
    slower = export(profile_of(SLOWER, DYNAMIC), TARGETS[to])
    assert slower.source.knobs == SLOWER.knobs, "the one that was recommended, for whatever reason"
    compared = profile_of(ADAPTIVE, SLOWER, DYNAMIC)
    alone = compared.points[1].model_copy(update={"source": "measured", "goodput": 1e6})  # a call for each item
    compared = compared.model_copy(update={"points": (compared.points[0], alone, compared.points[2])})
    assert export(compared, TARGETS[to]).source.knobs == DYNAMIC.knobs
    single = export(profile_of(ADAPTIVE, SLOWER), TARGETS[to])
    assert any("the only fixed setting that was tried is a call for each item" in line for line in single.reports)
    ceilings = export(profile_of(ADAPTIVE), TARGETS[to])
    assert ceilings.source.knobs == ADAPTIVE.knobs and any("ceilings" in line for line in ceilings.reports)


def test_everything_a_callable_is_given_there() -> None:
    profile = profile_of(DYNAMIC, replicas=2)
    assert export(profile, TARGETS["triton"]).written == {
        "instance_group.count": 2, "max_batch_size": 8, "dynamic_batching.max_queue_delay_microseconds": 4000
    }  # fmt: skip
    assert export(profile, TARGETS["ray-serve"]).written == {
        "num_replicas": 2, "max_ongoing_requests": 16, "user_config.max_batch_size": 8, "user_config.batch_wait_timeout_s": 0.036
    }  # fmt: skip
    text = " ".join(export(profile, TARGETS["triton"]).text(Path("config.pbtxt")).replace("\n# ", " ").split())
    assert "simulated for this project's own batcher" in text and profile.function in text
    missed = profile.points[0].model_copy(update={"offered": 299, "met": 296, "attainment": 0.99})
    missed_it = export(profile.model_copy(update={"points": (missed,)}), TARGETS["triton"])
    assert missed_it.source.facts()["measured"].startswith("98.997% of 299 items met the SLO")


@pytest.mark.parametrize(
    ("wait", "size", "capacity_size", "beside", "written"),
    [
        (0, 8, 32, 1.0, 0.036),
        (35, 8, 32, 1.0, 0.036),
        (37, 8, 32, 1.0, 0.037),
        (0, 500, 32, 1.0, 0.084),
        (0, 8, 32, 1.5, 0.054),
    ],
)
def test_ray_serve_waits_as_long_as_a_full_call_runs(
    wait: float, size: int, capacity_size: int, beside: float, written: float
) -> None:
    """Here items gather while a call runs, whatever the wait; Ray Serve closes a batch. A call takes 20 ms + 2 ms an item."""
    setting = BatcherSetting(
        "dynamic", Knobs(max_batch_size=size, max_wait_ms=wait, token_budget=size, chunk_size=size)
    )
    profile = profile_of(setting)
    service = profile.service.model_copy(update={"capacity_size": capacity_size, "beside": beside})
    made = export(profile.model_copy(update={"service": service}), TARGETS["ray-serve"])
    assert made.written["user_config.batch_wait_timeout_s"] == pytest.approx(written)
    said = note(made, "max_wait_ms")
    assert "even if an earlier one still runs" in said and "loses nothing" not in said
    assert (f"so {1000 * written:g} ms is written, the time of a full call" in said) is (written * 1000 > wait)
    assert any(line.startswith(f"max_wait_ms {wait} ms is approximate") for line in made.reports)


@pytest.mark.parametrize(
    ("slo", "wait", "written"), [(44, 0, 22), (43, 0, 10.5), (30, 0, 4), (30, 5, 5), (20, 0, 0), (20, 1, 1)]
)
def test_ray_serve_waits_no_longer_than_the_slo_has_room_for(slo: float, wait: float, written: float) -> None:
    """A call of one item takes 22 ms: one that waits as long is late within 43 ms, by the wait alone."""
    profile = profile_of(DYNAMIC._replace(knobs=DYNAMIC.knobs.with_(max_wait_ms=wait)))
    service = profile.service.model_copy(update={"capacity_size": 1})
    made = export(profile.model_copy(update={"service": service, "slo": SLO(e2e_ms=slo)}), TARGETS["ray-serve"])
    assert made.written["user_config.batch_wait_timeout_s"] == pytest.approx(written / 1000)
    tight = f"late for the SLO of {slo:g} ms, so {written:g} ms is written, and batches stay small"
    assert (tight in note(made, "max_wait_ms")) == (slo < 44)


def test_a_full_call_of_ray_serve_holds_no_more_than_cost_allows() -> None:
    """Here: of 512 items of 64 each 8 fill a call, which takes 20 ms + 2 ms an item."""
    knobs = DYNAMIC.knobs.with_(max_batch_size=512, token_budget=512)
    profile = profile_of(DYNAMIC._replace(knobs=knobs))
    costly = profile.model_copy(update={"inputs": profile.inputs.model_copy(update={"cost": "len", "mean_cost": 64.0})})
    service = profile.service.model_copy(update={"per_cost_ms": 0.0})
    made = export(costly.model_copy(update={"service": service}), TARGETS["ray-serve"], allow_lossy=True)
    assert made.written["user_config.batch_wait_timeout_s"] == pytest.approx(0.036)


def test_a_wait_of_ray_serve_is_no_matter_for_calls_of_one_item() -> None:
    made = export(profile_of(SLOWER), TARGETS["ray-serve"])
    assert made.written["user_config.batch_wait_timeout_s"] == 0
    assert not any(line.startswith("max_wait_ms") for line in made.reports)


def test_a_wait_of_0_is_no_loss_for_triton_and_one_for_ray_serve() -> None:
    """Of a language model's profile, which does not say how long a call is."""
    assert not any(line.startswith("max_wait_ms") for line in made("triton").reports)
    [said] = [line for line in made("ray-serve").reports if line.startswith("max_wait_ms")]
    assert said.startswith("max_wait_ms 0 ms is approximate") and "Set it to about the time of a full call" in said


@pytest.mark.parametrize("to", ["triton", "ray-serve"])
def test_a_bound_on_the_cost_of_a_call_is_lost_where_inputs_have_costs(to: str) -> None:
    costly = profile_of(DYNAMIC)
    costly = costly.model_copy(update={"inputs": costly.inputs.model_copy(update={"cost": "len"})})
    with pytest.raises(InputError, match="token_budget=8 has no counterpart"):
        export(costly, TARGETS[to])
    assert any("token_budget 8 is dropped" in line for line in export(costly, TARGETS[to], allow_lossy=True).reports)
    assert export(profile_of(DYNAMIC), TARGETS[to])


@pytest.mark.parametrize("to", ["triton", "ray-serve"])
def test_a_budget_at_its_ceiling_cuts_nothing_and_comes_first_among_equals(to: str) -> None:
    open_ = DYNAMIC._replace(knobs=DYNAMIC.knobs.with_(token_budget=BATCHER_LIMITS.token_budget))
    found = profile_of(ADAPTIVE, DYNAMIC, open_)
    costly = found.model_copy(update={"inputs": found.inputs.model_copy(update={"cost": "len"})})
    made = export(costly, TARGETS[to])
    assert made.source.knobs == open_.knobs
    assert any("it is at its ceiling, so it cuts nothing" in line for line in made.reports)
    better = costly.points[1].model_copy(update={"goodput": 2 * costly.points[1].goodput})
    costly = costly.model_copy(update={"points": (costly.points[0], better, costly.points[2])})
    assert export(costly, TARGETS[to], allow_lossy=True).source.knobs == DYNAMIC.knobs


def test_a_callable_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_callable_profile(profile_of(DYNAMIC), tmp_path / "embed.yaml")
    assert run(["export", "embed.yaml", "--to", "triton"]) == 0
    assert "start it with:  tritonserver --model-repository REPOSITORY" in capsys.readouterr().out
    text = (tmp_path / "config.pbtxt").read_text()
    assert "max_batch_size: 8\n" in text
    assert "dynamic_batching {\n  max_queue_delay_microseconds: 4000\n}\n" in text
    for words, says in (
        (
            ["--to", "vllm"],
            "embed.yaml: is the profile of a callable ('m:f'), not of a language model; it goes to triton",
        ),
        (["--to", "triton", "--for", "interactive"], "--for is interactive; embed.yaml is the profile of a callable"),
    ):
        assert run(["export", "embed.yaml", *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {says}")
