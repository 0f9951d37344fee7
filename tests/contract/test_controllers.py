"""What every controller keeps, whatever it is told: one suite over the registry."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest

from autotune import control
from autotune.control import controllers
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Controller, Proposal, SLOAware
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import StepPlan, StepResult
from runtime.records import StepRecord
from runtime.shared.ceilings import StepLoad
from runtime.slo import SLO
from tests.contract.contract_of_controllers import ALL, LOAD, NAMES, SLOS, explained, make
from tests.engines import bench
from tests.fakes import Records
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson, slow_cpu
from tests.waiting import until


def test_every_controller_is_in_the_registry() -> None:
    """A class with the methods of the protocol, in any file beside them, is one."""
    found = set()
    for module in pkgutil.iter_modules(controllers.__path__):
        for _, made in inspect.getmembers(
            importlib.import_module(f"autotune.control.controllers.{module.name}"), inspect.isclass
        ):
            if all(hasattr(made, m) for m in ("observe_step", "observe_request", "decide", "budget")):
                found.add(made)
    found.discard(Controller)
    assert {type(make(name)) for name in ALL} == found
    assert all(make(name).name == name for name in ALL)
    with pytest.raises(ValueError, match="controller is 'pid'; it must be one of aimd, bisection"):
        control(SimulatedEngine(h200), slo=SLOS[0], controller="pid")


@pytest.mark.parametrize("lacking", ["evidence", "cause"])
def test_a_decision_that_does_not_explain_itself_is_found(lacking: str) -> None:
    """The check that the other tests rely on."""

    class Silent(PredictiveController):
        def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
            return super().decide(now, knobs, limits)._replace(**{lacking: {} if lacking == "evidence" else ""})

    engine = SimulatedEngine(h200)
    with control(engine, slo=SLOS[0], controller=Silent(SLOS[0], VLLM)) as attached:
        engine.play(LOAD)
        assert any(d.action == "set" for d in attached.decisions)
        with pytest.raises(AssertionError):
            explained(attached)


# -- limits and progress -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slo", SLOS, ids=str)
@pytest.mark.parametrize("start", [VLLM, Knobs(1, 0, 1, 1), Knobs(3, 400, 7, 2)], ids=str)
def test_the_engine_makes_progress_from_any_start_under_any_slo(name: str, slo: SLO, start: Knobs) -> None:
    limits = KnobLimits(512, 1000, 8192, 8192)
    engine = SimulatedEngine(h200, knobs=limits.clamp(start), limits=limits)
    arrivals = [(t, min(p, 40 if start.token_budget < 10 else 4000), o) for t, p, o in LOAD[:40]]
    with control(engine, slo=slo, controller=name) as attached:
        records = engine.play(arrivals)
        assert not attached.status().ended
        assert len(records) == len(arrivals) and all(r.completed for r in records)
        for decision in attached.decisions:
            limits.check(Knobs.from_mapping(decision.new))
        explained(attached)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_and_pins_and_ceilings_that_shrink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(h200)
    bounds = {"token_budget": (256.0, 1024.0), "max_batch_size": (16.0, 64.0)}
    with control(engine, slo=SLOS[0], controller=name, bounds=bounds, pinned={"chunk_size": 128}) as attached:
        engine.play(LOAD)
        for decision in attached.decisions:
            if decision.action == "set":
                assert 256 <= decision.new["token_budget"] <= 1024 and decision.new["chunk_size"] == 128
                assert 16 <= decision.new["max_batch_size"] <= 64
        execute = engine.core.executor.execute

        def ran_out(plan: StepPlan, now: float, until: float) -> StepResult:
            monkeypatch.undo()
            return execute(plan, now, until)._replace(oom=[StepLoad(8, 400, 400)])

        in_force: list[tuple[Knobs, KnobLimits]] = []
        monkeypatch.setattr(engine.core.executor, "execute", ran_out)
        engine.subscribe(Records(act=lambda _: in_force.append((engine.knobs, engine.effective_limits))))
        engine.play([(engine.now + t, p, o) for t, p, o in LOAD])
        assert min(knobs.token_budget for knobs, _ in in_force) <= 200
        assert all(limits.check(knobs) for knobs, limits in in_force)
        assert not attached.status().ended


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", [h200, slow_cpu])
def test_a_machine_that_turns_a_thousand_times_slower_and_back(name: str, hardware: Callable[..., float]) -> None:
    engine = SimulatedEngine(hardware, limits=KnobLimits(256, 100, 2048, 2048), knobs=Knobs(256, 0, 2048, 2048))
    load = poisson(3, 10, 200, 30, seed=3)
    with control(engine, slo=SLO(ttft_ms=2000, tpot_ms=60), controller=name) as attached:
        for factor in (1.0, 1000.0, 1.0):
            engine.formula.hardware = lambda step, factor=factor: factor * hardware(step)  # type: ignore[misc]
            records = engine.play([(engine.now + t, p, o) for t, p, o in load])
            assert len(records) == len(load) and all(r.completed for r in records)
            assert not attached.status().ended
        explained(attached)


@pytest.mark.parametrize("name", NAMES)
def test_another_listener_that_raises_changes_nothing(name: str) -> None:
    class Broken:
        def on_step(self, record: StepRecord) -> None:
            raise ZeroDivisionError("a listener of somebody else")

        on_request = on_step  # type: ignore[assignment]

    with bench() as world:
        world.engine.subscribe(Broken())
        with control(world.engine, slo=SLOS[0], controller=name, interval_s=0.001) as attached:
            world.engine.subscribe(Broken())
            done = world.engine.generate([[1, 2, 3]] * 16, max_tokens=30)
            assert all(len(c.token_ids) == 30 for c in done)
            assert not attached.status().ended
            until(lambda: attached.status().attainment.offered == 16)  # callers are answered before listeners
            explained(attached)


# -- each of them does something -----------------------------------------------------------------------------------------

FEW_LONG = poisson(6, 15, 3000, 200, seed=8)
MANY = poisson(60, 12, 300, 300, seed=8)
MOVES = {
    "predictive": ("token_budget", FEW_LONG),
    "static": (None, FEW_LONG),
    "aimd": ("token_budget", FEW_LONG),
    "gradient": ("max_batch_size", MANY),
    "bisection": ("token_budget", FEW_LONG),
    "length_table": ("max_batch_size", FEW_LONG),
}
"""The knob that each turns, and a load under which it must."""


@pytest.mark.parametrize("name", NAMES)
def test_turns_its_knob_and_says_why(name: str) -> None:
    """Without it, a controller that never acts would pass all of this suite."""
    knob, load = MOVES[name]
    engine = SimulatedEngine(h200, knobs=Knobs(64, 0, 8192, 8192))
    with control(engine, slo=SLO(ttft_ms=2000, tpot_ms=15), controller=name) as attached:
        assert len(engine.play(load)) == len(load)
        turned = {n for d in attached.decisions if d.action == "set" for n, _, _ in d.changes}
        assert (knob in turned) if knob else not turned
        assert any(d.evidence for d in attached.decisions)
        explained(attached)


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(make(name), SLOAware)])
def test_goes_by_the_slo_in_force(name: str) -> None:
    """Tightened in mid-run, through the engine: the steps of a controller that is told of it grow shorter."""
    engine = SimulatedEngine(h200)
    heard = Records()
    engine.subscribe(heard)
    tokens = []
    with control(engine, slo=SLO(tpot_ms=100), controller=name):
        for slo in (SLO(tpot_ms=100), SLO(tpot_ms=12)):
            engine.set_slo(slo)
            engine.play(poisson(20, 12, 1500, 100, seed=2, start=engine.now))
            late = heard.steps[len(heard.steps) // 2 :]
            tokens.append(max(s.tokens for s in late))
            heard.steps.clear()
    assert tokens[1] < 0.5 * tokens[0]
