"""Scenarios, capacities and their prices: in simulation, and on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.cli.simulation_options import SimulationOptions
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import read_decisions
from autotune.cost.price import per_million
from autotune.profile import Profile, find_profile, load_profile, save_profile
from autotune.workload.readers import read_azure
from autotune.workload.traces import TraceRow
from benchmarks.controller.hardware import h200
from runtime.knobs import KnobLimits, Knobs
from tests.unit.jitter_cases import STALLS
from tests.unit.simulate_command import QUICK, flat, refused, told
from tests.unit.simulated_profile import EVEN, profiled

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_profile(profiled(), tmp_path / "h200.yaml")
    return str(tmp_path / "h200.yaml")


def test_simulate_shows_the_profiles_settings(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--profile", path, "--workload", EVEN, "--rate", "5", *QUICK]) == 0
    out = capsys.readouterr().out
    for text in ("interactive", "balanced", "throughput", "attainment", "5 req/s", "cost model max", "llama-3.1-8b"):
        assert text in out
    assert "tokens\n" not in out and "…" not in out  # no price was given; nothing is cut


def test_the_head_says_what_serving_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, facts = tmp_path / "p.yaml", h200().facts
    save_profile(profiled(cost_model=facts.model_copy(update={"serving_overhead_s": 2e-3, "jitter": STALLS})), file)
    for verb in (["simulate", "--rate", "5", "--profile", str(file)], ["capacity", str(file)]):
        run([*verb, "--token-budget", "512", "--workload", EVEN, *QUICK])
        assert (
            "error of step times 0.0%; serving adds 2 ms to a step; step times scatter as measured in serving"
            in flat(capsys.readouterr().out)
        )


def test_simulate_in_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "simulate", "--profile", path, "--workload", EVEN, "--rate", "5")
    assert [s["label"] for s in found["settings"]] == ["interactive", "balanced", "throughput"]
    assert found["rate"] == 5 and found["cheapest"] is None
    assert all(s["offered"] == 200 and s["seeds"] == [0, 1] for s in found["settings"])


def test_knobs_given_replace_the_settings(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-batch-size", "7", "--token-budget", "900", "--rate", "5", "--workload", EVEN)
    (found,) = told(capsys, "simulate", "--profile", path, *options)["settings"]
    assert found["knobs"]["max_batch_size"] == 7 and found["knobs"]["token_budget"] == 900
    assert found["knobs"]["chunk_size"] == 256  # of the balanced one


def test_knobs_above_the_ceilings_of_the_profiles_engine_are_simulated_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `autotune serve` starts an engine with them; but nobody measured it."""
    save_profile(profiled(engine={"limits": KnobLimits()}), file := tmp_path / "p.yaml")
    for verb in (["simulate", "--rate", "5", "--profile", str(file)], ["capacity", str(file)]):
        command = [*verb, "--workload", EVEN, "--token-budget", "100000", "--max-wait-ms", "3"]
        found = told(capsys, *command, "--chunk-size", "8192")
        assert found["settings"][0]["knobs"]["token_budget"] == 100000
        (warning,) = found["warnings"]
        assert warning.startswith(
            "--token-budget is 100000, above engine.limits of the profile (8192 tokens): simulated is "
        )
        run([*command, "--chunk-size", "9000", *QUICK])
        out = flat(capsys.readouterr().out)
        assert f"warning: {warning} warning: --chunk-size is 9000, above engine.limits of the profile (8192 tok" in out
        assert told(capsys, *verb, "--workload", EVEN, "--token-budget", "8192")["warnings"] == []


def test_drafts_without_a_word_of_how_often_they_are_right_are_said_not_to_be_simulated(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("simulate", "--profile", path, "--rate", "5", "--draft-tokens", "3")
    (warning,) = told(capsys, *command, "--workload", EVEN)["warnings"]
    assert warning.startswith("--draft-tokens is 3, and the workload does not say how often a draft is right: none is")
    accepted = told(capsys, *command, "--workload", f"{EVEN},acceptance=0.6")
    assert accepted["warnings"] == [] and accepted["settings"][0]["knobs"]["draft_tokens"] == 3


def test_a_controller_starts_from_the_setting_and_betters_a_bad_one(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--profile", path, "--workload", EVEN, "--rate", "25", "--max-batch-size", "2", "--token-budget", "64")
    fixed = told(capsys, "simulate", *options, code=1)
    turned = told(capsys, "simulate", *options, "--controller", "predictive", code=1)
    assert turned["settings"][0]["attainment"] > fixed["settings"][0]["attainment"] + 0.1
    assert turned["settings"][0]["knobs"]["max_batch_size"] == 2  # where it began
    assert turned["controller"] == "predictive"


SLOW_START = ("--workload", EVEN, "--rate", "25", "--max-batch-size", "2", "--token-budget", "64")
CONTROLLED = ("--controller", "predictive", "--requests", "100")


def test_decisions_of_a_simulation_are_explained_in_virtual_time(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "my run.jsonl")
    command = ["simulate", path, *SLOW_START, *CONTROLLED, "--seeds", "1"]
    run([*command, "--decisions", log])
    assert flat(capsys.readouterr().out).endswith(
        f"decisions were appended to {log}: autotune explain '{log}' shows them"
    )
    assert run(["explain", log]) == 0
    first, *_ = lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["0.000", "s", "attach", "predictive", "controller,", "SLO", "ttft=500ms,tpot=30ms@99%"]
    assert any(re.match(r" +\d+\.\d{3} s  max_batch +2 → \d+ +predicted", line) for line in lines)
    assert any(line.startswith("changes   max_batch ") for line in lines) and not any("open" in line for line in lines)
    run(["explain", log, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["decisions"][-1]["action"] == "detach" and all("wall" not in d for d in found["decisions"])
    served = found["outcomes"]["default"]
    run([*command, "--json"])
    assert served["offered"] >= json.loads(capsys.readouterr().out)["settings"][0]["offered"] == 100


def test_every_setting_and_seed_is_a_run_of_the_log_and_equal_seeds_decide_alike(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    command = [
        "simulate",
        path,
        "--workload",
        EVEN,
        "--rate",
        "5",
        *CONTROLLED,
        "--seeds",
        "2",
        "--decisions",
        str(log),
    ]
    run([*command, "--json"])
    captured = capsys.readouterr()
    assert "decisions, setting by setting and seed by seed, were appended" in flat(captured.err)
    settings = [s["knobs"] for s in json.loads(captured.out)["settings"]]
    attached = [d for d in read_decisions(log) if d.action == "attach"]
    assert [d.old["token_budget"] for d in attached] == [s["token_budget"] for s in settings for _ in range(2)]
    assert all(d.at == 0 for d in attached)
    once = log.read_text()
    run(command)
    assert log.read_text() == 2 * once, "appended to, and the same again"


def test_decisions_are_of_a_controller_and_go_into_a_log_of_their_own(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    said = refused(capsys, ["simulate", path, "--decisions", str(log)])
    assert said == f"--decisions is {log}, but no controller is attached; it goes with --controller"
    assert not log.exists()
    before = Path(path).read_text()
    for other, why in ((path, "exists and is no decision log"), (str(tmp_path / "no" / "where"), "cannot be written")):
        said = refused(capsys, ["simulate", path, *CONTROLLED, "--decisions", other])
        assert said.startswith(f"--decisions: {other} {why}")
    assert Path(path).read_text() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_decisions_that_cannot_be_written_are_not_said_to_be(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["simulate", path, "--token-budget", "512", *CONTROLLED, "--seeds", "1", "--decisions", "/dev/full"]
    assert run(said) == 2
    captured = capsys.readouterr()
    assert (
        captured.err.splitlines()[-1] == "error: --decisions: /dev/full could not be written (No space left on device)"
    )
    assert "were appended" not in captured.out


@pytest.mark.parametrize("verb", ["simulate", "capacity"])
def test_help_names_every_controller_there_is(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([verb, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        f"which starts from each setting: {', '.join(CONTROLLERS)}, or module:Class." in said
        and "length_table" in CONTROLLERS
    )


@pytest.mark.slow
def test_a_price_says_what_tokens_cost_and_which_setting_is_cheapest(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "capacity", path, "--workload", EVEN, "--price", "2.50/h")
    for setting in [*found["settings"], found["cheapest"]]:
        assert setting["price_per_million"] == pytest.approx(per_million(2.5, setting["throughput"]))
    assert found["cheapest"]["capacity"] >= max(s["capacity"] for s in found["settings"])
    assert found["cheapest"]["price_per_million"] <= min(s["price_per_million"] for s in found["settings"])
    assert run(["simulate", "--profile", path, "--workload", EVEN, "--price", "60/day", "--rate", "5", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "/M tokens" in out and "at this rate" in out and "…" not in out and "At this setting's capacity of" in out
    assert re.search(r"cheapest of \d+ settings tried that meets ttft=500ms,tpot=30ms@99%: ", out)


@pytest.mark.slow
def test_the_cheapest_setting_of_another_machine_is_searched_for(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only picked from those that were good on the profile's: with a tenth of the overhead smaller steps are better."""
    profile = load_profile(path)
    found = told(capsys, "capacity", path, "--workload", EVEN, "--price", "2.50/h", "--scale", "overhead=0.1,compute=4")
    known = {p.knobs for p in (*profile.points, *profile.simulated, *(s for s in profile.settings.values()))}
    assert Knobs(**found["cheapest"]["knobs"]) not in known and found["cheapest"]["label"] == "searched here"
    assert found["cheapest"]["capacity"] > max(s["capacity"] for s in found["settings"])
    assert found["cheapest"]["tried"] > len(known)


@pytest.mark.slow
def test_bandwidth_that_cannot_act_on_the_weights_is_said(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(path)
    assert profile.cost_model is not None
    values = {n: v for n, v in profile.cost_model.coefficients.items() if n != "weights_s"}
    known = len(values)
    covariance = tuple(tuple(float(i == j) for i in range(known)) for j in range(known))
    facts = {"family": "sum", "coefficients": values, "covariance": covariance, "planned": None}
    save_profile(
        profile.model_copy(update={"cost_model": profile.cost_model.model_copy(update=facts)}), tmp_path / "sum.yaml"
    )
    words = ["capacity", str(tmp_path / "sum.yaml"), "--workload", EVEN, "--token-budget", "512"]
    assert told(capsys, *words)["warnings"] == []
    (warning,) = told(capsys, *words, "--scale", "bandwidth=2")["warnings"]
    assert warning.startswith("--scale bandwidth=2 does not act on reading the weights: in a cost model of family sum ")
    run([*words, "--scale", "bandwidth=2", *QUICK])
    assert f"warning: {warning}" in flat(capsys.readouterr().out)
    assert told(capsys, *words, "--scale", "compute=2")["warnings"] == []


def short_trace(path: Path) -> str:
    rows = "".join(f"{0.4 * n},{300 + 7 * n},{20 + n}\n" for n in range(20))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return str(path)


def test_a_short_trace_counts_once_whatever_the_seeds(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--workload",
        short_trace(tmp_path / "t.csv"),
        "--token-budget",
        "512",
        "--rate",
        "5",
        "--requests",
        "2000",
    ]
    command = ["simulate", path, *options, "--seeds", "30"]
    assert run([*command, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    (setting,), (warning,) = found["settings"], found["warnings"]
    assert setting["offered"] == 18 and setting["attainment_low"] < 0.85
    assert warning.endswith("t.csv holds 20 requests, fewer than --requests 2000 and its warm-up")
    said = flat(captured.err)
    assert f"warning: {warning}" in said and "18 requests, the same under every seed." in said
    assert "95% interval" not in said
    assert run(["simulate", path, *options[:-2], "--requests", "10"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_capacity_of_a_trace_says_that_seeds_do_not_change_it(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = short_trace(tmp_path / "t.csv")
    command = [
        "capacity",
        path,
        "--workload",
        load,
        "--slo",
        "e2e=400ms",
        "--token-budget",
        "64",
        "--seeds",
        "3",
        "--json",
    ]
    run(command)
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["settings"]
    assert len(found["seeds"]) == 1 and found["interval"] == "bisection"
    said = flat(captured.err)
    assert "of 18 requests meet e2e=400ms" in said and ". The requests are the same under every seed." in said


def test_a_trace_is_read_once(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []

    def counted(file: object, limit: int | None = None) -> list[TraceRow]:
        read.append(file)
        return read_azure(file, limit)  # type: ignore[arg-type]

    monkeypatch.setattr("autotune.workload.parse.guess_reader", lambda _: counted)
    load = short_trace(tmp_path / "t.csv")
    assert run(["simulate", path, "--workload", load + ",rate=3", "--token-budget", "512", "--requests", "10"]) == 0
    assert len(read) == 1
    facts = profiled().workload.model_copy(update={"spec": load})
    save_profile(profiled(workload=facts), tmp_path / "own.yaml")
    assert (
        run(["simulate", str(tmp_path / "own.yaml"), "--rate", "3", "--token-budget", "512", "--requests", "10"]) == 0
    )
    assert len(read) == 2


def test_requests_that_are_cut_are_said(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("simulate", "--profile", path, "--rate", "0.001", "--token-budget", "512", "--workload")
    found = told(capsys, *command, "poisson:prompt=500-1499,output=100", "--kv-tokens", "1024")
    assert (found["cap_prompt"], found["cap_output"]) == (768, 256)
    (warning,) = found["warnings"]
    assert re.fullmatch(
        r"7[23]\.\d% of the prompts are cut to 768 tokens, the most that the profile and .* room for", warning
    )
    (warning,) = told(capsys, *command, "poisson:prompt=999,output=400", "--kv-tokens", "1024")["warnings"]
    cut = "100.0% of the prompts are cut to 768 tokens and 100.0% of the outputs are cut to 256 tokens, "
    assert warning.startswith(cut)
    for own in ("poisson:prompt=999,output=400,cap_prompt=700,cap_output=200", EVEN):
        assert told(capsys, *command, own, "--kv-tokens", "1024")["warnings"] == []


def test_requests_that_were_cut_when_they_were_measured_are_not_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = profiled().workload.model_copy(update={"cap_prompt": 300, "spec": EVEN})
    save_profile(profiled(workload=facts), tmp_path / "p.yaml")
    command = ("simulate", "--profile", str(tmp_path / "p.yaml"), "--rate", "0.1", "--token-budget", "512")
    assert told(capsys, *command)["warnings"] == []
    assert told(capsys, *command, "--workload", "poisson:prompt=700")["warnings"] != []


def test_capacity_as_a_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capacity", path, "--workload", EVEN, "--token-budget", "512", *QUICK]) == 0
    out = flat(capsys.readouterr().out)
    assert "requested" in out and "capacity, req/s" in out and "balanced" not in out
    assert "Capacity: the highest rate at which 99% of 100 requests meet ttft=500ms,tpot=30ms@99%" in out
    assert "Mean and 95% interval over 2 seeds." in out


def test_one_seed_has_no_interval_over_seeds(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["capacity", path, "--workload", EVEN, "--token-budget", "512", "--requests", "100", "--seeds", "1"]
    assert run([*options, "--json"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["settings"]
    assert found["interval"] == "bisection" and found["capacity_high"] / found["capacity_low"] <= 1.01
    assert "95%" not in captured.err and "( ) is the two rates between which the search ended." in flat(captured.err)
    assert told(capsys, *options[:-4])["settings"][0]["interval"] == "95%"


def test_an_slo_that_every_rate_meets_is_no_bad_input(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("capacity", path, "--workload", EVEN, "--slo", "tpot=1000s", "--token-budget", "512", "--price", "1/h")
    (found,) = told(capsys, *options)["settings"]
    assert found["unbounded"] and found["capacity"] is found["capacity_high"] is found["price_per_million"] is None
    assert run([*options, *QUICK]) == 0
    out = flat(capsys.readouterr().out)
    assert "unbounded: no rate tried missed tpot=1000000ms@99% (requested; up to " in out and "have no price" in out


def test_an_slo_that_no_rate_meets_is_said_with_what_is_met(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the lowest rate tried; of no capacity there is an interval."""
    options = ["capacity", path, "--workload", EVEN, "--slo", "ttft=1ms", "--token-budget", "512", "--requests", "50"]
    assert run(options) == 1
    out = flat(capsys.readouterr().out)
    assert re.search(
        r"No rate meets ttft=1ms@99%: with requested, 0.0% of the requests do at [\d.]+ req/s, the lowest tried. Relax --slo.",
        out,
    )
    assert "interval" not in out


def test_of_classes_whose_slos_no_rate_meets_each_has_its_own(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", f"chat={EVEN}@0.5+batch={EVEN}@0.5", "--class", "chat:ttft=1ms", "--class", "batch:e2e=60s"]
    assert run(["capacity", path, *load, "--token-budget", "512", "--requests", "50", "--seeds", "1"]) == 1
    assert re.search(
        r"No rate meets the SLO of every class: with requested, [\d.]+% of the requests meet their own at [\d.]+ req/s, the "
        r"lowest tried. Relax --class.",
        flat(capsys.readouterr().out),
    )


@pytest.mark.slow
def test_settings_of_equal_knobs_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profiled()
    settings = profile.settings | {"throughput": profile.settings["interactive"]}
    save_profile(profile.model_copy(update={"settings": settings}), tmp_path / "twice.yaml")
    for verb in (["simulate", "--rate", "5", "--profile"], ["capacity"]):
        found = told(capsys, *verb, str(tmp_path / "twice.yaml"), "--workload", EVEN)["settings"]
        assert [one["label"] for one in found] == ["interactive, throughput", "balanced"]
    where = ["simulate", "--rate", "5", "--profile", str(tmp_path / "twice.yaml"), "--price", "1/h"]
    assert run([*where, "--workload", EVEN, *QUICK]) == 0
    assert "…" not in capsys.readouterr().out


@pytest.mark.slow
def test_what_differs_from_what_the_profile_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Only where the machine, the load, the SLO and the settings are those of the profile."""
    measured = r"[\d.]+% of \d+ requests met the SLO when measured, in windows of [\d.]+ s. "
    measured += "A simulation of the same requests gives "
    simulated = rf"balanced setting, as profiled: {measured}[\d.]+%"
    capacity = rf"The profile has a capacity of [\d.]+ req/s: {measured}.* At that rate, 100 requests take [\d.]+ s\."
    for verb, words in (("simulate", simulated), ("capacity", capacity)):
        run([verb, "cpu-2core-tiny", *QUICK])
        assert re.search(words, flat(capsys.readouterr().out))
        for other in (["--scale", "compute=2"], ["--slo", "tpot=90ms"], ["--token-budget", "512"]):
            run([verb, "cpu-2core-tiny", *QUICK, *other])
            assert "in windows of" not in flat(capsys.readouterr().out)
    run(["simulate", "cpu-2core-tiny", "--rate", "10", *QUICK])
    assert "in windows of" not in flat(capsys.readouterr().out)


def test_the_profiles_capacity_is_held_against_that_of_the_same_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = SimulationOptions(
        "cpu-2core-tiny", workload=None, slo=None, classes=None, scale=None, kv_tokens=None, price=None, controller=None,
        knobs={}, requests=100,
    )  # fmt: skip
    monkeypatch.setattr(requested, "_measured_and_simulated", lambda point, stop: "As measured.")
    known = requested.profile.capacity
    assert known is not None
    rate = next(p.offered_rate for p in known.tried if p.rate == known.rate)

    def said(same: float | None, other: float) -> str | None:
        found: list[Any] = [SimpleNamespace(knobs=known.knobs.with_(max_wait_ms=7), rate=other)]
        if same is not None:
            found.append(SimpleNamespace(knobs=known.knobs, rate=same))
        return requested.beside_capacity(found, 100, lambda: False)

    assert said(rate, 2 * rate) is None and said(None, 2 * rate) is None
    assert (said(2 * rate, rate) or "").startswith(f"The profile has a capacity of {rate:.3g} req/s: As measured.")


@pytest.mark.parametrize(("verb", "said"), [("simulate", False), ("advise", False), ("capacity", True)])
def test_help_says_what_intervals_are_over(verb: str, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert ("intervals are over these sets" in " ".join(capsys.readouterr().out.replace("│", " ").split())) is said


def test_a_rate_that_the_workload_names_is_simulated(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = ["simulate", "--profile", path, "--token-budget", "512", *QUICK]
    for workload, more, rate, words in (
        (EVEN + ",rate=5", [], 5.0, "at 5 req/s (the workload's) "),
        (EVEN + ",rate=5", ["--rate", "4"], 4.0, "at 4 req/s (--rate) "),
        (EVEN, [], profiled().workload.rate, "req/s (the profile's; --rate for another) "),
    ):
        run([*verb, "--workload", workload, *more, "--json"])
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert found["rate"] == found["settings"][0]["rate"] == rate and words in captured.err
    run(verb)
    assert "req/s (the profile's) " in flat(capsys.readouterr().out)


def test_whose_length_scale_it_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = profiled().workload.model_copy(update={"length_scale": 0.5})
    save_profile(profiled(workload=facts), tmp_path / "half.yaml")
    for workload, words in (
        (EVEN, "lengths × 1/2 (the profile's) "),
        (EVEN + ",length=1", "length=1 at "),
        (f"a={EVEN},length=1@50%+b={EVEN}@50%", "lengths of b × 1/2 (the profile's) "),
    ):
        run(
            [
                "simulate",
                "--profile",
                str(tmp_path / "half.yaml"),
                "--token-budget",
                "512",
                "--workload",
                workload,
                *QUICK,
            ]
        )
        assert words in flat(capsys.readouterr().out) + " "
    options = ("simulate", str(tmp_path / "half.yaml"), "--token-budget", "512", "--workload", workload)
    found = told(capsys, *options)
    assert (found["length_scale"], found["length_scales"]) == (None, {"a": 1.0, "b": 0.5})


@pytest.mark.slow
def test_half_a_machine_has_less_capacity(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("capacity", path, "--workload", EVEN, "--token-budget", "512")
    whole = told(capsys, *options)["settings"][0]["capacity"]
    half = told(capsys, *options, "--scale", "compute=0.5,bandwidth=0.5,overhead=0.5")["settings"][0]["capacity"]
    assert 0.3 * whole < half < 0.55 * whole


@pytest.mark.slow
def test_no_rate_at_all_is_exit_code_1(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "capacity", path, "--workload", EVEN, "--slo", "tpot=2ms", "--price", "1/h", code=1)
    assert all(s["capacity"] is None and s["price_per_million"] is None for s in found["settings"])
    assert run(["capacity", path, "--workload", EVEN, "--slo", "tpot=2ms", "--price", "1/h", *QUICK]) == 1
    assert re.search(r"none of the \d+ settings tried meets tpot=2ms@99%", capsys.readouterr().out)


def beside(profile: Profile, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    save_profile(profile, path)
    run(["simulate", str(path), *QUICK])
    return flat(capsys.readouterr().out)


@pytest.mark.slow
def test_a_measurement_is_held_against_several_draws_of_the_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One draw says of this profile's very requests anything from 86 to 100%; it measured 99.8%."""
    said = beside(load_profile(ROOT / "benchmarks" / "data" / "two_cores.yaml"), tmp_path / "p.yaml", capsys)
    found = re.search(
        r"of the same requests gives ([\d.]+)% on average \(([\d.]+)% to ([\d.]+)% in 8 draws of the step-time", said
    )
    assert found is not None
    mean, low, high = map(float, found.groups())
    assert low < 95 < mean < 99.8 < high and "100.0% if each step takes its mean time" in said
    assert "Simulations of this machine are" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "how"), ((0.4, "pessimistic"), (1.0, "")))
def test_a_machine_that_was_calibrated_in_a_bad_hour_is_simulated_with_a_word_on_it(
    speed: float, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where other programs were there while it was calibrated, and gone when it was measured."""
    profile = load_profile(find_profile("cpu-2core-tiny"))
    assert profile.simulation is not None
    slow = profile.simulation.model_copy(update={"speed": speed * profile.simulation.speed})
    said = beside(profile.model_copy(update={"simulation": slow}), tmp_path / "p.yaml", capsys)
    found = re.search(
        r"Simulations of this machine are (\w+) by (\d+) points here: in the measurement, steps took less time, or scat",
        said,
    )
    assert (found[1] if found else "") == how and (not found or int(found[2]) > 50)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "warned"), ((0.36, True), (0.02, False)))
def test_simulations_that_were_off_where_the_profile_measured_are_warned_of(
    error: float, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(find_profile("cpu-2core-tiny"))
    assert profile.simulation is not None
    rough = profile.model_copy(update={"simulation": profile.simulation.model_copy(update={"goodput_error": error})})
    save_profile(rough, tmp_path / "p.yaml")
    for verb in ("simulate", "capacity"):
        run([verb, str(tmp_path / "p.yaml"), "--rate" if verb == "simulate" else "--seed", "10", *QUICK])
        clause = f"warning: where this profile also measured, simulated goodput was off by {error:.0%} (median)"
        assert (clause in flat(capsys.readouterr().out)) is warned
