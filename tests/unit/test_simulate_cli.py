"""Scenarios, capacities and their prices: in simulation, and on the command line."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.evaluate import Interrupted, evaluate
from autotune.price import per_million
from autotune.profile import Profile, save_profile
from autotune.simulate import SimulatedEngine
from autotune.simulate.capacity import Search
from autotune.simulate.scenario import Scenario, parse_speeds
from autotune.workload import parse_workload
from benchmarks.controller_hardware import h200
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord
from runtime.slo import SLO
from tests.sample_profile import sample_profile

PROMISE = SLO(ttft_ms=500, tpot_ms=30)
EVEN = "poisson:prompt=700,output=60"


def profiled(**changes: Any) -> Profile:
    fields: dict[str, Any] = {"cost_model": h200().facts, "kv_blocks": 47_500, "slo": PROMISE} | changes
    return sample_profile(**fields)


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_profile(profiled(), tmp_path / "h200.yaml")
    return str(tmp_path / "h200.yaml")


def scenario(**options: Any) -> Scenario:
    return Scenario.of(profiled(), **{"workload": EVEN} | options)


# -- measuring --------------------------------------------------------------------------------------------------------


def test_evaluate_in_virtual_time_counts_the_window_alone() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000, slo=PROMISE)
    load = parse_workload(EVEN).at_rate(10.0)
    records: list[RequestRecord] = []
    found = evaluate(
        engine, Knobs(64, 0, 512, 512), load, PROMISE, vocab_size=2, seed=3, duration=20.0, warmup=5.0, keep=records.extend
    )  # fmt: skip
    due = [a.time for a in load.arrivals(3, duration=25.0) if a.time >= 5]
    assert found.offered == len(due) == len(records) and found.attainment == 1.0
    assert [r.arrival for r in records] == pytest.approx(due)
    assert found.lateness_p99_ms == found.sender_busy == 0
    assert found.wall_s == engine.clock.now() and 25 < found.wall_s < 25 + 2  # seconds that passed there
    assert found.throughput == pytest.approx(600, rel=0.25)
    assert engine.view().running == engine.view().waiting == 0
    assert 0 < found.steps.mean_ms < found.steps.p99_ms < 30


@pytest.mark.parametrize("rate", [3.0, 30.0, 80.0])
def test_fast_forward_does_not_change_a_score(rate: float) -> None:
    """Nor anything in it, below and above capacity."""
    scores = []
    for fast_forward in (True, False):
        engine = SimulatedEngine(h200(), kv_tokens=40_000, slo=PROMISE, noise=0.03, fast_forward=fast_forward)
        load = parse_workload(EVEN).at_rate(rate)
        options = {"vocab_size": 2, "seed": 1, "duration": 8.0, "warmup": 1.0}
        scores.append(evaluate(engine, Knobs(256, 0, 1024, 512), load, PROMISE, **options))  # type: ignore[arg-type]
    assert scores[0] == scores[1]
    assert (scores[0].attainment == 1.0) == (rate < 50)


def test_what_is_unfinished_at_the_last_deadline_is_a_miss() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000)
    found = evaluate(
        engine, None, parse_workload(EVEN).at_rate(400.0), SLO(e2e_ms=800), vocab_size=2, seed=0, duration=3.0
    )
    assert found.unfinished > 100 and found.violations["completion"] == found.unfinished
    assert found.wall_s == pytest.approx(3.8, abs=0.2)
    assert engine.view().running == engine.view().waiting == 0


def test_stopping_leaves_the_engine_idle() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000)
    asked = itertools.count()
    with pytest.raises(Interrupted):
        evaluate(
            engine, None, parse_workload(EVEN).at_rate(20.0), PROMISE,
            vocab_size=2, seed=0, duration=100.0, stop=lambda: next(asked) > 20,
        )  # fmt: skip
    assert engine.view().running == engine.view().waiting == 0


# -- scenarios --------------------------------------------------------------------------------------------------------


def test_the_profile_says_how_long_requests_are() -> None:
    facts = profiled().workload.model_copy(update={"length_scale": 0.5, "cap_prompt": 200, "cap_output": 20})
    small = Scenario.of(profiled(workload=facts), workload=EVEN)
    lengths = {(a.prompt_tokens, a.output_tokens) for a in small.workload.arrivals(0, limit=50)}
    assert lengths == {(200, 20)}  # 350 and 30 tokens, cut
    own = Scenario.of(profiled(workload=facts), workload="poisson:prompt=700,output=60,length=0.1")
    assert {(a.prompt_tokens, a.output_tokens) for a in own.workload.arrivals(0, limit=50)} == {(70, 6)}


def test_the_same_requests_at_every_rate_and_as_many_as_asked() -> None:
    world = scenario()
    for rate in (1.0, 12.5):
        warmup, window = world.window(rate, seed=4, requests=200)
        times = [a.time for a in world.workload.at_rate(rate).arrivals(4, duration=warmup + window)]
        assert sum(t >= warmup for t in times) == 200 and len(times) == 220
    slow, fast = (world.measure(Knobs(), rate, 4, requests=200) for rate in (2.0, 20.0))
    assert slow.offered == fast.offered == 200
    assert fast.offered_rate == pytest.approx(10 * slow.offered_rate)


def test_a_finite_workload_gives_what_it_has() -> None:
    found = scenario(workload=EVEN + ",limit=100").measure(Knobs(), 5.0, 0, requests=5000)
    assert found.offered == pytest.approx(90, abs=2)


def test_another_machine_is_slower_by_what_is_said() -> None:
    knobs = Knobs(256, 0, 2048, 2048)
    here = scenario().measure(knobs, 1.0, 0, requests=50)
    half = scenario(speeds={"compute": 0.5}).measure(knobs, 1.0, 0, requests=50)
    narrow = scenario(speeds={"bandwidth": 0.25}).measure(knobs, 1.0, 0, requests=50)
    assert here.ttft_ms.p50 and half.ttft_ms.p50 and here.tpot_ms.p50 and narrow.tpot_ms.p50 and half.tpot_ms.p50
    assert half.ttft_ms.p50 == pytest.approx(2 * here.ttft_ms.p50, rel=0.1)  # prompts compute
    assert half.tpot_ms.p50 == pytest.approx(here.tpot_ms.p50, rel=0.1)  # answers read
    assert narrow.tpot_ms.p50 == pytest.approx(4 * here.tpot_ms.p50, rel=0.2)


def test_a_smaller_pool_preempts() -> None:
    knobs, long = Knobs(256, 0, 2048, 2048), "poisson:prompt=100,output=400"
    small, large = (scenario(kv_tokens=n, workload=long).measure(knobs, 10.0, 0, requests=100) for n in (3000, 30_000))
    assert small.steps.preemptions > 0 == large.steps.preemptions
    assert small.completed_rate < large.completed_rate


@pytest.mark.parametrize("tokens", [16, 20, 31, 40])
def test_no_request_is_larger_than_the_blocks_of_a_small_pool(tokens: int) -> None:
    world = scenario(kv_tokens=tokens)
    assert world.kv_tokens == tokens // 16 * 16
    found = world.measure(Knobs(), 5.0, 0, requests=20)
    assert found.offered == 20 and found.completed_rate > 0


# -- capacity ---------------------------------------------------------------------------------------------------------


def test_capacity_is_where_the_share_crosses_the_promise() -> None:
    world, knobs = scenario(), Knobs(256, 0, 1024, 1024)
    told: list[tuple[float, bool]] = []
    search = Search(world, seeds=(0, 1, 2), requests=400)
    found = search.capacity("it", knobs, 7.0, lambda rate, held: told.append((rate, held)))
    for seed in found.seeds:
        assert world.measure(knobs, seed.rate, seed.seed, requests=400).attainment >= 0.99
        assert world.measure(knobs, seed.failed, seed.seed, requests=400).attainment < 0.99
        assert seed.failed / seed.rate <= 1.01
    low, high = found.interval
    assert 20 < low < found.rate < high < 60
    assert found.rate == pytest.approx(sum(s.offered for s in found.seeds) / 3)
    assert len(told) == sum(s.tried for s in found.seeds) < 40


@pytest.mark.parametrize("start", [0.01, 17.0, 41.3, 1e4])
def test_where_the_search_begins_does_not_matter(start: float) -> None:
    knobs = Knobs(256, 0, 1024, 1024)
    found, usual = (Search(scenario(), (0, 1), 300).capacity("it", knobs, s) for s in (start, 30.0))
    assert found.rates == usual.rates and [s.failed for s in found.seeds] == [s.failed for s in usual.seeds]


def test_what_one_request_alone_misses_no_rate_holds() -> None:
    found = Search(scenario(slo=SLO(tpot_ms=2)), (0, 1), 50).capacity("it", Knobs(), 10.0)
    assert found.rate == 0 and found.interval == (0, 0) and found.throughput == 0


def test_a_promise_that_no_number_of_requests_breaks_has_no_bound() -> None:
    search = Search(scenario(slo=SLO(e2e_ms=1e9)), (0,), 30)
    found = search.capacity("it", Knobs(), 10.0)
    assert found.unbounded and found.rate > 1e6 and found.interval == (found.rate, math.inf)
    assert search.best({"it": found}, {"other": Knobs(8, 0, 64, 64)}) is found


def test_the_best_of_many_settings_is_found_without_measuring_all_closely() -> None:
    search = Search(scenario(), (0, 1), 100)
    first = search.capacity("first", Knobs(4, 0, 64, 64), 5.0)
    others = {f"{n} slots": Knobs(n, 0, 1024, 512) for n in (2, 8, 64)}
    told: list[float] = []
    best = search.best({"first": first}, others, lambda rate, held: told.append(rate))
    capacities = {label: search.capacity(label, knobs, 5.0).rate for label, knobs in others.items()}
    assert best.rate >= 0.98 * max(capacities.values()) > first.rate
    assert search.best({best.label: best}, {"again": best.knobs}) is best


# -- the command line -------------------------------------------------------------------------------------------------

QUICK = ("--requests", "100", "--seeds", "2")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run([*arguments, *QUICK, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_simulate_shows_the_profiles_settings(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--profile", path, "--workload", EVEN, "--rate", "5", *QUICK]) == 0
    out = capsys.readouterr().out
    for text in ("interactive", "balanced", "throughput", "in SLO", "5 req/s", "cost model max", "llama-3.1-8b"):
        assert text in out
    assert "tokens\n" not in out and "…" not in out  # no price was given; nothing is cut


def test_simulate_in_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "simulate", "--profile", path, "--workload", EVEN, "--rate", "5")
    assert [s["label"] for s in found["settings"]] == ["interactive", "balanced", "throughput"]
    assert found["rate"] == 5 and found["cheapest"] is None
    assert all(s["offered"] == 200 and s["seeds"] == [0, 1] for s in found["settings"])


def test_knobs_given_replace_the_settings_even_above_the_ceilings(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-batch-size", "7", "--token-budget", "900", "--rate", "5", "--workload", EVEN)
    (found,) = told(capsys, "simulate", "--profile", path, *options)["settings"]
    assert found["knobs"]["max_batch_size"] == 7 and found["knobs"]["token_budget"] == 900
    assert found["knobs"]["chunk_size"] == 256  # of the balanced one


def test_a_controller_starts_from_the_setting_and_betters_a_bad_one(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--profile", path, "--workload", EVEN, "--rate", "25", "--max-batch-size", "2", "--token-budget", "64")
    fixed = told(capsys, "simulate", *options, code=1)
    turned = told(capsys, "simulate", *options, "--controller", "predictive", code=1)
    assert turned["settings"][0]["attainment"] > fixed["settings"][0]["attainment"] + 0.1
    assert turned["settings"][0]["knobs"]["max_batch_size"] == 2  # where it began
    assert turned["controller"] == "predictive"


def test_a_price_says_what_tokens_cost_and_which_setting_is_cheapest(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "capacity", path, "--workload", EVEN, "--price", "2.50/h")
    for setting in [*found["settings"], found["cheapest"]]:
        assert setting["price_per_million"] == pytest.approx(per_million(2.5, setting["throughput"]))
    assert found["cheapest"]["capacity"] == max(s["capacity"] for s in found["settings"])
    assert found["cheapest"]["price_per_million"] <= min(s["price_per_million"] for s in found["settings"])
    assert run(["simulate", "--profile", path, "--workload", EVEN, "--price", "60/day", "--rate", "5", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "/M tokens" in out and "at this rate" in out and "…" not in out and "at its own capacity of" in out
    assert "cheapest setting that holds ttft=500ms,tpot=30ms@99%: " in out


def test_capacity_as_a_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capacity", path, "--workload", EVEN, "--token-budget", "512", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "asked" in out and "capacity, req/s" in out and "balanced" not in out
    assert "highest rate at which 99% of 100 requests keep ttft=500ms,tpot=30ms@99%" in out
    assert "mean and 95% interval over 2 seeds" in out


def test_one_seed_has_no_interval_over_seeds(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["capacity", path, "--workload", EVEN, "--token-budget", "512", "--requests", "100", "--seeds", "1"]
    assert run([*options, "--json"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["settings"]
    assert found["interval"] == "bisection" and found["capacity_high"] / found["capacity_low"] <= 1.01
    assert "95%" not in captured.err and "( ) is between which rates the search ended for this one seed" in captured.err
    assert told(capsys, *options[:-4])["settings"][0]["interval"] == "95%"


def test_a_promise_that_every_rate_keeps_is_no_bad_input(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("capacity", path, "--workload", EVEN, "--slo", "tpot=1000s", "--token-budget", "512", "--price", "1/h")
    (found,) = told(capsys, *options)["settings"]
    assert found["unbounded"] and found["capacity"] is found["capacity_high"] is found["price_per_million"] is None
    assert run([*options, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "unbounded: no rate tried missed tpot=1000000ms@99% (asked; up to " in out and "have no price" in out


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
    assert "req/s (the profile's) " in capsys.readouterr().out


def test_whose_length_scale_it_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = profiled().workload.model_copy(update={"length_scale": 0.5})
    save_profile(profiled(workload=facts), tmp_path / "half.yaml")
    for workload, words in ((EVEN, "lengths × 1/2 (the profile's) "), (EVEN + ",length=1", "length=1 at ")):
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
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["simulate", "capacity"])
def test_what_was_found_before_a_stop_is_shown(
    path: str, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes once the second setting is under way."""
    measure, interactive = Scenario.measure, profiled().settings["interactive"].knobs

    def interrupted(self: Scenario, knobs: Knobs, *rest: Any, **options: Any) -> Any:
        if knobs != interactive:
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self, knobs, *rest, **options)

    monkeypatch.setattr(Scenario, "measure", interrupted)
    where = ["simulate", "--rate", "5", "--profile", path] if verb == "simulate" else ["capacity", path]
    assert run([*where, "--workload", EVEN, *QUICK, "--price", "1/h", "--json"]) == 130
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [one["label"] for one in found["settings"]] == ["interactive"] and found["stopped"]
    assert captured.err.splitlines()[-1] == "stopped: 1 of 3 settings are done, the cheapest was not looked for"


def test_half_a_machine_has_less_capacity(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("capacity", path, "--workload", EVEN, "--token-budget", "512")
    whole = told(capsys, *options)["settings"][0]["capacity"]
    half = told(capsys, *options, "--scale", "compute=0.5,bandwidth=0.5,overhead=0.5")["settings"][0]["capacity"]
    assert 0.3 * whole < half < 0.55 * whole


def test_no_rate_at_all_is_exit_code_1(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "capacity", path, "--workload", EVEN, "--slo", "tpot=2ms", "--price", "1/h", code=1)
    assert all(s["capacity"] is None and s["price_per_million"] is None for s in found["settings"])
    assert run(["capacity", path, "--workload", EVEN, "--slo", "tpot=2ms", "--price", "1/h", *QUICK]) == 1
    assert "no setting holds tpot=2ms@99%" in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--slo", "tpot=50"], '--slo: "tpot=50" has no unit'),
        (["--workload", "nope"], '--workload: workload "nope": '),
        (["--scale", "compute"], '--scale: "compute" is no speed; write compute=0.5,bandwidth=0.4'),
        (["--scale", "compute=0"], '--scale: "compute=0" must be a number above 0'),
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


def test_wrong_rates(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, ["simulate", "--profile", path, "--rate", "-1"]) == "--rate is -1; it must be above 0"


def test_ctrl_c_in_a_verb_that_does_not_wait_for_it(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as while its modules load."""

    def interrupted(file: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return file

    monkeypatch.setattr("autotune.profile.find_profile", interrupted)
    assert run(["simulate", "--profile", path]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_profile_without_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profiled(cost_model=None), tmp_path / "old.yaml")
    text = refused(capsys, ["capacity", str(tmp_path / "old.yaml")])
    assert text.endswith(
        "old.yaml holds no cost model, so nothing can be simulated from it; make it anew with autotune profile"
    )


def test_speeds_are_numbers_above_0() -> None:
    assert parse_speeds("compute=0.5, bandwidth=2,overhead=1e0") == {"compute": 0.5, "bandwidth": 2, "overhead": 1}
    for text in ("compute=inf", "compute=nan", "compute=x", "speed=1", ""):
        with pytest.raises(InputError):
            parse_speeds(text)
    assert math.isfinite(parse_speeds("compute=1e-9")["compute"])


def test_ceilings_are_raised_for_what_is_asked() -> None:
    assert scenario().room_for(Knobs(token_budget=1_000_000)).limits.token_budget == 1048576
    low = Scenario.of(profiled(engine={"limits": KnobLimits()}), workload=EVEN)
    assert low.room_for(Knobs(token_budget=10_000)).limits == KnobLimits(token_budget=10_000)
