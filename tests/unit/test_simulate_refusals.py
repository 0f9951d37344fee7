"""What ``autotune simulate`` and ``capacity`` refuse, in a line each."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.profile import load_profile, save_profile
from autotune.simulate.scenario import Scenario
from benchmarks.controller.hardware import h200
from runtime.knobs import Knobs
from tests.tiers import slow_but_for
from tests.unit.simulate_command import QUICK, refused, told
from tests.unit.simulated_profile import EVEN, profiled


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_profile(profiled(), tmp_path / "h200.yaml")
    return str(tmp_path / "h200.yaml")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--slo", "tpot=50"], '--slo: "tpot=50" has no unit'),
        (["--workload", "nope"], '--workload: workload "nope": '),
        (["--scale", "compute"], '--scale: "compute" is no speed; write compute=0.5,bandwidth=0.4'),
        (["--scale", "compute=0"], '--scale: "compute=0" must be a number from 0.001 to 1000'),
        (["--kv-tokens", "999999999999"], "--kv-tokens is 999999999999; it must be a whole number from 1 to 1073741824"),
        (["--scale", "compute=1,compute=2"], "--scale: compute is given twice"),
        (["--price", "2.50"], '--price: "2.50" is not a price for a time; write 2.50/h'),
        (["--controller", "pid"], "--controller is 'pid'; it must be one of "),
        (["--token-budget", "0"], "--token-budget is 0; it must be a whole number between 1 and "),
        (["--seeds", "0"], "--seeds is 0; it must be a whole number from 1 to 1000"),
        (["--seed", "-1"], "--seed is -1; it must be a whole number from 0 to "),
        (["--requests", "5"], "--requests is 5; it must be a whole number from 10 to 10000000"),
        (["--token-budget", "abc"], "--token-budget is abc; it must be a whole number"),
        (["--max-wait-ms", "abc"], "--max-wait-ms is abc; it must be a number"),
        (["--kv-tokens", "15"], "--kv-tokens is 15; it must be a whole number of at least 16: blocks of 16 tokens"),
    ],
)  # fmt: skip
def test_wrong_options(path: str, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    for verb in (["capacity", path], ["simulate", "--profile", path]):
        assert refused(capsys, [*verb, *options]).startswith(text)


def test_a_profile_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["capacity", "nope"], ["simulate", "--profile", "nope"]):
        assert refused(capsys, verb) == (
            "nope: cannot be read (No such file or directory), and is no shipped profile either; `autotune profiles` lists those"
        )


@pytest.mark.parametrize("verb", slow_but_for(("simulate",), ("simulate", "capacity")))
def test_the_profile_is_given_in_either_way_and_once(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    quick = ["--workload", EVEN, "--token-budget", "512"]
    found = [told(capsys, verb, *words, *quick) for words in ([path], ["--profile", path], [path, "--profile", path])]
    assert found[0] == found[1] == found[2] and found[0]["profile"] == "h200-llama8b"
    assert refused(capsys, [verb, path, "--profile", "other.yaml"]) == (
        f"PROFILE is {path} and --profile is other.yaml; give one of them, or the same twice"
    )
    assert refused(capsys, [verb]) == (
        f"name a profile, as PROFILE or --profile: a file, or a name from `autotune profiles`; see autotune {verb} --help"
    )
    monkeypatch.setenv("COLUMNS", "200")
    assert run([verb, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Usage: autotune {verb} [OPTIONS] [PROFILE] " in said
    assert "Required, here or as --profile." in said and "Another way to give PROFILE." in said


def test_wrong_rates(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("-1", "0", "1e10", "1e-12"):
        words = f"--rate is {float(rate):g}; it must be a number from 1e-06 to 1e+06 requests/s"
        assert refused(capsys, ["simulate", "--profile", path, "--rate", rate]) == words
    named = refused(capsys, ["simulate", "--profile", path, "--workload", EVEN + ",rate=1e9"])
    assert named == "--workload: rate is 1e+09; it must be a number from 1e-06 to 1e+06 requests/s"


@pytest.mark.slow
def test_the_least_rate_there_is_takes_no_more_memory_than_another(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window of a hundred million seconds, and not a figure for each of them."""
    score = Scenario.of(load_profile(path), workload=EVEN).measure(Knobs(), 1e-6, 0, requests=100)
    assert len(score.blocks) == 10_000 and sum(offered for offered, _ in score.blocks) == 100
    tracemalloc.start()
    try:
        found = told(capsys, "simulate", "--profile", path, "--rate", "1e-6", "--token-budget", "256")
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
    assert found["settings"][0]["attainment"] == 1.0


def test_memory_that_is_not_there_is_one_line(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Scenario, "measure", too_much)
    assert run(["simulate", "--profile", path, *QUICK]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: that takes more memory than there is; ")


def test_a_workload_that_is_not_here_is_named_with_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace of another machine: the profile is as good as ever for other loads."""
    facts = profiled().workload.model_copy(update={"spec": "azure-conv:/no/where.csv"})
    file = tmp_path / "p.yaml"
    save_profile(profiled(workload=facts), file)
    words = refused(capsys, ["simulate", "--profile", str(file)])
    assert words.startswith(f'{file}: workload.spec: workload "azure-conv:/no/where.csv": ')
    assert words.endswith("; --workload names another")
    assert run(["simulate", "--profile", str(file), "--workload", EVEN, "--rate", "5", *QUICK]) == 0


def test_a_profile_without_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profiled(cost_model=None), tmp_path / "old.yaml")
    text = refused(capsys, ["capacity", str(tmp_path / "old.yaml")])
    assert text.endswith(
        "old.yaml holds no cost model, so nothing can be simulated from it; make it anew with autotune profile"
    )


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param("compute=1000,bandwidth=1000,overhead=1000", marks=pytest.mark.slow),
        "compute=0.001,bandwidth=0.001,overhead=0.001",
    ],
)
def test_the_slowest_machine_a_profile_can_hold_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scale: str
) -> None:
    """No figure of it is beyond what can be written down, on a machine a thousand times slower too."""
    facts = h200().facts
    each = {"decode_kv_s": 1e-3, "prefill_kv_s": 1e-3, "pair_s": 1e-3, "token_s@0": 1.0}
    most = {name: each.get(name, 1e3) for name in facts.coefficients}
    file = tmp_path / "p.yaml"
    save_profile(profiled(cost_model=facts.model_copy(update={"coefficients": most, "serving_overhead_s": 1e3})), file)
    assert load_profile(file).cost_model is not None
    for verb in (["simulate", "--rate", "5", "--profile", str(file)], ["capacity", str(file)]):
        found = told(capsys, *verb, "--workload", EVEN, "--scale", scale, "--price", "1/h", code=1)
        assert all(s.get("attainment", 0) == 0 for s in found["settings"])
