"""The sweep's machines, the searches ours is compared with, and the truth they are judged by."""

from __future__ import annotations

import statistics
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks.sweep import hardware
from benchmarks.sweep.__main__ import Kept, ratio, summary
from benchmarks.sweep.cases import CASES, CPU_GRID, GPU_GRID, LIMITS, Case, Grid, Machine
from benchmarks.sweep.contest import CaseResult, Result, ours
from benchmarks.sweep.rivals import (
    RESTART_S,
    auto_tune,
    e2e_limit,
    exhaustive,
    lists_of,
    load_seed,
    mean_lengths,
    random_search,
    ranges_of,
    tpe,
)
from benchmarks.sweep.truth import Truth, distinct
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.step_model import StepFeatures

SMALL = Case(
    "small",
    "a few cores, short prompts",
    lambda seed: hardware.Cpu(),
    16_000,
    "poisson:prompt=48,output=16,length=1/2",
    "ttft=200ms,tpot=20ms",
    60.0,
    0.5,
    Grid((2, 16), (32, 256), (32,)),  # 6 cells
)


def decode(batch: int, context: int = 500) -> StepFeatures:
    return StepFeatures(batch, batch * context, 0, 0, 0, 0)


def prompt(tokens: int, decodes: int = 0) -> StepFeatures:
    return StepFeatures(decodes, decodes * 500, tokens, tokens, tokens * (tokens + 1) // 2, 1)


class TestMachines:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_a_step_takes_time_and_a_much_larger_one_more(self, case: Case) -> None:
        truth = case.truth(0)
        steps = [decode(1), decode(64), prompt(2048), prompt(8192, 64)]
        times = [statistics.median(truth.predict(step) for _ in range(5)) for step in steps]
        assert 0 < times[0] < times[1] < times[2] < times[3] < 10

    def test_a_tile_begun_is_paid_in_whole(self) -> None:
        truth = hardware.Tiled(hardware.LLAMA_8B_A100)
        assert (
            truth.predict(prompt(512))
            < truth.predict(prompt(513))
            == pytest.approx(truth.predict(prompt(640)), rel=0.02)
        )

    def test_a_decode_graph_is_padded(self) -> None:
        truth = hardware.Tiled(hardware.LLAMA_8B_A100._replace(kv_token=0, pair_flop=0, weights=0))
        assert truth.predict(decode(41)) == truth.predict(decode(48)) < truth.predict(decode(49))

    def test_few_tokens_read_few_experts_and_many_all(self) -> None:
        truth = hardware.Experts(hardware.MOE_30B_H200._replace(kv_token=0))
        one, some, many = (truth.predict(decode(n)) for n in (1, 64, 512))
        read = hardware.MOE_30B_H200.weights / hardware.MOE_30B_H200.bandwidth
        assert one < 0.5 * read
        assert read < some < many

    def test_one_step_in_four_hundred_stalls(self) -> None:
        truth = hardware.Stalling(hardware.LLAMA_8B_H200, seed=3)
        times = [truth.predict(decode(32)) for _ in range(20_000)]
        usual = statistics.median(times)
        stalled = [t for t in times if t > 2 * usual]
        assert 30 <= len(stalled) <= 75
        assert min(stalled) == pytest.approx(10 * usual)
        again = hardware.Stalling(hardware.LLAMA_8B_H200, seed=3)
        assert [again.predict(decode(32)) for _ in range(1000)] == times[:1000]

    def test_a_large_message_takes_another_protocol(self) -> None:
        truth = hardware.TensorParallel(hardware.LLAMA_70B_4H100)
        fits = int(truth.switch / (2 * truth.width))
        jump = truth.predict(prompt(fits + 1)) - truth.predict(prompt(fits))
        assert jump > 10 * (truth.predict(prompt(fits)) - truth.predict(prompt(fits - 1)))

    def test_context_past_the_cache_is_read_slower(self) -> None:
        truth = hardware.Cpu()
        inside = truth.predict(decode(1, 8000)) - truth.predict(decode(1, 7000))
        outside = truth.predict(decode(1, 12000)) - truth.predict(decode(1, 11000))
        assert outside == pytest.approx(truth.spill * inside)


class TestCases:
    @pytest.mark.parametrize("grid", [GPU_GRID, CPU_GRID])
    def test_grids_hold_98_settings_within_the_limits(self, grid: Grid) -> None:
        cells = grid.cells()
        assert len(set(cells)) == len(cells) == 98
        assert all(LIMITS.clamp(knobs) == knobs and knobs.chunk_size <= knobs.token_budget for knobs in cells)

    def test_eight_cases_on_machines_of_eight_kinds(self) -> None:
        assert len({case.name for case in CASES}) == len({type(case.truth(0)) for case in CASES}) == 8

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_loads_keep_their_own_lengths(self, case: Case) -> None:
        load = case.load()
        assert load.length_scale != 1  # or a calibration would choose one
        assert load.rate == pytest.approx(case.rate)
        prompt_tokens, output_tokens = mean_lengths(case)
        assert 16 < output_tokens < prompt_tokens < 8000

    def test_a_machine_repeats_itself_and_counts_its_time(self) -> None:
        knobs = Knobs(16, 0, 256, 256)
        first, again, other = (Machine(SMALL, seed) for seed in (1, 1, 2))
        assert first.measure(knobs, 7) == again.measure(knobs, 7) != other.measure(knobs, 7)
        assert first.spent_s == again.spent_s >= SMALL.window_s + SMALL.warmup_s - 1
        before = first.spent_s
        first.rest(70)
        assert first.spent_s == before + 70


@pytest.mark.slow
class TestRivals:
    def test_the_grid_is_measured_as_often_as_asked(self) -> None:
        rounds = exhaustive(Machine(SMALL, 1), 2, 1)
        assert [choice.runs for choice, _ in rounds] == [6, 12]
        assert rounds[1][0].spent_s == pytest.approx(2 * rounds[0][0].spent_s, rel=0.1)
        choice, means = rounds[1]
        assert set(means) == set(SMALL.grid.cells())
        assert means[choice.knobs or Knobs()] == max(means.values())

    @pytest.mark.parametrize("search", [random_search, tpe])
    def test_a_search_takes_the_best_it_measured_and_keeps_to_its_time(self, search: object) -> None:
        machine = Machine(SMALL, 1)
        measured: dict[Knobs, float] = {}
        measure = machine.measure

        def watched(knobs: Knobs, seed: int) -> object:
            assert seed == load_seed(1)  # all meet the same requests
            score = measure(knobs, seed)
            measured[knobs] = score.goodput
            return score

        machine.measure = watched  # type: ignore[method-assign, assignment]
        choice = search(machine, 60.0, 1)  # type: ignore[operator]
        assert 5 <= choice.runs <= 8
        assert machine.spent_s == choice.spent_s <= 60 + 0.5 * machine.spent_s / choice.runs
        assert measured[choice.knobs] == max(measured.values())
        lowest, highest = ranges_of(SMALL)["token_budget"]
        assert all(lowest <= knobs.token_budget <= highest for knobs in measured)

    def test_tpe_begins_with_the_defaults(self) -> None:
        assert tpe(Machine(SMALL, 1), 1.0, 1).knobs == Knobs(16, 0, 256, 256)  # moved into the grid's ranges

    def test_auto_tune_finds_a_rate_for_each_pair(self) -> None:
        machine = Machine(SMALL, 1)
        choice = auto_tune(machine, inf, 1)
        batches, budgets = lists_of(SMALL)
        assert choice.measured == len(batches) * len(budgets) == 8
        assert choice.runs > 2 * choice.measured  # a flood, then rates
        assert choice.knobs is not None and choice.knobs.chunk_size == choice.knobs.token_budget
        assert machine.spent_s > 8 * RESTART_S
        assert auto_tune(Machine(SMALL, 1), inf, 1, restart_s=0).spent_s < machine.spent_s - 8 * RESTART_S

    def test_auto_tune_out_of_time_takes_what_it_has(self) -> None:
        assert auto_tune(Machine(SMALL, 1), RESTART_S, 1).knobs is None
        choice = auto_tune(Machine(SMALL, 1), 3 * RESTART_S, 1)
        assert choice.knobs is not None
        assert choice.measured < 4

    def test_auto_tune_finds_nothing_where_the_limit_cannot_be_met(self) -> None:
        hopeless = replace(SMALL, slo_text="ttft=1ms,tpot=0.1ms")
        assert auto_tune(Machine(hopeless, 1), 300.0, 1, restart_s=0).knobs is None

    def test_the_limit_is_what_the_targets_allow(self) -> None:
        assert e2e_limit(SLO(ttft_ms=500, tpot_ms=30), 101) == pytest.approx(3.5)


@pytest.mark.slow
def test_ours_is_a_whole_profiling_run_whose_time_is_the_machines() -> None:
    machine = Machine(SMALL, 1)
    choice = ours(machine, 1, measured=2, sim_trials=8)
    assert choice.spent_s == machine.spent_s > choice.runs * (SMALL.window_s + SMALL.warmup_s)  # and a calibration
    assert choice.runs >= 3 and choice.knobs is not None
    truth = Truth(SMALL, 1)
    assert truth.share(choice.knobs) > 0.9 * max(truth.share(knobs) for knobs in SMALL.grid.cells())


@pytest.mark.slow
class TestTruth:
    def test_the_best_may_be_one_nobody_has_in_a_grid(self) -> None:
        truth = Truth(SMALL, 1)
        cells = {knobs: truth.share(knobs) for knobs in SMALL.grid.cells()}
        tight = [Knobs(2, 0, 32, 32)]
        best, share = truth.best({tight[0]: cells[tight[0]]}, [Knobs(32, 0, 300, 300)])
        assert best == Knobs(32, 0, 300, 300)
        assert share > cells[tight[0]]

    def test_a_setting_is_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        truth = Truth(SMALL, 2)
        share = truth.share(Knobs(16, 0, 256, 256))
        monkeypatch.setattr(Machine, "measure", None)
        assert truth.share(Knobs(16, 0, 256, 256)) == share

    def test_cells_that_behave_alike_count_once(self) -> None:
        a, b, c = (Knobs(max_batch_size=n) for n in (64, 128, 256))
        assert sorted(distinct({a: 0.5, b: 0.7, c: 0.7}), key=lambda k: k.max_batch_size) in ([a, b], [a, c])


def test_the_summary_is_of_ours_against_the_same_seed() -> None:
    def result(contender: str, seed: int, regret: float) -> Result:
        return Result(contender, seed, "", regret, 0.05, 5)

    names = ("ours", "random", "tpe", "auto_tune", "auto_tune, no restarts")
    results = [result(name, seed, 0.1 * place) for place, name in enumerate(names) for seed in (1, 2)]
    worse = [result(name, seed, 0.1 * place + 0.2) for place, name in enumerate(names) for seed in (1, 2)]
    cases = [CaseResult("easy", "", 0.9, 1000, 1, results), CaseResult("hard", "", 0.9, 1000, 1, worse)]
    assert ratio(cases, "random") == pytest.approx((1 / 0.9 * 0.8 / 0.7) ** 0.5)
    found = summary(cases)
    assert found["regret"] == pytest.approx(0.1)
    assert found["hardware_share"] == 0.05
    assert found["worst_case"] == "hard"
    assert {"vs_random", "vs_tpe", "vs_auto_tune"} <= set(found)


class TestKept:
    def test_what_is_done_is_known_again_to_who_asks_the_same(self, tmp_path: Path) -> None:
        file, asked = tmp_path / "kept.jsonl", {"seeds": (101, 102), "rounds": 3}
        case = CaseResult("a", "best", 0.9, 3600.0, 12.0, [Result("ours", 101, "knobs", 0.01, 0.05, 7)])
        kept = Kept(file, asked)
        assert kept.known() == {}
        kept.add(case)
        file.write_text(file.read_text() + '{"asked": {"see')  # killed while it wrote
        kept.add(replace(case, case="b"))
        assert Kept(file, asked).known() == {"a": case, "b": replace(case, case="b")}
        assert Kept(file, {**asked, "rounds": 2}).known() == {}
        assert Kept(None, asked).known() == {}
