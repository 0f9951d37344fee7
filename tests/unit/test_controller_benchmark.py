"""The controllers' benchmark: machines, requests, how a run is judged."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.control.controllers.predictive.start_comparison import StartComparison
from benchmarks.controller.contenders import CONTENDERS, KnobsOnly
from benchmarks.controller.hardware import H200, MOE, STALL, Weather, h200, roofline
from benchmarks.controller.loads import POISSON, Part, Pattern, arrivals
from benchmarks.controller.run import BIN_S, Bench, Driver, run
from benchmarks.controller.scenarios import (
    COLD,
    GRID,
    HARDWARE,
    LOADS,
    MATRIX,
    MEASURED,
    SCENARIOS,
    SMALL_GRID,
    Phase,
    Scenario,
    one,
)
from benchmarks.gpu_truth import load, names
from benchmarks.sweep import hardware as parts
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.llm.plan import Chunk
from runtime.step_model import StepFeatures
from tests.tiers import slow_but_for

STEP = StepFeatures(40, 60_000, 700, 900, 500_000, 2)
RATES = Bench({**{str(load): 12.0 for load in LOADS}, "H200 conv-mlperf": 12.0})
SHORT = replace(SCENARIOS["M4"], phases=tuple(replace(phase, seconds=10.0) for phase in SCENARIOS["M4"].phases))


def bytes_and_flops(part: parts.Roofline, weights: float) -> tuple[float, float]:
    memory = weights + part.kv_token * (60_000 + 900)
    return memory / part.bandwidth, (part.flop_token * 740 + part.pair_flop * 560_000) / part.peak


class TestHardware:
    def test_a_step_takes_the_longer_of_memory_and_compute_or_both(self) -> None:
        part = parts.LLAMA_8B_H200
        memory, compute = bytes_and_flops(part, part.weights)
        assert h200().predict(STEP) == pytest.approx(part.overhead + max(memory, compute))
        both = roofline(part, overlapped=False)
        assert both.predict(STEP) == pytest.approx(part.overhead + memory + compute)

    def test_experts_are_read_as_far_as_tokens_hit_them(self) -> None:
        part = parts.MOE_30B_H200
        for tokens in (1, 8, 300):
            weights = 3e9 + 57e9 * (1 - (1 - 8 / 128) ** tokens)
            step = StepFeatures(tokens, 0, 0, 0, 0)
            assert MOE.cost().predict(step) == pytest.approx(part.overhead + weights / part.bandwidth, rel=1e-6)

    def test_a_slow_phase_slows_single_steps_and_runs_alike(self) -> None:
        weather = Weather(h200())
        usual = weather.predict_run(8, 1000, 5)
        weather.slow = 1.8
        assert weather.predict(STEP) == pytest.approx(1.8 * h200().predict(STEP))
        assert weather.predict_run(8, 1000, 5) == pytest.approx([1.8 * one for one in usual])

    def test_one_step_in_a_hundred_stalls(self) -> None:
        weather = Weather(h200(), stalls=0.01, seed=1)
        usual = h200().predict(STEP)
        seen = Counter(round(weather.predict(STEP) / usual) for _ in range(20_000))
        assert set(seen) == {1, round(STALL)}
        assert 120 < seen[round(STALL)] < 280

    def test_a_cost_model_without_runs_is_asked_step_by_step(self) -> None:
        tiled = parts.Tiled(parts.LLAMA_8B_A100)
        each = [tiled.predict(StepFeatures(8, 1000 + 8 * i, 0, 0, 0)) for i in range(4)]
        assert Weather(tiled).predict_run(8, 1000, 4) == each


class TestLoads:
    def test_classes_come_in_their_shares_at_the_rate_asked_for(self) -> None:
        mix = Part("conv", "inter", 0.85), Part("moon", "long", 0.15, "long")
        offered = list(arrivals(mix, POISSON, 10.0, 400.0, (1,), kv_tokens=760_000, traces=None))
        kinds = Counter(a.request_class for a in offered)
        assert [a.time for a in offered] == sorted(a.time for a in offered)
        assert len(offered) == pytest.approx(4000, rel=0.06)
        assert kinds["long"] / len(offered) == pytest.approx(0.15, abs=0.02)
        long = [a.prompt_tokens for a in offered if a.request_class == "long"]
        assert max(long) <= 32_768
        assert sum(long) / len(long) > 8000

    @pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
    def test_every_request_fits_the_pool(self, hardware: object) -> None:
        for name, scenario in SCENARIOS.items():
            if scenario.hardware is hardware:
                for phase in scenario.phases:
                    kv = scenario.hardware.kv_tokens
                    offered = arrivals(phase.parts, POISSON, 20.0, 60.0, (3,), kv_tokens=kv, traces=None)
                    assert max(a.prompt_tokens + a.output_tokens for a in offered) <= kv, name

    def test_a_trace_is_replayed_at_its_scaled_pace_and_its_pairs_drawn(self, tmp_path: Path) -> None:
        rows = "".join(f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,{100 + i},{i + 1}\n" for i in range(600))
        for kind in ("conv", "code"):
            header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            (tmp_path / f"AzureLLMInferenceTrace_{kind}.csv").write_text(header + rows)
        folder = str(tmp_path)
        replayed = list(
            arrivals(one("conv", "inter"), Pattern("trace"), 4.0, 50.0, (5,), kv_tokens=9000, traces=folder)
        )
        assert len(replayed) == pytest.approx(200, abs=2)
        gaps = {round(b.time - a.time, 2) for a, b in pairwise(replayed)}
        assert gaps == {0.25}
        assert {a.prompt_tokens - a.output_tokens for a in replayed} == {99}
        drawn = list(arrivals(one("code", "inter"), POISSON, 4.0, 50.0, (5,), kv_tokens=9000, traces=folder))
        assert {a.prompt_tokens - a.output_tokens for a in drawn} == {99}

    def test_seeds_differ_and_repeat(self) -> None:
        first, again, other = (
            list(arrivals(one("code", "inter"), POISSON, 5.0, 20.0, (s,), kv_tokens=760_000, traces=None))
            for s in (1, 1, 2)
        )
        assert first == again != other


class TestMeasured:
    def test_every_gpu_and_model_takes_part_and_half_have_graphs(self) -> None:
        made = [scenario.hardware.name for scenario in MEASURED]
        assert sorted(name.removesuffix("+graphs") for name in made) == names()
        assert sum(name.endswith("+graphs") for name in made) == len(made) / 2

    def test_a_step_is_asked_for_by_its_chunks_and_slows_with_the_machine(self) -> None:
        truth = load("h100-llama3-8b")
        chunks = [(0, 900), (6000, 50)]
        assert truth.step_seconds(8, 9000, chunks) != pytest.approx(
            truth.predict(StepFeatures(8, 9000, 950, 6950, 0, 2)), rel=0.01
        )
        weather = Weather(truth)
        executor = weather.executor(noise=0.0, seed=1)
        planned = [Chunk(cast(Any, None), start, count, False) for start, count in chunks]
        plan: Any = SimpleNamespace(n_decode=8, decode_context=9000, chunks=planned, drafts=(), repeat=1)
        for slow in (1.0, 1.5):
            weather.slow = slow
            (end,) = executor.execute(plan, 10.0, 10.0).ends
            assert end - 10.0 == pytest.approx(slow * truth.step_seconds(8, 9000, chunks))

    def test_a_lone_request_meets_the_slo_of_every_phase(self) -> None:
        for scenario in MEASURED:
            for phase in scenario.phases:
                for part in phase.parts:
                    weather = Weather(scenario.hardware.cost())
                    weather.slow = phase.slow
                    first = 1e3 * weather.step_seconds(0, 0, [(0, 1000)])
                    token = 1e3 * weather.predict(StepFeatures(1, 1500, 0, 0, 0))
                    assert first < (part.slo.ttft_ms or math.inf), scenario.name
                    assert token < (part.slo.tpot_ms or math.inf), scenario.name


class TestScenarios:
    def test_the_matrix_is_the_studys(self) -> None:
        assert [scenario.name for scenario in MATRIX] == [f"M{i}" for i in range(1, 15)]
        assert {s.name: [p.seconds for p in s.phases] for s in MATRIX}["M8"] == [80, 80, 150]
        assert [p.slow for p in SCENARIOS["M5"].phases] == [1.0, 1.8, 1.0]

    def test_grids_hold_every_pair_and_no_chunk_beyond_the_budget(self) -> None:
        cells = GRID.cells()
        assert len({(k.max_batch_size, k.token_budget) for k in cells}) == 36
        assert all(k.chunk_size <= k.token_budget for k in cells)
        assert {k.max_batch_size for k in SMALL_GRID.cells()} - {k.max_batch_size for k in cells} == {8}


class TestRun:
    def test_everything_offered_is_judged_in_its_phase_and_bin(self) -> None:
        outcome = run(SHORT, Driver((Knobs(64, 0, 512, 512),)), 3, RATES)
        rates = [12.0 * load for load in (0.5, 1.2, 0.7)]
        for (offered, met), rate in zip(outcome.phases, rates, strict=True):
            assert 0 < met <= offered
            assert offered == pytest.approx(10 * rate, rel=0.4)
        assert len(outcome.bins) == 30 / BIN_S
        assert sum(o for o, _ in outcome.bins) == outcome.offered
        assert outcome.first(10.0) == outcome.phases[0]

    def test_equal_seeds_offer_equal_requests_whatever_the_knobs(self) -> None:
        loose, tight = (run(SHORT, Driver((knobs,)), 3, RATES) for knobs in (COLD, Knobs(2, 0, 256, 256)))
        assert [o for o, _ in loose.bins] == [o for o, _ in tight.bins]
        assert tight.met < loose.met
        assert run(SHORT, Driver((COLD,)), 3, RATES) == loose

    def test_who_has_waited_its_ttft_leaves_the_queue(self) -> None:
        # one sequence at a time at ten times what that can do: without a timeout all but the first few would be late
        flooded = replace(SHORT, phases=(Phase(40.0, one("conv", "inter"), 1.0),))
        outcome = run(flooded, Driver((Knobs(1, 0, 8192, 8192),)), 1, RATES)
        late = outcome.bins[4:]
        served = sum(met for _, met in late)
        assert 0.02 < served / sum(offered for offered, _ in late) < 0.5

    def test_a_schedule_holds_each_setting_for_its_phase(self) -> None:
        choked, open_ = Knobs(1, 0, 64, 64), Knobs(256, 0, 2048, 2048)
        first = run(SHORT, Driver((open_, choked, open_)), 2, RATES)
        throughout = run(SHORT, Driver((open_,)), 2, RATES)
        assert first.phases[0] == throughout.phases[0]
        assert first.phases[1][1] < throughout.phases[1][1] / 2
        assert first.phases[2][1] > 0

    def test_a_slow_phase_is_felt_while_it_lasts(self) -> None:
        phases = tuple(Phase(20.0, one("conv", "inter"), 1.0, slow) for slow in (1.0, 4.0, 1.0))
        outcome = run(replace(SHORT, phases=phases), Driver((Knobs(64, 0, 512, 512),)), 1, RATES)
        shares = [met / offered for offered, met in outcome.phases]
        assert shares[0] > 0.95
        assert shares[1] < 0.5 < shares[2]

    def test_a_new_slo_holds_for_who_comes_under_it(self) -> None:
        phases = (Phase(20.0, one("conv", "mlperf"), 1.6), Phase(20.0, one("conv", "strict"), 1.6))
        outcome = run(replace(SHORT, phases=phases), Driver((Knobs(512, 0, 8192, 8192),)), 1, RATES)
        (kept, lost) = (met / offered for offered, met in outcome.phases)
        assert kept > 0.97 > 0.9 > lost

    def test_noise_and_stalls_change_what_happens_and_not_what_is_offered(self) -> None:
        calm, noisy, stalling = (
            run(replace(SHORT, noise=noise, stalls=stalls), Driver((Knobs(512, 0, 2048, 2048),)), 1, RATES)
            for noise, stalls in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.01))
        )
        assert calm.offered == noisy.offered == stalling.offered
        assert len({calm.bins, noisy.bins, stalling.bins}) == 3
        assert stalling.met < calm.met


CONTENDERS_HERE = ("vllm-1024-full", "aimd-order", "bisection-knobs", "gradient", "niyama-relegate", "predictive")
"""Of the contenders one for each kind, in the default tier."""


class TestContenders:
    @pytest.mark.parametrize(
        "name", slow_but_for(CONTENDERS_HERE, (name for name in CONTENDERS if not name.startswith("static")))
    )
    def test_each_serves_a_short_scenario_from_cold(self, name: str) -> None:
        outcome = run(SHORT, CONTENDERS[name].driver(()), 1, RATES)
        assert outcome.offered > 200
        assert outcome.met > 0.2 * outcome.offered

    def test_knobs_only_turns_knobs_and_gives_no_step_a_budget(self) -> None:
        below: list[bool] = []

        class Spy:
            def __init__(self, engine: object) -> None:
                self.engine = engine

            def on_step(self, record: object) -> None:
                below.append(record.budget_used < self.engine.knobs.token_budget)  # type: ignore[attr-defined]

            def on_request(self, record: object) -> None:
                pass

        def share_below_the_knob(name: str) -> float:
            below.clear()
            driver = CONTENDERS[name].driver(())

            def attach(engine: object, slo: object) -> object:
                engine.subscribe(Spy(engine))  # type: ignore[attr-defined]
                return driver.attach(engine, slo)  # type: ignore[arg-type]

            run(SHORT, driver._replace(attach=attach), 1, RATES)
            return sum(below) / len(below)

        assert share_below_the_knob("predictive-knobs") < 0.01 < 0.05 < share_below_the_knob("predictive")

    def test_knobs_only_passes_on_what_it_does_not_change(self) -> None:
        class Inner:
            name = "inner"

        assert KnobsOnly(Inner()).name == "inner"  # type: ignore[arg-type]

    def test_a_controller_that_fails_on_the_way_has_no_figure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(StartComparison, "decided", lambda self, now, at_start: {}["decided"])
        with pytest.raises(InputError, match=r"the predictive controller failed: KeyError: 'decided'"):
            run(SHORT, CONTENDERS["predictive-knobs"].driver(()), 1, RATES)


def test_a_scenario_of_ones_own_needs_no_name_in_the_list() -> None:
    own = Scenario("own", "", H200, (Phase(10.0, one("brief", "inter"), 0.5),))
    outcome = run(own, Driver((COLD,)), 1, Bench({"H200 brief-inter": 40.0}))
    assert outcome.offered == pytest.approx(200, rel=0.3)
    assert not math.isnan(outcome.met)
