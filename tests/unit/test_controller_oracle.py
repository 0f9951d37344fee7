"""The oracle of the controllers' benchmark: what it finds, what it keeps, and what is said of contenders beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from benchmarks.controller import __main__ as command
from benchmarks.controller import known, scenarios, work
from benchmarks.controller.cache import (
    FOLDER,
    Cache,
    from_entry,
    load_digest,
    outcome_of,
    scenario_digest,
    to_entry,
)
from benchmarks.controller.contenders import STATIC, STATIC_FULL, STATIC_ORDER
from benchmarks.controller.hardware import H200, H200_ADD
from benchmarks.controller.known import (
    REPORTED,
    SEEN,
    TUNED,
    Oracles,
    OracleStore,
    oracle_digest,
    peak_digest,
    seed_set,
)
from benchmarks.controller.loads import POISSON
from benchmarks.controller.oracle import Best, OracleSearch
from benchmarks.controller.peaks import PeakSearch
from benchmarks.controller.run import Bench, Outcome
from benchmarks.controller.scenarios import COLD, LOADS, SCENARIOS, VARIANTS, Load, Phase, Scenario, one
from benchmarks.controller.table import Comparison
from benchmarks.controller.work import Task, Workers, by_slots, roomy
from benchmarks.kept import Kept
from benchmarks.sweep.cases import Grid
from runtime.errors import InputError
from runtime.knobs import Knobs

TINY = Scenario(
    "tiny",
    "two phases, one of them strict",
    H200,
    (Phase(10.0, one("conv", "inter"), 0.9), Phase(10.0, one("conv", "strict"), 1.0)),
    grid=Grid((16, 128), (512, 8192), ()),
)
BENCH = Bench({"H200 conv-inter": 22.0, "H200 conv-strict": 18.0})


class Hill:
    """In place of workers: a run meets as many requests as its setting is near to a peak; runs are counted."""

    def __init__(self, peak: Knobs) -> None:
        self.peak, self.ran = peak, list[Task]()

    def runs(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            self.ran.append(task)
            (knobs,) = task.schedule
            off = sum(
                abs(math.log(getattr(knobs, name) / getattr(self.peak, name)))
                for name in ("max_batch_size", "token_budget")
            )
            met = round(10_000 - 1000 * off)
            yield task, Outcome(((10_000, met),), ((10_000, met),))


def test_a_local_search_finds_what_lies_between_the_cells() -> None:
    peak = Knobs(45, 0, 1408, 1408)
    hill = Hill(peak)
    search = OracleSearch(TINY, tuple(range(10)), cast(Workers, hill))
    found = search.refine(Knobs(32, 0, 1024, 1024))
    knobs = found.single
    assert abs(math.log(knobs.token_budget / 1408)) < 0.07 and abs(math.log(knobs.max_batch_size / 45)) < 0.13
    assert knobs.chunk_size == knobs.token_budget and found.schedule == (knobs,) and len(found.by_seed) == 10
    assert len(hill.ran) == len(set(hill.ran)) == found.runs < 200
    below = search.refine(Knobs(16, 0, 256, 128)).single
    assert below.chunk_size <= 128, "a chunk of its own stays one"


def test_a_local_search_ends_where_nothing_beside_is_better() -> None:
    hill = Hill(COLD)
    found = OracleSearch(TINY, (1, 2, 3, 4), cast(Workers, hill)).refine(COLD)
    assert found.single == COLD and max(task.schedule[0].token_budget for task in hill.ran) == COLD.token_budget
    assert sum(task.seed == 4 for task in hill.ran) == 1, "the others had three seeds to show themselves on"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setitem(SCENARIOS, TINY.name, TINY)
    return TINY


@pytest.mark.slow
class TestOracle:
    def test_no_schedule_of_the_grid_does_better(self, tiny: Scenario) -> None:
        seeds = (1, 2)
        with Workers(1, BENCH) as workers:
            best = OracleSearch(tiny, seeds, workers).find()
            cells = tiny.grid.cells()
            tasks = [Task(tiny.name, STATIC, seed, (a, b)) for a in cells for b in cells for seed in seeds]
            met: dict[tuple[Knobs, ...], int] = {}
            for task, outcome in workers.runs(tasks):
                met[task.schedule] = met.get(task.schedule, 0) + outcome.met
        assert sum(o.met for o in best.by_seed.values()) == max(met.values())
        assert sum(best.single_met.values()) == max(met[cell, cell] for cell in cells)
        assert best.runs <= len(cells) ** 2 * 2

    def test_rejection_is_worth_something_past_capacity_only_if_it_is_there(self, tiny: Scenario) -> None:
        with Workers(1, BENCH) as workers:
            plain = OracleSearch(tiny, (1,), workers).judge((COLD,), COLD)
        assert plain.by_seed[1].rejected == 0
        assert plain.schedule == (COLD,)

    def test_two_processes_find_what_one_finds(self) -> None:
        tasks = [Task("M13", STATIC, seed, (Knobs(16, 0, 512, 512),)) for seed in (1, 2)]
        bench = Bench({str(load): 0.4 for load in LOADS})
        with Workers(2, bench) as two:
            found = dict(two.runs(tasks))
        assert found == {task: work.run_task(task, bench) for task in tasks}


class TestAlike:
    def test_cells_come_by_the_sequences_they_take_at_once(self) -> None:
        grid = Grid((16, 256, 512), (256, 1024), ())
        slots = [[min(c.max_batch_size, c.token_budget) for c in group] for group in by_slots(grid.cells())]
        assert slots == [[16, 16], [256, 256, 256], [512]]

    @pytest.mark.slow
    def test_more_slots_change_nothing_where_they_never_ran_out(self, tiny: Scenario) -> None:
        cells = [Knobs(batch, 0, 512, 512) for batch in (2, 128, 512)]
        with Workers(1, BENCH) as workers:
            tasks = [Task(tiny.name, STATIC, 1, (cell,)) for cell in cells]
            found = {task.schedule[0]: outcome for task, outcome in workers.runs(tasks)}
        few, enough, more = (found[cell] for cell in cells)
        assert few.full
        assert not enough.full
        assert enough == more != few
        assert roomy(cells[2], [cells[1]]) == cells[1]
        assert roomy(Knobs(512, 0, 1024, 512), [cells[1]]) is None


@pytest.mark.slow
class TestPeaks:
    def test_the_peak_is_where_more_load_serves_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.controller.peaks.GRID", Grid((16, 128), (512, 2048), ()))
        monkeypatch.setattr("benchmarks.controller.work.LEAST_S", 30.0)
        monkeypatch.setattr(
            PeakSearch,
            "_mean",
            lambda self, knobs, rate: max(p.goodput for p in self.measure((knobs,), rate, 800).values()),
        )
        load = next(load for load in LOADS if str(load) == "H200 code-strict")
        with Workers(1, Bench({})) as workers:
            search = PeakSearch(load, workers)
            goodput, _, rate = search.find()
            beyond = max(search.measure(Grid((16, 128), (512, 2048), ()).cells(), 1.5 * rate, 800).values()).goodput
        assert goodput == pytest.approx(8.6, rel=0.25)  # the study's simulator
        assert 0.5 * rate < goodput < 1.1 * rate
        assert beyond < goodput


class TestCache:
    def test_what_was_found_comes_back_and_is_one_line(self, tmp_path: Path) -> None:
        outcome = Outcome(((10, 8), (5, 5)), ((15, 13),), 2)
        best = Best((COLD, Knobs(64, 0, 512, 256)), {101: outcome}, COLD, {101: 12}, 77)
        path = tmp_path / "data" / "cache.json"
        Cache(path).put("M1", "abc", to_entry(best))
        Cache(path).put("M0", "abd", to_entry(best))
        entry = Cache(path).get("M1", "abc")
        assert entry is not None
        assert from_entry(entry) == best
        assert Cache(path).get("M1", "other") is None
        anew = Cache(path, use=False)
        assert anew.get("M1", "abc") is None
        anew.put("M1", "abc", to_entry(best))
        again = anew.get("M1", "abc")
        assert again is not None and from_entry(again) == best, "what is found anew is not searched for twice"
        assert anew.get("M0", "abd") is None
        assert [line[:6] for line in path.read_text().splitlines()] == ["{", ' "M0":', ' "M1":', "}"]

    def test_an_entry_from_before_a_knob_was_there_is_read(self) -> None:
        outcome = Outcome(((10, 8),), ((10, 8),))
        best = Best((Knobs(64, 0, 512, 256),), {101: outcome}, COLD, {101: 12}, 77)
        entry = to_entry(best)
        assert from_entry(entry | {"schedule": [entry["schedule"][0][:4]], "single": entry["single"][:4]}) == best

    def test_a_run_that_is_kept_is_the_run(self, tmp_path: Path) -> None:
        """As ``--keep FILE`` has it: found again by what was run, with all that came of it."""
        outcome, kept = (
            Outcome(((10, 8), (5, 5)), ((15, 13),), 2, False),
            Kept(tmp_path / "runs", {"traces": False}),
        )
        kept.add({"run": Task("M5", "predictive", 201)[:3], "outcome": outcome})
        found = {Task(*run["run"]): outcome_of(run["outcome"]) for run in kept.known()}
        assert found == {Task("M5", "predictive", 201): outcome}
        assert Kept(tmp_path / "runs", {"traces": False}, "other").known() == []

    def test_a_digest_is_of_behaviour(self) -> None:
        first = scenario_digest(TINY, STATIC, BENCH)
        assert scenario_digest(replace(TINY, about="other words", grid=Grid((1,), (1,), ())), STATIC, BENCH) == first
        for other in (
            replace(TINY, hardware=H200_ADD),
            replace(TINY, noise=0.01),
            replace(TINY, phases=(TINY.phases[0], replace(TINY.phases[1], slow=1.1))),
            replace(TINY, phases=(TINY.phases[0], replace(TINY.phases[1], load=1.01))),
            replace(TINY, pattern=POISSON._replace(kind="gamma", cv=2.0)),
        ):
            rates = Bench({**BENCH.peaks, "H200add conv-inter": 22.0, "H200add conv-strict": 18.0})
            assert scenario_digest(other, STATIC, rates) != first
        digests = {load_digest(load, Bench({})) for load in LOADS[:4]}
        assert len(digests) == 4

    def test_what_is_kept_is_of_what_was_searched_and_how(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The machine behaves alike throughout."""
        grid = TINY.grid
        made = {oracle_digest("as ever", replace(TINY, grid=other)) for other in (
            grid, Grid((16,), grid.budgets, ()), Grid(grid.batches, (512,), ()), Grid(grid.batches, grid.budgets, (256,)),
        )}  # fmt: skip
        made.add(oracle_digest("otherwise", TINY))
        peaks = {peak_digest("as ever")}
        monkeypatch.setattr(known, "ORACLE_SEARCH", (((1, 8),), 2))
        monkeypatch.setattr(known, "GRID", grid)
        made.add(oracle_digest("as ever", TINY))
        peaks.add(peak_digest("as ever"))
        monkeypatch.setattr(known, "PEAK_SEARCH", (1,))
        peaks.add(peak_digest("as ever"))
        assert len(made) == 6 and len(peaks) == 3

    @pytest.mark.slow
    def test_a_search_is_made_once(self, tiny: Scenario, tmp_path: Path) -> None:
        said: list[str] = []
        for _ in range(2):
            with Workers(1, BENCH) as workers:
                found = OracleStore(Cache(tmp_path / "c.json"), workers, (21, 22), said.append).of([tiny])
            assert found["tiny"].plain.by_seed[21].offered > 100
        assert sum(f"tiny {STATIC} 21-22" in line for line in said) == 1

    @pytest.mark.slow
    def test_the_setting_with_all_layers_is_refined_beyond_the_grid(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tiny = replace(TINY, grid=Grid((16,), (8192,), ()))
        monkeypatch.setitem(SCENARIOS, tiny.name, tiny)
        cache = Cache(tmp_path / "c.json")
        with Workers(1, BENCH) as workers:
            found = OracleStore(cache, workers, (21, 22), print, reject=False).one(tiny).full
        assert found is not None and found.single not in tiny.grid.cells()
        of_grid = cache.entry(f"tiny {STATIC_FULL} 21-22")
        assert of_grid is not None and sum(found.single_met.values()) > sum(from_entry(of_grid).single_met.values())

    @pytest.mark.slow
    def test_seeds_with_a_gap_are_others_than_the_range(self, tiny: Scenario, tmp_path: Path) -> None:
        with Workers(1, BENCH) as workers:
            for seeds in ((21, 23), (21, 22, 23)):
                found = OracleStore(Cache(tmp_path / "c.json"), workers, seeds, print, reject=False).one(tiny)
                assert tuple(found.plain.by_seed) == seeds

    def test_two_runs_at_once_lose_nothing_of_each_other(self, tmp_path: Path) -> None:
        one, other = Cache(tmp_path / "c.json"), Cache(tmp_path / "c.json")
        one.put("a", "1", {"n": 1})
        other.put("b", "2", {"n": 2})
        assert Cache(tmp_path / "c.json").get("a", "1") and Cache(tmp_path / "c.json").get("b", "2")

    def test_oracles_of_part_of_a_set_are_those_of_the_set(self) -> None:
        assert seed_set((101, 102)) == SEEN and seed_set((201, 204)) == REPORTED
        assert seed_set((3,)) == TUNED
        assert seed_set((7, 101)) == (7, 101)


def outcome(*met: int, offered: int = 100) -> Outcome:
    """A minute of two phases in bins of 5 s, each of which met so many."""
    bins = tuple((offered, m) for m in met)
    half = len(bins) // 2
    phases = tuple((sum(o for o, _ in b), sum(m for _, m in b)) for b in (bins[:half], bins[half:]))
    return Outcome(phases, bins)


class TestTable:
    M5 = SCENARIOS["M5"]

    def comparison(self, ours: Outcome, best: Outcome) -> Comparison:
        oracles = {"M5": Oracles(Best((COLD,), {1: best}, COLD, {1: best.met // 2}, 1), None)}
        return Comparison({("M5", "predictive"): {1: ours}}, oracles)

    def test_ratios_are_of_goodput(self) -> None:
        found = self.comparison(outcome(*[90] * 48), outcome(*[75] * 48))
        assert found.ratio("M5", "predictive") == pytest.approx(1.2)
        assert found.hindsight("M5") == pytest.approx(0.5)
        assert found.figures()["full_mean"] == found.figures()["full_min"] == pytest.approx(1.2)
        assert "knobs_mean" not in found.figures()

    def test_the_error_of_a_mean_comes_from_how_seeds_differ(self) -> None:
        best = outcome(*[100] * 48)
        oracles = {"M5": Oracles(Best((COLD,), {1: best, 2: best}, COLD, {1: 1, 2: 1}, 1), None)}
        ours = {1: outcome(*[80] * 48), 2: outcome(*[90] * 48)}
        found = Comparison({("M5", "predictive"): ours}, oracles)
        assert found.error(["M5"], "predictive") == pytest.approx(0.05)
        assert math.isnan(found.error(["M5"], "predictive", reject=True))

    def test_the_cold_start_is_the_first_half_minute(self) -> None:
        found = self.comparison(outcome(*[20] * 6, *[100] * 42), outcome(*[100] * 48))
        assert found.cold("M5", "predictive") == pytest.approx(0.2)

    def test_recovery_is_counted_from_the_shift_and_the_slowest_counts(self) -> None:
        # phases begin at bins 16 and 32; 3 bad bins after the first shift, 1 after the second
        ours = [100] * 16 + [0] * 3 + [100] * 13 + [0] + [100] * 15
        found = self.comparison(outcome(*ours), outcome(*[100] * 48))
        assert found.recovery(self.M5, "predictive") == 15.0
        never = self.comparison(outcome(*[100] * 16, *[50] * 32), outcome(*[100] * 48))
        assert never.recovery(self.M5, "predictive") == float("inf")
        assert "/ -" in never.tables()


class TestCommand:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--seeds", "0"],
            ["--seeds", "9-3"],
            ["--seeds", "x"],
            ["--seeds", "201"],
            ["--jobs", "0"],
            ["--traces", "nowhere"],
            ["--scenario", "M15"],
            ["--contender", "pid"],
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {arguments[0]} is ")

    def test_seeds(self) -> None:
        assert command.seeds_of("3") == (1, 2, 3)
        assert command.seeds_of("101-103") == (101, 102, 103)
        assert command.seeds_of("4,9") == (4, 9)
        assert command.seeds_of("201-201") == (201,)
        assert command.seeds_of("50") == tuple(range(1, 51))
        assert command.seeds_of("1-60") == tuple(range(1, 61)), "who names a range means it"
        with pytest.raises(InputError):
            command.seeds_of("-3")

    def test_a_number_of_seeds_that_is_the_name_of_one_is_refused_with_how_to_name_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for text in ("51", "201", "9" * 18):
            with pytest.raises(
                InputError, match=f"at most 50; a range names others: {text}-{text} is seed {text} alone"
            ):
                command.seeds_of(text)
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            command.main(["--help"])
        assert "201-201 for one seed" in " ".join(capsys.readouterr().out.split())

    def test_what_the_page_says_takes_seconds_searches_for_nothing(self) -> None:
        entries = json.loads((FOLDER / "controller_traces.json").read_text(encoding="utf-8"))
        assert {f"M5 {contender} 1-10" for contender in (STATIC, STATIC_ORDER, STATIC_FULL)} <= entries.keys()
        reported = {
            (s.name, c) for s in SCENARIOS.values() if s not in VARIANTS for c in (STATIC, STATIC_ORDER, STATIC_FULL)
        }
        assert {f"{name} {contender} 201-210" for name, contender in reported} <= entries.keys()

    @pytest.mark.slow
    def test_from_the_peak_to_the_line_of_json(
        self, tiny: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "FOLDER", tmp_path)
        monkeypatch.setattr(command, "peaks", lambda *_: BENCH.peaks)
        arguments = [
            "--scenario",
            "tiny",
            "--contender",
            "predictive",
            "--contender",
            "vllm-1024",
            "--seeds",
            "21-21",
            "--jobs",
            "1",
        ]
        assert command.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("tiny      predictive") for line in lines) == 1
        assert isinstance(json.loads(lines[-1]), dict)
        assert (tmp_path / "controller_presets.json").is_file()

    @pytest.mark.slow
    def test_a_run_that_is_kept_counts_at_the_load_it_was_made_at(
        self, tiny: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "FOLDER", tmp_path)
        rates = dict(BENCH.peaks)
        monkeypatch.setattr(command, "peaks", lambda *_: rates)
        arguments = ["--scenario", "tiny", "--contender", "vllm-1024", "--seeds", "21-21", "--jobs", "1"]
        keep = ["--keep", str(tmp_path / "runs")]
        lines = []
        for told in (0, 0, 1):
            assert command.main([*arguments, *keep]) == 0
            said = capsys.readouterr().out.splitlines()
            assert sum("1 of the runs kept are of other peak goodputs" in line for line in said) == told
            lines.append(next(line for line in said if line.startswith("tiny      vllm-1024")))
            if len(lines) == 2:
                rates["H200 conv-inter"] *= 0.7
        assert lines[0] == lines[1] != lines[2]
        assert len((tmp_path / "runs").read_text().splitlines()) == 2


def test_loads_are_named_by_what_they_hold() -> None:
    assert str(Load("H200", SCENARIOS["M6"].phases[0].parts)) == "H200 conv-inter 85% + moon-long 15%"
    assert len({str(load) for load in scenarios.LOADS}) == len(scenarios.LOADS)
