"""``--kv-cache-dtype``: who refuses it, what a profile says of it, and what other engines are told."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from autotune import control
from autotune.cli import bench, options
from autotune.cli.main import run
from autotune.cli.target import model_facts
from autotune.engines.own import OwnSource
from autotune.export import TARGETS, Fit, export
from autotune.profile import ModelFacts, load_profile, save_profile
from autotune.profile.fingerprint import machine, stored_otherwise
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.torch_backend import backends
from runtime.tunable import KV_CACHE_DTYPES, ModelInfo
from tests.sample_profile import full_profile, sample_model, sample_profile
from tests.unit.control_world import SimulatedEngine, h200

EIGHT = sample_model(kv_cache_dtype="fp8", kv_bytes_per_token=65536)
ON_CPU = "kv_cache_dtype is 'fp8'; on cpu it must be auto: "


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command ends with, beside what it had said before."""
    assert run(list(words)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A profile of this machine that was measured with 8 bits."""
    return save_eight(tmp_path, "fp8")


def save_eight(folder: Path, stored: str) -> str:
    path = folder / "eight.yaml"
    save_profile(full_profile(machine=machine(), model=sample_model(name="nano", kv_cache_dtype=stored)), path)
    return str(path)


# -- refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("profile", "--cpu", "--model", "nano"), ("bench", "--cpu"), ("serve", "nano")])
def test_one_line_and_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *words, "--kv-cache-dtype", "int8")
    assert said == "--kv-cache-dtype is int8; it must be auto or fp8"
    on_cpu = ("--device", "cpu", "--port", "0") if words[0] == "serve" else ()
    assert refused(capsys, *words, *on_cpu, "--kv-cache-dtype", "fp8").startswith(ON_CPU)
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_options_and_pools_know_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (options, backends):
        assert module.KV_CACHE_DTYPES is KV_CACHE_DTYPES  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "KV_CACHE_DTYPES", (*KV_CACHE_DTYPES, "int4"))
    options.check_kv_cache_dtype("int4")
    backends.check_kv_cache_dtype("int4", torch.device("cpu"))
    with pytest.raises(InputError, match="--kv-cache-dtype is int8; it must be auto or fp8 or int4"):
        options.check_kv_cache_dtype("int8")
    with pytest.raises(InputError, match="kv_cache_dtype is 'int8'; it must be auto or fp8 or int4"):
        backends.check_kv_cache_dtype("int8", torch.device("cpu"))


def test_a_callable_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "profile", "--callable", "json:dumps", "--kv-cache-dtype", "fp8")
    assert said.startswith("--kv-cache-dtype is given; it says nothing about a callable")


@pytest.mark.parametrize("stored", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("words", "instead"),
    [(("check", "PROFILE"), "check it as it was measured, or profile again with --kv-cache-dtype auto"),
     (("bench", "--cpu", "--profile", "PROFILE"), "--kv-cache-dtype auto takes another"),
     (("serve", "--device", "cpu", "--port", "0", "--profile", "PROFILE"), "--kv-cache-dtype auto takes another")],
)  # fmt: skip
def test_a_profile_of_8_bits_asks_for_them_and_is_named(
    words: tuple[str, ...], instead: str, stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's name for ours is ours; another that it has is none."""
    path = save_eight(tmp_path, stored)
    said = refused(capsys, *(path if word == "PROFILE" else word for word in words))
    why = "kv_cache_dtype is 'fp8_e5m2'; it must be auto or fp8" if stored == "fp8_e5m2" else ON_CPU
    assert said.startswith(f"the profile's {why}") and said.endswith(f"; {instead}")


def test_an_option_beside_the_profile_wins(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("serve", "./nowhere", "--device", "cpu", "--port", "0", "--profile", saved)
    assert refused(capsys, *words).startswith(f"the profile's {ON_CPU}")
    assert refused(capsys, *words, "--kv-cache-dtype", "fp8").startswith(ON_CPU)
    assert refused(capsys, *words, "--kv-cache-dtype", "auto").startswith("model ./nowhere: no such directory")


class Stopped(InputError):
    """Raised where an engine would be started, or served."""


def test_bench_and_serve_note_another(
    saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: Any, **named: Any) -> Any:
        raise Stopped("here")

    source = SimpleNamespace(
        model=ModelInfo("nano", 1000, 8192, device="cpu"), name="autotune-runtime", version="0.1.0", introduction=(),
        limits=KnobLimits(), stock=Knobs(), start=stopped, default_kv_tokens=lambda: None, with_classes=lambda _: source,
    )  # fmt: skip
    monkeypatch.setattr(bench, "load", lambda *given, **named: source)
    note = "note: profile was measured with kv_cache_dtype fp8, not auto"
    words = ["bench", "--cpu", "--profile", saved]
    assert run([*words, "--kv-cache-dtype", "auto"]) == 2
    assert note in capsys.readouterr().out.splitlines()
    source.model = replace(source.model, kv_cache_dtype="fp8")
    assert run(words) == 2 and note not in capsys.readouterr().out.splitlines()

    engine = SimulatedEngine(h200)
    monkeypatch.setattr(OwnSource, "load", lambda *given, **named: source)
    source.with_options, source.start = lambda **named: source, lambda *given: engine
    monkeypatch.setattr("runtime.serving.run.warm_up", stopped)
    monkeypatch.setattr("runtime.serving.run.end_if_lost", lambda engine: None)
    words = ["serve", "--device", "cpu", "--port", "0", "--profile", saved]
    assert run([*words, "--kv-cache-dtype", "auto"]) == 2 and note in capsys.readouterr().err.splitlines()
    assert run(words) == 2 and note not in capsys.readouterr().err.splitlines()


# -- what a profile says ----------------------------------------------------------------------------------------------------


def test_it_is_a_fact_of_the_model() -> None:
    info = ModelInfo("m", 1000, 4096, "llama", 7, "bfloat16", "cuda", 64, kv_cache_dtype="fp8")
    assert model_facts(info, 0).kv_cache_dtype == "fp8"
    assert model_facts(replace(info, kv_cache_dtype="auto"), 0).kv_cache_dtype == "auto"
    assert EIGHT.dtypes == "bfloat16, KV fp8" and sample_model().dtypes == "bfloat16"


def test_a_file_says_it_where_it_is_not_what_is_computed(tmp_path: Path) -> None:
    """So files and studies that are older stay what they are."""
    profile, path = sample_profile(model=EIGHT), tmp_path / "p.yaml"
    save_profile(profile, path)
    assert load_profile(path) == profile and load_profile(path).model.kv_cache_dtype == "fp8"
    assert yaml.safe_load(path.read_text())["model"]["kv_cache_dtype"] == "fp8"
    save_profile(sample_profile(), path)
    assert "kv_cache_dtype" not in path.read_text()
    facts = sample_model().model_dump(mode="json")
    assert "kv_cache_dtype" not in facts and ModelFacts(**facts) == sample_model()
    assert facts != EIGHT.model_dump(mode="json"), "it is another study"


def test_control_warns_of_another(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    save_profile(sample_profile(machine=machine(), model=sample_model(name="tiny", kv_cache_dtype="fp8")), path)

    def engine(kv_cache_dtype: str) -> SimulatedEngine:
        made = SimulatedEngine(h200)
        model = ModelInfo("tiny", 1000, 8192, device="cpu", kv_cache_dtype=kv_cache_dtype)
        made._facts = replace(made.facts, model=model)
        return made

    with pytest.warns(UserWarning) as told:
        control(engine("auto"), slo=SLO(ttft_ms=500), profile=path).close()
    assert str(told[0].message).startswith(
        "profile was measured with kv_cache_dtype fp8, not auto; the controller starts"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        control(engine("fp8"), slo=SLO(ttft_ms=500), profile=path).close()
    assert stored_otherwise(EIGHT, "fp8_e4m3") == "" != stored_otherwise(EIGHT, "fp8_e5m2")
    assert stored_otherwise(EIGHT, "fp8") == stored_otherwise(sample_model(), "auto") == ""


def test_tables_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    for model, shown in ((EIGHT, True), (sample_model(), False)):
        save_profile(sample_profile(model=model), path)
        assert run(["show", str(path)]) == 0
        assert ("bfloat16, KV fp8" in capsys.readouterr().out) is shown


# -- what other engines are told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "key", "names"),
    [
        ("vllm", "kv-cache-dtype", {name: name for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "bfloat16")}),
        (
            "sglang",
            "kv-cache-dtype",
            {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "bfloat16": "bf16"},
        ),
        ("tensorrt-llm", "kv_cache_config.dtype", {"fp8": "fp8", "fp8_e4m3": "fp8"}),
    ],
)
def test_an_exported_file_asks_for_the_same(to: str, key: str, names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        made = export(sample_profile(model=sample_model(kv_cache_dtype=ours)), TARGETS[to], allow_lossy=True)
        assert made.written[key] == theirs
    assert export(sample_profile(), TARGETS[to], allow_lossy=True).written[key] == "auto"


@pytest.mark.parametrize(
    ("to", "name"), [("sglang", "fp8_inc"), ("tensorrt-llm", "fp8_e5m2"), ("tensorrt-llm", "bfloat16")]
)
def test_what_another_engine_keeps_no_cache_in_is_never_passed_on(to: str, name: str) -> None:
    profile, target = sample_profile(model=sample_model(kv_cache_dtype=name)), TARGETS[to]
    with pytest.raises(
        InputError, match=rf"kv_cache_dtype={name}\b.* no counterpart in {target.title}: .*--allow-lossy"
    ):
        export(profile, target)
    made = export(profile, target, allow_lossy=True)
    assert not {*target.facts["kv_cache_dtype"].keys} & {*made.written}
    entry = next(entry for entry in made.entries if entry.name == "kv_cache_dtype")
    assert entry.fit is Fit.UNSUPPORTED and entry.lossy
    said = f"{target.title} keeps its KV cache in no such type"
    assert any("kv_cache_dtype" in line and said in line for line in made.reports)
    assert said in " ".join(made.text(Path("x.yaml")).replace("#", " ").split())


def test_half_the_bytes_are_half_the_share_of_vllm_s_memory() -> None:
    def pool(model: ModelFacts) -> Any:
        made = export(sample_profile(model=model, kv_blocks=20000), TARGETS["vllm"], allow_lossy=True)
        return next(entry.note for entry in made.entries if entry.name == "kv_pool")

    assert "KV cache 39.1 of" in pool(sample_model()) and "KV cache 19.5 of" in pool(EIGHT)
