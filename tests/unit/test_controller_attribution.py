"""Which part of a controller earns what: layers of contenders, the baseline, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.controller import __main__ as command
from benchmarks.controller.attribution import EVERYTHING, HINDSIGHT, Attribution
from benchmarks.controller.contenders import (
    COLUMNS,
    CONTENDERS,
    LAYERS,
    OURS,
    POLICIES,
    REPORTED,
    RIVALS,
    STACK,
    STATIC_FULL,
    STATIC_ORDER,
)
from benchmarks.controller.known import Oracles
from benchmarks.controller.oracle import Best, OracleSearch
from benchmarks.controller.run import FCFS, Bench, Outcome, run
from benchmarks.controller.scenarios import COLD, FAMILIES, LOADS, MATRIX, SCENARIOS, UNSEEN, Scenario
from benchmarks.controller.work import Workers
from benchmarks.sweep.cases import Grid
from runtime.knobs import Knobs
from tests.unit.test_controller_benchmark import RATES, SHORT


def outcome(met: int) -> Outcome:
    return Outcome(((100, met),), ((100, met),))


def best(met: int, other: int = 0) -> Best:
    return Best((COLD,), {1: outcome(met), 2: outcome(met)}, COLD, {1: met - other, 2: met - other}, 2)


def found(**met: int) -> dict[tuple[str, str], dict[int, Outcome]]:
    """``M1__aimd_full=60``: what the contender aimd-full met in M1, with either seed."""
    named = {tuple(key.split("__")): value for key, value in met.items()}
    return {(s, c.replace("_", "-")): {1: outcome(value), 2: outcome(value)} for (s, c), value in named.items()}


ORACLES = {name: Oracles(best(90, 10), None, best(82), best(80)) for name in ("M1", "M3", "M5", "U1")}


class TestContenders:
    def test_every_base_has_the_same_order_and_rejection(self) -> None:
        for contender in CONTENDERS.values():
            if contender.name == "static-reject":  # the oracle's own, first come first served
                continue
            driver = contender.driver(())
            fixed = contender.group == "fixed" or CONTENDERS[contender.base].group == "fixed"
            expected = POLICIES.get(contender.layer, FCFS) if fixed else FCFS  # a controller installs its own
            assert driver.policy == expected, contender.name
        assert POLICIES["order"].late is None and POLICIES["full"].late == "reject"
        assert {policy.order for policy in POLICIES.values()} == {"deadline"}
        layers = {base: {c.layer for c in CONTENDERS.values() if c.base == base} for base in (*RIVALS, OURS)}
        assert all(found >= {"order", "full"} for found in layers.values())
        assert layers[OURS] == set(STACK) == set(LAYERS) - {"relegate"}

    def test_columns_are_the_bare_names_and_knobs_of_ours(self) -> None:
        assert [name for name in COLUMNS if CONTENDERS[name].base != name] == ["predictive-knobs"]
        assert set(COLUMNS) < set(REPORTED)
        assert not {name for name in REPORTED if name.startswith("static")}

    @pytest.mark.parametrize("base", ["vllm-512", "aimd"])
    def test_past_capacity_rejection_earns_most(self, base: str) -> None:
        by_layer = {
            c.layer: run(SHORT, c.driver(()), 1, Bench({k: 2.5 * v for k, v in RATES.peaks.items()}))
            for c in CONTENDERS.values()
            if c.base == base
        }
        others = [outcome.met for layer, outcome in by_layer.items() if layer != "full"]
        assert len(others) >= 2
        assert by_layer["full"].met > 1.05 * max(others)

    def test_scenarios_that_shift_change_more_than_their_load(self) -> None:
        assert [s.name for s in MATRIX if s.shifts] == ["M3", "M5", "M6", "M8", "M9", "M10"]
        assert all(s.shifts for s in UNSEEN)
        assert SCENARIOS["M5~2%"].shifts and not SCENARIOS["M1gap"].shifts


class TestRatios:
    def test_they_are_over_the_best_setting_that_has_all(self) -> None:
        told = Attribution(found(M1__predictive=88, M1__predictive_knobs=72), ORACLES)
        assert told.ratio("M1", OURS, "full") == pytest.approx(1.1)
        assert told.ratio("M1", OURS, "knobs") == pytest.approx(0.9)
        assert math.isnan(told.ratio("M1", OURS, "order"))
        assert [told.ratio("M1", HINDSIGHT, layer) for layer in ("knobs", "order", "full")] == pytest.approx(
            [1.0, 82 / 80, 1.0]
        )
        assert math.isnan(told.ratio("M1", HINDSIGHT, "budget"))

    def test_only_seeds_that_were_run_count(self) -> None:
        told = Attribution({("M1", OURS): {2: outcome(40)}}, ORACLES)
        assert told.ratio("M1", OURS, "full") == pytest.approx(0.5)

    def test_nothing_is_above_all_requests_in_time(self) -> None:
        full = best(80)._replace(single_met={1: 80, 2: 40})
        ran = {("M1", OURS): {2: outcome(40)}, ("M1", "aimd-full"): {1: outcome(50), 2: outcome(50)}}
        told = Attribution(ran, {"M1": Oracles(best(90, 10), None, best(82), full)})
        assert told.ratio("M1", EVERYTHING, "full") == pytest.approx(200 / 120)
        assert math.isnan(told.ratio("M1", EVERYTHING, "knobs"))
        assert f"{EVERYTHING:<24}{'':>60}{'1.667 (1.667)':>20}" in told.tables()
        assert told.figures()["all_in_time_vs_best_static_with_admission_mean"] == pytest.approx(200 / 120)

    def test_the_best_rival_is_the_one_that_ours_is_least_ahead_of(self) -> None:
        ran = found(
            M1__predictive=80, M3__predictive=80, M1__aimd_full=80, M3__aimd_full=64, M1__bisection_full=70,
            M3__bisection_full=70,
        )  # fmt: skip
        rival = Attribution(ran, ORACLES).rival("full")
        assert rival is not None
        assert (rival.name, rival.mean, rival.least) == ("aimd", pytest.approx((1 + 80 / 64) / 2), pytest.approx(1.0))
        assert Attribution(ran, ORACLES).rival("knobs") is None
        relegating = found(M1__predictive=80, M1__niyama_full=70, M1__niyama_relegate=79)
        rival = Attribution(relegating, ORACLES).rival("full")
        assert rival is not None and rival.name == "niyama relegating"

    def test_the_line_of_json(self) -> None:
        ran = found(
            M1__predictive=80, M3__predictive=84, M5__predictive=88, U1__predictive=60, M1__aimd_full=80, M1__aimd_knobs=40,
            M1__predictive_knobs=44, M3__aimd_knobs=50,
        )  # fmt: skip
        told = Attribution(ran, ORACLES).figures()
        assert told["full_vs_best_static_with_admission_mean"] == pytest.approx((1 + 1.05 + 1.1) / 3)
        assert told["full_vs_best_static_with_admission_min"] == pytest.approx(1.0)
        assert told["full_vs_best_static_with_admission_shift"] == pytest.approx(1.075)
        assert told["all_in_time_vs_best_static_with_admission_shift"] == pytest.approx(100 / 80)
        assert told["unseen_full_vs_best_static_with_admission_mean"] == pytest.approx(0.75)
        assert told["full_vs_best_rival_with_admission_mean"] == pytest.approx(1.0)
        assert math.isnan(told["gpu_truth_full_mean"])
        assert told["knobs_vs_best_tuned_rival_mean"] == pytest.approx(1.1)  # of M1 alone: M3 lacks ours

    @pytest.mark.parametrize(
        ("group", "mean", "rival"),
        [
            ("G", "gpu_truth_full", "gpu_truth_full_vs_best_rival_with_admission_mean"),
            ("H", "frozen_full_vs_best_static_with_admission", "frozen_full_vs_best_rival_with_admission_mean"),
        ],
    )
    def test_measured_gpus_and_what_was_invented_afterwards_have_figures_of_their_own(
        self, group: str, mean: str, rival: str
    ) -> None:
        met = {"1__predictive": 88, "2__predictive": 72, "1__aimd_full": 80, "2__aimd_full": 80}
        ran = found(**{group + key: value for key, value in met.items()})
        oracles = {f"{group}{n}": Oracles(best(90, 10), None, best(82), best(80)) for n in (1, 2)}
        told = Attribution(ran, oracles).figures()
        assert told[f"{mean}_mean"] == pytest.approx(1.0) and told[f"{mean}_min"] == pytest.approx(0.9)
        assert told[rival] == pytest.approx(1.0)
        assert math.isnan(told["full_vs_best_static_with_admission_mean"])

    def test_without_a_baseline_nothing_is_said(self) -> None:
        told = Attribution(found(M1__predictive=80), {"M1": Oracles(best(90), None)})
        assert told.scenarios == []
        assert all(math.isnan(value) for value in told.figures().values())


class TestShown:
    RAN = found(M1__predictive=80, M3__predictive=88, M1__aimd_full=72, M1__aimd=64, M3__aimd_full=40)

    def test_the_table_has_a_row_for_each_base_and_a_column_for_each_layer(self) -> None:
        text = Attribution(self.RAN, ORACLES).tables()
        lines = text.splitlines()
        (aimd, *_) = (line.split() for line in lines if line.startswith("aimd"))
        assert aimd == ["aimd", "0.800", "(0.800)", "0.700", "(0.500)"]
        assert all(layer in lines[1] for layer in LAYERS.values())
        assert "those that shift" in lines and FAMILIES[1].about not in lines
        assert any(line.split() == ["M3*", "0.500", "1.100", "1.250"] for line in lines)
        assert "× the best rival, aimd" in text

    def test_the_picture_has_a_row_for_each_base_and_a_dot_for_each_layer_that_ran(self) -> None:
        told = Attribution(self.RAN, ORACLES)
        svg = ElementTree.fromstring(told.picture((1, 2)))
        texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text in (HINDSIGHT, OURS, "aimd")] == [HINDSIGHT, "aimd", OURS]
        assert {"M1 to M14", "those that shift", *LAYERS.values()} <= set(texts)
        # two panels, M1 and M3 and M3 alone: of AIMD budgets (M1) and rejection (both)
        row = next(t for t in svg.iter("{http://www.w3.org/2000/svg}text") if t.text == "aimd").get("y")
        dots = [
            d for d in svg.iter("{http://www.w3.org/2000/svg}circle") if float(d.get("cy", 0)) + 4 == float(row or 0)
        ]
        assert len(dots) == 3
        assert told.picture((1, 2)) == told.picture((1, 2))

    def test_a_plot_that_cannot_be_written_is_said_first(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert command.main(["--plot", str(tmp_path / "plot.png")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: --plot") and ".svg" in line


@pytest.mark.slow
def test_the_best_single_setting_with_all_layers_is_the_best_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Scenario("tiny", "", SHORT.hardware, SHORT.phases, grid=Grid((16, 128), (512, 8192), ()))
    monkeypatch.setitem(SCENARIOS, "tiny", tiny)
    bench = Bench({**RATES.peaks, **{str(load): 22.0 for load in LOADS}})
    with Workers(1, bench) as workers:
        search = OracleSearch(tiny, (1, 2), workers, contender=STATIC_FULL)
        single = search.find_single()
        each = {
            cell: sum(run(tiny, CONTENDERS[STATIC_FULL].driver((cell,)), seed, bench).met for seed in (1, 2))
            for cell in tiny.grid.cells()
        }
        order = OracleSearch(tiny, (1, 2), workers, contender=STATIC_ORDER).best_of(
            [single.single, Knobs(1, 0, 64, 64)]
        )
    assert sum(single.single_met.values()) == max(each.values())
    assert single.schedule == (single.single,)
    assert order.single == single.single
