"""Targets for token times that no step is short enough for: they are named, and cost nobody else anything."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from autotune import control, simulate
from autotune.control.controllers.parts.running_statistics import Recent
from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.loop import Control
from autotune.workload import Arrival
from runtime.records import RequestRecord
from runtime.slo import SLO, RequestClass, attainment
from runtime.step_model import StepFeatures
from tests.unit.control_world import VLLM, Formula, SimulatedEngine, h200, poisson

CHAT = SLO(ttft_ms=1000, tpot_ms=20)
MAIN = poisson(17, 25, 1500, 150, seed=1)
FEW = poisson(1, 25, 200, 50, seed=2)


class Served(simulate.SimulatedEngine):
    """Two classes, ``default`` and ``other``; a decode alone takes 4.7 ms."""

    def __init__(self, slo: SLO, other: SLO) -> None:
        self.formula = Formula(h200)
        self.records: list[RequestRecord] = []
        super().__init__(
            self.formula, kv_tokens=760_000, knobs=VLLM, slo=slo, classes=[RequestClass("other", other)], prefix_cache=False,
            max_queue=10**9,
        )  # fmt: skip
        self.subscribe(self)

    def on_step(self, record: object) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def play(self, main: Iterable[tuple[float, int, int]], other: Iterable[tuple[float, int, int]]) -> None:
        offered = [(*a, "default") for a in main] + [(*a, "other") for a in other]
        made = (Arrival(t, p, o, ((n, p),), name) for n, (t, p, o, name) in enumerate(sorted(offered)))
        self.serve(made, start=self.clock.now(), label="", shared=False)
        self.run()

    def share(self, name: str, slo: SLO) -> float:
        return attainment([r for r in self.records if r.request_class == name], slo).share


def said(attached: Control) -> list[str]:
    return [d.cause for d in attached.decisions if "cannot be met" in d.cause]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (SLO(ttft_ms=1000, tpot_ms=2), "a single decode takes 4.7 ms, so TPOT 2 ms of class other cannot be met"),
        (SLO(itl_ms=2, tpot_ms=30), "a single decode takes 4.7 ms, so ITL 2 ms of class other cannot be met"),
        (SLO(e2e_ms=60), ""),
    ],
    ids=["tpot", "itl", "e2e"],
)
def test_a_class_that_cannot_be_met_costs_the_others_nothing(other: SLO, words: str) -> None:
    engine = Served(CHAT, other)
    with control(engine, slo=CHAT) as attached:
        engine.play(MAIN, FEW)
        assert any(words in cause for cause in said(attached)) or not words, attached.decisions
        assert not any(d.regime == "infeasible" for d in attached.decisions)
    assert engine.share("other", other) == 0
    assert engine.share("default", CHAT) > 0.97


def test_a_class_counts_again_once_it_can_be_met() -> None:
    """The machine becomes five times as fast; then the SLO becomes one that takes no such machine."""
    other = SLO(ttft_ms=1000, tpot_ms=2)
    engine = Served(CHAT, other)
    with control(engine, slo=CHAT) as attached:
        engine.play(poisson(10, 10, 800, 80, seed=3), poisson(2, 10, 200, 50, seed=4))
        assert said(attached)
        target = attached.controller.target  # type: ignore[attr-defined]
        assert 0.012 <= target <= 0.021
        before = len(said(attached))
        engine.formula.hardware = lambda step: h200(step) / 5
        engine.records.clear()
        start = engine.clock.now()
        engine.play(poisson(10, 15, 800, 80, seed=5), poisson(2, 15, 200, 50, seed=6))
        assert attached.controller.target <= 0.0021, "the tightest again"  # type: ignore[attr-defined]
        assert "cannot be met" not in attached.decisions[-1].cause
        late = [r for r in engine.records if r.request_class == "other" and r.arrival > start + 5]
        assert attainment(late, other).share > 0.9
        engine.formula.hardware = h200
        engine.play([], poisson(60, 12, 50, 10, seed=7))
        assert len(said(attached)) > before and attached.status().regime == "infeasible", (
            "nobody else is served any more"
        )
        engine.set_slo(SLO(tpot_ms=10), request_class="other")
        engine.play([], poisson(60, 3, 50, 10, seed=8))
        assert attached.status().regime != "infeasible"
        assert attached.controller.target <= 0.0101  # type: ignore[attr-defined]


def test_a_first_token_that_cannot_come_in_time_loosens_no_step() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO(ttft_ms=3, tpot_ms=30)) as attached:
        records = engine.play(poisson(6, 20, 1500, 150, seed=4))
        assert attached.controller.target <= 0.03  # type: ignore[attr-defined]
    assert attainment(records, SLO(ttft_ms=3)).share == 0
    assert attainment(records, SLO(tpot_ms=30)).share > 0.99


def test_of_a_loose_tpot_and_a_tight_e2e_both_are_met() -> None:
    slo = SLO(ttft_ms=1000, tpot_ms=100, e2e_ms=5000)
    engine = SimulatedEngine(h200)
    with control(engine, slo=slo):
        ours = attainment(engine.play(poisson(18, 40, 1500, 150, seed=3)), slo).share
    alone = attainment(SimulatedEngine(h200).play(poisson(18, 40, 1500, 150, seed=3)), slo).share
    assert ours > 0.97 > alone + 0.05


def test_targets_leave_out_what_no_step_meets_and_take_it_back() -> None:
    fast, chat = SLO(ttft_ms=500, tpot_ms=2, itl_ms=30), SLO(ttft_ms=1000, tpot_ms=20, itl_ms=60)
    targets = SLOTargets({"default": chat, "fast": fast})
    assert (targets.step, targets.gap, targets.first, targets.left_out) == (0.002, 0.03, 0.5, False)
    assert targets.no_step_below(0.004) and not targets.no_step_below(0.0041), "what is left out stays the same"
    assert (targets.step, targets.gap, targets.first) == (0.02, 0.03, 0.5), "its other targets count"
    assert targets.left_out and targets.unmet == "TPOT 2 ms of class fast"
    assert not targets.no_step_below(0.00405), "noise moves nothing"
    assert targets.floor == 0.0041
    assert targets.no_step_below(0.031) and targets.unmet == "TPOT 20 ms, TPOT 2 ms and ITL 30 ms of class fast"
    for _ in range(300):
        targets.saw("chat")
    assert targets.left_out and targets.unmet == "TPOT 20 ms", "those of the classes served"
    assert targets.no_step_below(0.001) and (targets.left_out, targets.unmet) == (False, "")


def test_ends_that_ask_for_shorter_steps_than_there_are_bound_none() -> None:
    outputs = Recent(64)
    targets = SLOTargets({"default": SLO(e2e_ms=600)})
    for _ in range(8):
        outputs.add(100)
    assert targets.step_time_for_e2e(outputs) == pytest.approx(0.004)
    targets.no_step_below(0.005)
    assert targets.step_time_for_e2e(outputs) == math.inf


def test_ends_go_by_the_answers_of_their_own_class() -> None:
    outputs = Recent(64)
    targets = SLOTargets({"default": SLO(tpot_ms=30), "short": SLO(e2e_ms=600)})
    for _ in range(40):
        targets.saw("short", 10)
        targets.saw("default", 1000)
        outputs.add(10)
        outputs.add(1000)
    assert targets.step_time_for_e2e(outputs) == pytest.approx(0.04), "and not 0.4 ms"


def test_decodes_that_cannot_be_met_lend_a_step_neither_target_nor_slack() -> None:
    engine = Served(CHAT, SLO(tpot_ms=2, itl_ms=3))
    for number, name in enumerate(("default", "other")):
        engine.offer(Arrival(0.0, 50, 100, ((number, 50),), name), name, due=0.0, shared=False)
    engine.run_until(0.03)
    view = engine.view()
    assert view.decoding == 2 and view.step_time_target == 0.002
    assert {target for target, _ in view.token_deadlines} == {0.02, 0.002, 0.003}
    assert view.decode_slack == min(left for _, left in view.token_deadlines) < 0
    made = PredictiveController(CHAT, VLLM)
    made.set_slos({"default": CHAT, "other": SLO(tpot_ms=2, itl_ms=3)})
    steps, targets = made._steps, made._targets
    assert not targets.left_out
    targets.no_step_below(0.0047)
    counted = steps._feasible(view)
    assert counted.step_time_target == 0.02 and counted.decode_slack == dict(view.token_deadlines)[0.02] > 0
    apart = view._replace(
        token_deadlines=((0.02, 0.06), (0.002, -0.01), (0.003, 0.003)), in_flight=StepFeatures(2, 100, 0, 0, 0)
    )
    assert steps._feasible(apart).after(0.02).decode_slack == pytest.approx(0.04), "nor behind a step in flight"
    targets.no_step_below(0.0025)
    assert steps._feasible(view).step_time_target == 0.003, "what can be kept"
    assert math.isfinite(made.target)
