"""The sweep's machines, the searches ours is compared with, and the truth they are judged by."""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path

import pytest

from benchmarks.controller.cache import FOLDER
from benchmarks.gpu_truth import Truth as Measured
from benchmarks.gpu_truth.engine import ChunkExecutor
from benchmarks.kept import DATA, ROOT, SOURCE, Kept, code_digest
from benchmarks.sweep import __main__ as command
from benchmarks.sweep import hardware
from benchmarks.sweep.__main__ import RIVALS, ratio, report, summary
from benchmarks.sweep.cases import CASES, CPU_GRID, GPU_GRID, LIMITS, Case, Grid, Machine
from benchmarks.sweep.contest import CaseResult, Result, ours
from benchmarks.sweep.rivals import (
    RESTART_S,
    Choice,
    auto_tune,
    e2e_limit,
    exhaustive,
    expert,
    halving,
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

    def test_twelve_cases_eight_on_formulas_and_four_on_measured_gpus(self) -> None:
        truths = [case.truth(0) for case in CASES]
        measured = [truth for truth in truths if isinstance(truth, Measured)]
        assert len({case.name for case in CASES}) == 12
        assert len({type(truth) for truth in truths if not isinstance(truth, Measured)}) == 8
        assert len({truth.meta["gpu"] for truth in measured}) == 4
        assert all(truth.flags.host_s == 1e-3 for truth in measured)

    def test_a_measured_gpu_is_asked_by_its_chunks_and_has_the_pool_of_its_tables(self) -> None:
        for case in CASES:
            truth, machine = case.truth(0), Machine(case, 1)
            assert isinstance(machine.engine.core.executor, ChunkExecutor) is isinstance(truth, Measured)
            assert machine.engine.limits == LIMITS and machine.engine.facts.kv_tokens == case.kv_tokens
            if isinstance(truth, Measured):
                assert case.kv_tokens == truth.kv_tokens // 16 * 16

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_loads_keep_their_own_lengths(self, case: Case) -> None:
        load = case.load()
        assert load.length_scale != 1  # or a calibration would choose one
        assert load.rate == pytest.approx(case.rate)
        prompt_tokens, output_tokens = mean_lengths(case)
        assert 16 < output_tokens < prompt_tokens < 8000

    def test_a_machine_that_drifts_has_another_speed_from_time_to_time_and_the_same_under_the_same_seed(self) -> None:
        """One of formulas, and one that is asked by the chunks of its steps."""
        for case in (SMALL, next(case for case in CASES if case.name == "a100-code")):
            even = Machine(case, 1).measure(Knobs(16, 0, 256, 256), 7).steps.mean_ms
            drifting = [Machine(replace(case, drift=0.3), seed) for seed in (1, 1, 2)]
            first, again, other = (
                [machine.measure(Knobs(16, 0, 256, 256), 7).steps.mean_ms for _ in range(3)] for machine in drifting
            )
            assert first == again and max(first) > 1.1 * min(first)
            assert other[0] != first[0] and not any(each == pytest.approx(even, rel=1e-3) for each in first)

    def test_every_kind_of_step_drifts_however_a_machine_is_asked_for_it(self) -> None:
        """Also runs of decodes, which an engine asks for at once where it can."""
        for case in (SMALL, next(case for case in CASES if case.name == "a100-code")):
            truth = case.truth(0)
            drifting = hardware.Drifting(truth, 0.3, 10.0, 1)
            steps = [StepFeatures(4, 400 + 4 * i, 0, 0, 0) for i in range(3)]
            factor = drifting.predict(steps[0]) / truth.predict(steps[0])
            assert factor != pytest.approx(1.0, abs=1e-3)
            assert drifting.predict_run(4, 400, 3) == pytest.approx([factor * truth.predict(step) for step in steps])
            if isinstance(truth, Measured):
                chunks = [(0, 256)]
                assert drifting.step_seconds(4, 400, chunks) == pytest.approx(
                    factor * truth.step_seconds(4, 400, chunks)
                )

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

    def test_halving_measures_the_best_of_short_windows_in_longer_ones(self) -> None:
        machine = Machine(SMALL, 1)
        measured: dict[float, dict[Knobs, float]] = {}
        measure = machine.measure

        def watched(knobs: Knobs, seed: int, *, part: float = 1.0) -> object:
            assert seed == load_seed(1)
            score = measure(knobs, seed, part=part)
            measured.setdefault(part, {})[knobs] = score.goodput
            return score

        machine.measure = watched  # type: ignore[method-assign, assignment]
        choice = halving(machine, 60.0, 1, window_s=SMALL.window_s, warmup_s=SMALL.warmup_s)
        assert list(measured) == [1 / 9, 1 / 3, 1.0]
        few, fewer, fewest = ({*found} for found in measured.values())
        assert 9 <= len(few) <= 27 and len(fewer) == -(-len(few) // 3) and len(fewest) == -(-len(fewer) // 3)
        by_goodput = sorted(
            measured[1 / 9], key=lambda knobs: measured[1 / 9][knobs], reverse=True
        )  # ties: the earlier
        assert fewer == {*by_goodput[: len(fewer)]} and fewest < fewer
        assert measured[1.0][choice.knobs or Knobs()] == max(measured[1.0].values())
        assert Knobs(16, 0, 256, 256) in few  # vLLM's defaults, moved into the grid's ranges
        assert choice.measured == len(few) and choice.runs == len(few) + len(fewer) + len(fewest)
        assert machine.spent_s == choice.spent_s <= 60 + SMALL.window_s

    def test_halving_out_of_time_takes_what_it_has(self) -> None:
        choice = halving(Machine(SMALL, 1), 1.0, 1, window_s=SMALL.window_s, warmup_s=SMALL.warmup_s)
        assert choice == Choice(Knobs(16, 0, 256, 256), choice.spent_s, 1, 1)

    def test_the_expert_measures_what_the_guide_says(self) -> None:
        machine = Machine(SMALL, 1)
        prompt, output = mean_lengths(SMALL)
        choice = expert(machine, 1000.0, 1, kv_tokens=5 * (prompt + output))
        assert choice.runs == choice.measured == 2 and choice.spent_s == machine.spent_s
        goodput = {
            budget: Machine(SMALL, 1).measure(Knobs(5, 0, budget, budget), load_seed(1)).goodput for budget in (64, 256)
        }  # 2,048 and 8,192 for a grid that ends at 256
        best = choice.knobs or Knobs()
        assert best.max_batch_size == 5 and best.chunk_size == best.token_budget == max(
            goodput, key=lambda b: goodput[b]
        )
        assert expert(Machine(SMALL, 1), 1.0, 1, kv_tokens=16_000).runs == 1

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


def result(contender: str, seed: int, regret: float) -> Result:
    return Result(contender, seed, "", regret, 0.05 * seed, 5)


def test_the_summary_leads_with_regret_and_ratios_are_of_means(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ours", *RIVALS.values())
    results = [result(name, seed, 0.1 * place) for place, name in enumerate(names) for seed in (1, 2)]
    worse = [result(name, seed, 0.1 * place + 0.1 * seed) for place, name in enumerate(names) for seed in (1, 2)]
    cases = [CaseResult("easy", "", 0.9, 1000, 1, results), CaseResult("hard", "", 0.9, 1000, 1, worse)]
    assert ratio(cases, "random") == pytest.approx((1 + 1 + 0.9 + 0.8) / (0.9 + 0.9 + 0.8 + 0.7))
    found = summary(cases)
    assert list(found)[:4] == ["regret", "regret_max", "hardware_share", "hardware_share_max"]
    assert found["regret"] == pytest.approx(0.075) and found["regret_max"] == pytest.approx(0.2)
    assert (found["hardware_share"], found["hardware_share_max"]) == (0.075, 0.1)
    assert found["worst_case"] == "hard"
    assert {"vs_random", "vs_tpe", "vs_tpe_10_startup", "vs_halving", "vs_expert", "vs_auto_tune"} <= set(found)
    report(cases)
    first, _, heading = capsys.readouterr().out.splitlines()[1:4]
    assert first.startswith("regret 7.5% on average, at most 20.0% (hard, seed 2); time 0.075 of one round of the grid")
    assert heading == "all 2 cases"


def test_a_rival_that_serves_nothing_in_a_case_makes_no_ratio_explode() -> None:
    half = [CaseResult("a", "", 1, 1, 1, [result("ours", 1, 0.0), result("auto_tune", 1, 0.0)])]
    nothing = [CaseResult("b", "", 1, 1, 1, [result("ours", 1, 0.0), result("auto_tune", 1, 1.0)])]
    assert ratio(half + nothing, "auto_tune") == 2.0
    assert ratio(nothing, "auto_tune") is None


def _one_fails(name: str, *, how: str, left: str, **_: object) -> CaseResult:
    """In the place of :func:`play`: the first case ends it all, the others leave a file when they are done."""
    if name == CASES[0].name:
        time.sleep(0.3)  # the others are waiting by then
        if how == "raises":
            raise ArithmeticError(name)
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1.5)
    Path(left, name).touch()
    return CaseResult(name, "", 1, 1, 1, [result("ours", 1, 0.0)])


class TestEnds:
    @pytest.fixture(params=["raises", "ctrl-c"])
    def ended(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(command, "play", partial(_one_fails, how=request.param, left=str(tmp_path)))
        return str(request.param)

    @pytest.mark.parametrize("jobs", ["1", "2"])
    def test_nothing_goes_on_after_a_failure_or_ctrl_c(self, ended: str, jobs: str, tmp_path: Path) -> None:
        arguments = ["--jobs", jobs, "--cases", *(case.name for case in CASES[:4])]
        if ended == "raises":
            with pytest.raises(ArithmeticError, match=CASES[0].name):
                command.main(arguments)
        else:
            assert command.main(arguments) == 130
        time.sleep(2)
        assert [*tmp_path.iterdir()] == []


class TestKept:
    def test_what_is_done_is_known_again_to_who_asks_the_same(self, tmp_path: Path) -> None:
        file, requested = tmp_path / "kept.jsonl", {"seeds": (101, 102), "rounds": 3}
        case = CaseResult("a", "best", 0.9, 3600.0, 12.0, [Result("ours", 101, "knobs", 0.01, 0.05, 7)])
        kept = Kept(file, requested)
        assert kept.known() == []
        kept.add(asdict(case))
        file.write_text(file.read_text() + '{"requested": {"see')  # killed while it wrote
        kept.add(asdict(replace(case, case="b")))
        assert [*map(CaseResult.of_json, Kept(file, requested).known())] == [case, replace(case, case="b")]
        assert Kept(file, {**requested, "rounds": 2}).known() == []
        assert Kept(None, requested).known() == []
        assert len(file.read_text().splitlines()) == 3

    def test_what_other_code_made_stays_and_is_told_and_not_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, part = tmp_path / "kept.jsonl", {"n": 1}
        Kept(file, {"seeds": (1,)}).add(part)
        before_code_was_part_of_the_key = '{"requested": {"seeds": [1]}, "n": 0}\n'
        made = file.read_text() + before_code_was_part_of_the_key
        file.write_text(made)
        said = "of the parts there are of other code; they stay, and are not counted\n"
        assert Kept(file, {"seeds": (1,)}).known() == [part]
        assert capsys.readouterr().err == f"{file}: 1 {said}"
        monkeypatch.setattr("benchmarks.kept.code_digest", lambda: "later")
        assert Kept(file, {"seeds": (1,)}).known() == [] and Kept(file, {"seeds": (2,)}).known() == []
        assert capsys.readouterr().err == f"{file}: 2 {said}"
        assert file.read_text() == made

    @pytest.mark.parametrize(
        "name",
        [
            "autotune/control/x.py",
            "runtime/torch_backend/cpu/kernels.c",
            "benchmarks/kept.py",
            "autotune/workload/azure2023.json",
            "benchmarks/gpu_truth/tables/a.npz",
            "benchmarks/data/controller_rivals.json",
            "profiles/tiny.yaml",
            "trace.csv",
        ],
    )
    def test_code_is_another_if_a_file_that_results_depend_on_is(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("benchmarks.kept.ROOT", tmp_path)
        for other in (
            "autotune/a.py",
            "runtime/b.py",
            "benchmarks/c.py",
            "benchmarks/data/controller_traces.json",
            name,
        ):
            (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / other).write_text(other)
        more = [tmp_path / name] if name.endswith(".csv") else []
        first = code_digest(*more)
        (tmp_path / "benchmarks" / "data" / "controller_traces.json").write_text("what a benchmark found")
        assert code_digest(*more) == first
        (tmp_path / name).write_text("changed")
        assert (changed := code_digest(*more)) != first
        (tmp_path / name).rename(tmp_path / name.replace(".", "2."))
        if not more:
            assert code_digest() not in (first, changed), "or has another name"

    def test_every_file_of_data_is_part_of_the_code_or_found_by_a_benchmark(self) -> None:
        folders, kinds = ("autotune", "runtime", "benchmarks"), {".json", ".npz", ".yaml", ".csv", ".c", ".cu"}
        there = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds}
        counted = {path for pattern in (*SOURCE, *DATA) for path in ROOT.glob(pattern)}
        found = {FOLDER / f"{name}.json" for name in ("controller_traces", "controller_presets", "when_tuning_pays")}
        assert there - found <= counted
