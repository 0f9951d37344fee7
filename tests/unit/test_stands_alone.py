"""Knobs that a controller leaves behind hold by themselves: budgets of single steps go when it pauses, or is detached."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import control, save_profile
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Proposal
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO, attainment
from tests.sample_profile import sample_profile
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson

TARGET = SLO(ttft_ms=1000, tpot_ms=18)
BEFORE = poisson(17, 15, 1500, 150, seed=5)


def share_from_here(engine: SimulatedEngine) -> float:
    return attainment(engine.play(poisson(17, 20, 1500, 150, seed=6, start=engine.now)), TARGET).share


@pytest.mark.parametrize("how", ["pause", "close"])
def test_what_it_leaves_meets_the_slo(how: str) -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET) as attached:
        engine.play(BEFORE)
        ceilings = engine.knobs
        getattr(attached, how)()
        last, said = list(attached.decisions)[-2:]
        assert said.action == {"pause": "pause", "close": "detach"}[how]
        assert last.action == "set" and last.evidence and last.regime
        assert last.cause.startswith("no per-step budgets from here on, so the knobs alone must hold: ")
        assert engine.knobs == Knobs.from_mapping(last.new) and engine.knobs.token_budget < ceilings.token_budget
        assert share_from_here(engine) > 0.98
    alone = SimulatedEngine(h200, knobs=ceilings)
    assert share_from_here(alone) < 0.9, "without that decision it would not"


def test_after_a_pause_it_goes_on_as_before() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET) as attached:
        engine.play(BEFORE)
        attached.pause()
        attached.pause()
        assert [d.action for d in attached.decisions].count("pause") == 1
        alone = engine.knobs
        engine.play(poisson(17, 5, 1500, 150, seed=7, start=engine.now))
        assert engine.knobs == alone
        attached.resume()
        assert share_from_here(engine) > 0.98
        assert engine.knobs.token_budget > alone.token_budget, "a ceiling again, for budgets to stay below"


def test_what_an_operator_has_set_holds() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET) as attached:
        engine.play(BEFORE)
        attached.set(token_budget=4000)
        by_hand = engine.knobs
        attached.pause()
        engine.play(poisson(17, 5, 1500, 150, seed=7, start=engine.now))
    assert engine.knobs == by_hand and by_hand.token_budget == 4000
    assert [d.action for d in attached.decisions][-2:] == ["pause", "detach"]


def test_nothing_is_left_where_nothing_was_set(tmp_path: Path) -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=TARGET, observe_only=True):
        engine.play(BEFORE)
    assert engine.knobs == VLLM
    path = tmp_path / "mine.yaml"
    save_profile(sample_profile({"balanced": Knobs(24, 0, 192, 128)}), path)
    with control(engine, slo=TARGET, profile=path):
        pass
    assert engine.knobs == Knobs(24, 0, 192, 128), "the profile's, as nothing was seen that speaks against them"
    with control(engine, slo=TARGET) as attached:
        engine.play(poisson(17, 15, 1500, 150, seed=5, start=engine.now))
        attached.kill()
    assert engine.knobs == Knobs(24, 0, 192, 128)


class Leaving(PredictiveController):
    """Breaks at the last decision of all."""

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        if not self._budgeted:
            raise ZeroDivisionError("the last one")
        return super().decide(now, knobs, limits)


@pytest.mark.parametrize("how", ["pause", "close"])
def test_one_that_breaks_at_the_last_decision_is_switched_off(how: str) -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=TARGET, controller=Leaving(TARGET, VLLM))
    engine.play(BEFORE)
    assert engine.knobs != VLLM
    getattr(attached, how)()
    assert engine.knobs == VLLM and attached.status().ended
    assert [d.action for d in attached.decisions][-2:] == ["kill", "detach"]
    engine.acquire("another").release()
