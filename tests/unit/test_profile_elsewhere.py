"""A profile on another machine, or with another model, than it was measured on; and which profiles come along."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune import control
from autotune.cli.main import run
from autotune.cli.serve import _check_machine
from autotune.cli.show import model_lines
from autotune.profile import Profile, find_profile, save_profile, shipped_profiles
from autotune.profile.fingerprint import machine, recorded_otherwise
from autotune.profile.schema import schema_text
from runtime.errors import InputError
from runtime.knobs import KnobLimits
from runtime.slo import SLO
from runtime.step_model import StepGraphs
from runtime.torch_backend.loading import from_model
from runtime.tunable import Capabilities, ModelInfo
from tests.sample_profile import full_profile, sample_cost_model, sample_model, sample_profile
from tests.unit import loading_models
from tests.unit.control_world import SimulatedEngine, h200

TARGET = SLO(ttft_ms=500)


def engine_of(name: str, device: str = "cpu") -> SimulatedEngine:
    """One that says what it runs on, as a live one does."""
    made = SimulatedEngine(h200)
    made._facts = replace(made.facts, model=ModelInfo(name, 1000, 8192, device=device))
    return made


def test_control_warns_of_another_machine_and_model(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    save_profile(sample_profile(), path)
    with pytest.warns(UserWarning) as told, control(engine_of("tiny"), slo=TARGET, profile=path) as attached:
        assert attached.status().knobs == sample_profile().knobs, "it is a start all the same"
    assert str(told[0].message) == (
        "profile was measured on NVIDIA H200, but this run uses the CPU; profile was measured with llama-3.1-8b, not tiny; "
        "the controller starts from its knobs and corrects them"
    )
    assert told[0].filename == __file__


def test_control_says_nothing_on_the_profiles_own_machine_nor_in_a_simulation(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    save_profile(sample_profile(machine=machine(), model=sample_model(name="tiny")), path)
    elsewhere = tmp_path / "h200.yaml"
    save_profile(sample_profile(), elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        control(engine_of("tiny"), slo=TARGET, profile=path).close()
        control(SimulatedEngine(h200), slo=TARGET, profile=elsewhere).close()


class Live(SimulatedEngine):
    """One that says it lives in real time, in an engine of another name or version."""

    capabilities = Capabilities.live()


@pytest.mark.parametrize(("name", "version"), [("autotune-runtime", "0.1.0"), ("vllm", "0.33.0")])
def test_control_warns_of_another_engine_and_version(tmp_path: Path, name: str, version: str) -> None:
    path = tmp_path / "vllm.yaml"
    of_vllm = {"name": "vllm", "version": "0.32.0"}
    save_profile(sample_profile(machine=machine(), model=sample_model(name="tiny"), engine=of_vllm), path)
    engine = Live(h200)
    engine._facts = replace(
        engine.facts, engine=name, version=version, model=ModelInfo("tiny", 1000, 8192, device="cpu")
    )
    with pytest.warns(UserWarning) as told, control(engine, slo=TARGET, profile=path) as attached:
        assert attached.status().knobs == sample_profile().knobs, "it is a start all the same"
    assert str(told[0].message) == (
        f"profile was measured on vllm 0.32.0, not on {name} {version}; the controller starts from its knobs and corrects them"
    )
    engine._facts = replace(engine.facts, engine="vllm", version="0.32.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        control(engine, slo=TARGET, profile=path).close()


def with_graphs(*sizes: int, prompts: tuple[int, ...] = (), sequences: int = 256, slots: int = 256) -> Profile:
    graphs = StepGraphs(sizes, prompts, sequences * bool(prompts))
    made = sample_profile(
        machine=machine(), model=sample_model(name="tiny"), cost_model=sample_cost_model(graphs=graphs)
    )
    limits = replace(made.engine.limits, max_batch_size=slots)
    return made.model_copy(update={"engine": made.engine.model_copy(update={"limits": limits})})


@pytest.mark.parametrize(
    ("then", "now", "differ"),
    [
        ((1, 2, 4, 8), (1, 2, 4, 8), ""),
        ((), (), ""),
        ((), (1, 2), "no CUDA graphs, this engine has CUDA graphs of 2 sizes up to 2 rows: 1 decode alone ran launch by "
                     "launch there and runs as 1 row here"),
        ((1, 2, 4), (1, 4), "CUDA graphs of 3 sizes up to 4 rows, this engine has CUDA graphs of 2 sizes up to 4 rows: "
                            "2 decodes alone ran as 2 rows there and run as 4 rows here"),
        ((1, 2, 4), (1, 2), "CUDA graphs of 3 sizes up to 4 rows, this engine has CUDA graphs of 2 sizes up to 2 rows: "
                            "3 decodes alone ran as 4 rows there and run launch by launch here"),
        ((1,), (), "CUDA graphs of 1 size up to 1 row, this engine has no CUDA graphs: 1 decode alone ran as 1 row there "
                   "and runs launch by launch here"),
    ],
)  # fmt: skip
def test_control_warns_of_other_recorded_steps(
    tmp_path: Path, then: tuple[int, ...], now: tuple[int, ...], differ: str
) -> None:
    path = tmp_path / "graphs.yaml"
    save_profile(with_graphs(*then), path)
    engine = engine_of("tiny")
    engine._facts = replace(engine.facts, graphs=StepGraphs(now))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        control(engine, slo=TARGET, profile=path).close()
    if differ:
        said = f"profile was measured with {differ}; the controller starts from its knobs and corrects them"
        assert [str(one.message) for one in told] == [said]
    else:
        assert not told


def within(slots: int, tokens: int = 8192) -> KnobLimits:
    return KnobLimits(max_batch_size=slots, token_budget=tokens)


def test_only_steps_that_both_can_make_count() -> None:
    assert recorded_otherwise(with_graphs(1, 2, 4), StepGraphs((1, 2)), within(2)) == ""
    assert recorded_otherwise(with_graphs(1, 2, 4), StepGraphs((1, 2)), within(3)) != ""
    assert recorded_otherwise(with_graphs(1, 2, slots=2), StepGraphs((1, 2, 4)), within(256)) == ""
    assert recorded_otherwise(with_graphs(96, 112), StepGraphs((96, 100)), within(100)) == "", (
        "the last size is a ceiling"
    )
    assert "as 112 rows there and run as 97 rows here" in recorded_otherwise(
        with_graphs(96, 112), StepGraphs((96, 97, 98)), within(100)
    )
    assert recorded_otherwise(sample_profile(), StepGraphs((1, 2, 4)), within(256)) == "", "it has no cost model"


OURS = "CUDA graphs of 3 sizes up to 64 tokens and 256 sequences of steps with prompts"


@pytest.mark.parametrize(
    ("prompts", "sequences", "slots", "tokens", "said"),
    [
        ((16, 32, 64), 256, 256, 8192, ""),
        ((16, 32, 60), 256, 256, 8192, "a step of 61 tokens with a prompt ran as 64 rows there and runs launch by launch here"),
        ((16, 32, 60), 256, 256, 60, ""),
        ((16, 32, 48, 64), 256, 256, 8192, "a step of 33 tokens with a prompt ran as 64 rows there and runs as 48 rows here"),
        ((), 0, 256, 8192, f"profile was measured with {OURS}, this engine has no CUDA graphs of steps with prompts: a step "
                           "of 1 token with a prompt ran as 16 rows there and runs launch by launch here"),
        ((16, 32, 64), 100, 256, 8192, f"profile was measured with {OURS}, this engine has CUDA graphs of 3 sizes up to 64 "
                                       "tokens and 100 sequences of steps with prompts"),
        ((16, 32, 64), 100, 100, 8192, ""),
    ],
)  # fmt: skip
def test_steps_with_prompts_that_are_recorded_otherwise_are_named(
    prompts: tuple[int, ...], sequences: int, slots: int, tokens: int, said: str
) -> None:
    profile = with_graphs(1, 2, 4, prompts=(16, 32, 64))
    found = recorded_otherwise(profile, StepGraphs((1, 2, 4), prompts, sequences), within(slots, tokens))
    assert said in found and bool(said) == bool(found)


def test_a_profile_from_before_prompts_were_a_fact_is_said_to_know_nothing_of_them() -> None:
    now = StepGraphs((1, 2, 4), (16, 32, 64), 256)
    assert recorded_otherwise(with_graphs(1, 2, 4), now, within(256)) == (
        f"profile knows of no recorded steps with prompts, this engine has {OURS}"
    )
    both = recorded_otherwise(with_graphs(1, 2), now, within(256))
    assert (
        both.startswith("profile was measured with CUDA graphs of 2 sizes") and "; profile knows of no recorded" in both
    )


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (("--slo", "ttft=1s"), "start from it (the controller will correct it)"),
        (("--no-control",), "use it all the same"),
    ],
)
def test_serve_refuses_it_unless_told_that_this_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], then: str
) -> None:
    path = tmp_path / "h200.yaml"
    save_profile(sample_profile(), path)
    assert run(["serve", "tiny", "--device", "cpu", "--port", "0", "--profile", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == (
        f"error: profile was measured on NVIDIA H200, but this run uses the CPU; pass --anyway to {then}"
    )


H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


@pytest.fixture(params=[(A100, H200), (H200, A100)], ids=["of-the-second", "of-the-first"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two that are not alike, the first of which is current."""
    names: tuple[str, str] = request.param

    def properties(device: str | int) -> SimpleNamespace:
        at = torch.device(device).index or 0
        return SimpleNamespace(name=names[at], total_memory=80 << 30, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return names


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0", "cuda:1"])
def test_it_is_compared_with_the_gpu_that_computes(device: str, gpus: tuple[str, str], tmp_path: Path) -> None:
    profile, path, other = sample_profile(model=sample_model(name="tiny")), tmp_path / "h200.yaml", ""
    save_profile(profile, path)
    if (gpu := gpus[device == "cuda:1"]) != H200:
        other = f"profile was measured on {H200}, this machine has {gpu}"
    said = pytest.raises(InputError, match=f"{other}; pass --anyway") if other else nullcontext()
    with said:
        _check_machine(profile, device, False, controlled=True)
    heard = pytest.warns(UserWarning, match=f"{other}; the controller") if other else nullcontext()
    with heard:
        control(engine_of("tiny", device.replace("auto", "cuda")), slo=TARGET, profile=path).close()
    assert machine(gpu=True, device=device.replace("auto", "cuda")).processor == gpu


def test_a_loaded_model_says_which_gpu_computes_it() -> None:
    loaded = from_model(loading_models.tiny())
    assert loaded.info.device == "cpu"
    assert replace(loaded, device=torch.device("cuda", 1)).info.device == "cuda:1"


@pytest.mark.parametrize("error", [AssertionError("Invalid device id"), RuntimeError("Found no NVIDIA driver\n")])
def test_a_gpu_that_is_not_there_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def properties(device: str) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    words = ["serve", "tiny", "--device", "cuda:2", "--port", "0", "--profile", "h200-qwen3-8b", "--anyway"]
    assert run(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: device is 'cuda:2', which PyTorch does not see: {str(error).strip()}"


# -- which there are --------------------------------------------------------------------------------------------------------


def test_shipped_profiles_are_found_in_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidia-h200").mkdir()
    save_profile(sample_profile(), tmp_path / "nvidia-h200" / "llama-3.1-8b.yaml")
    save_profile(full_profile(gpu=False), tmp_path / "cpu.yaml")
    (tmp_path / "profile.schema.json").write_text("{}")
    monkeypatch.setattr("autotune.profile.document.profiles_folder", lambda: tmp_path)
    name = "nvidia-h200/llama-3.1-8b"
    assert shipped_profiles() == {"cpu": tmp_path / "cpu.yaml", name: tmp_path / f"{name}.yaml"}
    assert find_profile(name) == tmp_path / f"{name}.yaml"
    with pytest.raises(
        InputError, match=r"^nothing: cannot be read .*, and is no shipped profile either; `autotune profiles` "
    ):
        find_profile("nothing")
    for unreadable in ("n" * 300, "n\0"):
        assert find_profile(unreadable) == Path(unreadable), "reading it says what is wrong"
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("")
    assert find_profile("cpu") == Path("cpu"), "a file that is there comes first"

    assert run(["profiles"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in (
        name,
        "NVIDIA H200",
        "llama-3.1-8b bfloat16",
        "ttft=500ms,tpot=50ms@99%",
        "max_batch_size=32",
        "Intel Xeon 8480, 16",
    ):
        assert word in shown
    assert run(["profiles", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[name] == {
        "path": str(tmp_path / f"{name}.yaml"), "machine": "NVIDIA H200", "model": "llama-3.1-8b",
        "slo": "ttft=500ms,tpot=50ms@99%", "knobs": sample_profile().knobs.as_dict(),
    }  # fmt: skip
    assert run(["show", name]) == 0 and run(["show", name, "--json"]) == 0


def test_a_broken_shipped_profile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("schema_version: 2\n")
    monkeypatch.setattr("autotune.profile.document.profiles_folder", lambda: tmp_path)
    assert run(["profiles"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'x.yaml'}: ")


def test_the_schema_is_printed_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "--schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def test_show_says_how_well_steps_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    made = full_profile()
    save_profile(made, path)
    assert run(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        "error of predicted step times 2.1% (cross-validated median; decode 1.5%, prefill 2.0%, mixed 3.0%), from 38 kinds of "
        "steps measured in 12 s" in " ".join(text.split())
    )
    assert "simulated in 19 s of CPU time; simulated goodput was off by 4.0% from measured (median, at the rate" in text
    assert model_lines(sample_profile()) == []


def test_a_file_whose_name_is_no_text_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["profile", "--cpu", "--out", "caf\udce9.yaml"]) == 2
    assert "is not UTF-8; a profile's name is text" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
