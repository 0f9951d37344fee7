"""An engine whose step records are missing, or hold times that are not numbers: the starting knobs hold, and the log says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import control, save_profile
from autotune.cli.main import run
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import Decision
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.slo import SLO, attainment
from runtime.tunable import Listener, SchedulerView
from tests.building import request_record
from tests.sample_profile import sample_profile
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson

TARGET = SLO(ttft_ms=500, tpot_ms=30)
START = Knobs(128, 0, 1024, 1024)


class Faulty(SimulatedEngine):
    """``fault``: what becomes of the records of steps: "" for nothing, else they are lost, or their end is no number."""

    fault = ""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        engine = self

        class Heard:
            def on_step(self, record: StepRecord) -> None:
                if engine.fault != "lost":
                    listener.on_step(record._replace(end=math.nan) if engine.fault else record)

            def on_request(self, record: RequestRecord) -> None:
                listener.on_request(record)

        return super().subscribe(Heard())

    def serve_for(self, seconds: float, rate: float = 12) -> list[RequestRecord]:
        return self.play(poisson(rate, seconds, 1500, 150, seed=int(self.now), start=self.now))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    save_profile(sample_profile({"balanced": START}), path)
    return path


@pytest.mark.parametrize("fault", ["lost", "no number"])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_the_starting_knobs_hold_until_records_come_again(name: str, fault: str, profile: Path) -> None:
    engine = Faulty(h200)
    with control(engine, slo=TARGET, profile=profile, controller=name) as attached:
        engine.serve_for(10)
        before, began = len(attached.decisions), engine.now
        engine.fault = fault
        engine.serve_for(10)
        (said,) = list(attached.decisions)[before:]
        assert said.regime == "fallback" and said.action in ("set", "hold") and 2 <= said.at - began < 3
        assert (
            "holding the starting knobs" in said.cause
            and said.evidence["steps"] >= 8
            and said.evidence["overdue_s"] >= 2
        )
        assert ("not numbers" in said.cause) == (fault == "no number")
        assert engine.knobs == START and attached.status().regime == "fallback"
        held = SchedulerView(
            engine.now,
            8,
            1,
            4,
            4000,
            500,
            4000,
            1000,
            2000,
            0.0,
            0.005,
            0.005,
            START,
            engine.epoch,
            engine.limits,
            0.005,
        )
        assert attached.budget(held) == START.token_budget, "and no step has a budget of its own"
        engine.fault = ""
        engine.serve_for(5)
        assert attached.decisions[-1].regime != "fallback" and attached.status().overdue_s is None
        if name == "predictive":
            assert attainment(engine.serve_for(10), TARGET).share > 0.98


def test_nothing_to_do_is_no_fault() -> None:
    engine = Faulty(h200)
    with control(engine, slo=TARGET) as attached:
        for _ in range(5):
            engine.serve_for(2, rate=5)
            engine.wait(3600)
            assert attached.status().overdue_s is None
        assert not any(d.regime == "fallback" for d in attached.decisions)


@pytest.mark.parametrize("fault", ["lost", "no number"])
def test_nor_is_it_after_a_fault(fault: str) -> None:
    """The last steps before an hour of nothing were not heard of: that is no hour of silence."""
    engine = Faulty(h200)
    with control(engine, slo=TARGET) as attached:
        engine.serve_for(5)
        engine.fault = fault
        engine.play([(engine.now, 100, 20)])
        engine.wait(3600)
        assert attached.status().overdue_s is None
        engine.fault = ""
        engine.serve_for(5)
        assert not unheard(list(attached.decisions))


def test_nor_are_steps_of_many_seconds() -> None:
    engine = Faulty(lambda step: 500 * h200(step))
    with control(engine, slo=TARGET) as attached:
        engine.serve_for(10, rate=1)
        assert engine.now > 60
        assert not any(d.cause.startswith("no ") and "step record for" in d.cause for d in attached.decisions)


def test_requests_rejected_as_they_come_do_not_hide_that_records_are_missing() -> None:
    """As many come and go in each step as were there when it began."""
    engine = Faulty(h200)
    with control(engine, slo=TARGET) as attached:
        engine.serve_for(5)
        engine.fault = "lost"
        budget, last = attached.budget, engine.now

        def asked(view: SchedulerView) -> int:
            nonlocal last
            found = budget(view)
            for number in range(view.running + view.waiting):  # an engine may tell of them when the next step has begun
                came = (last + view.now) / 2
                late = request_record(arrival=came, finished=came, reason=FinishReason.REJECTED)
                attached.on_request(late._replace(id=f"late-{number}"))
            last = view.now
            return found

        attached.budget = asked  # type: ignore[method-assign]
        engine.serve_for(5)
        assert unheard(list(attached.decisions))


def unheard(decisions: list[Decision]) -> list[Decision]:
    return [d for d in decisions if d.cause.startswith("no ") and "step record for" in d.cause]


def test_who_watches_is_told_and_who_may_not_set_does_not() -> None:
    engine = Faulty(h200)
    with control(engine, slo=TARGET, observe_only=True) as attached:
        engine.serve_for(5)
        engine.fault = "no number"
        engine.serve_for(5)
        (said,) = unheard(list(attached.decisions))
        assert said.action == "hold" and engine.knobs == VLLM
    engine.fault = ""
    with control(engine, slo=TARGET) as attached:
        engine.serve_for(5)
        attached.set(token_budget=700)
        engine.fault = "no number"
        engine.serve_for(5)
        assert engine.knobs.token_budget == 700 and not unheard(list(attached.decisions))


@pytest.mark.usefixtures("socket_home")
def test_how_long_it_has_been_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Faulty(h200)
    with control(engine, slo=TARGET, steer=True) as attached:
        engine.serve_for(5)
        assert run(["watch", "--once"]) == 0
        assert "no usable record" not in capsys.readouterr().out and "no usable" not in str(attached.status())
        engine.fault, began = "lost", engine.now
        for due, prompt, output in poisson(12, 4, 1500, 150, seed=3, start=began):
            engine.run_until(due)
            engine.offer_now((due, prompt, output))
        silent = attached.status().overdue_s
        assert silent == pytest.approx(engine.now - began, abs=0.5) and silent > 3
        assert f"no step record for {silent:.1f} s" in str(attached.status())
        assert attached.status().as_dict()["overdue_s"] == pytest.approx(silent, abs=1e-3)
        assert run(["watch", "--once"]) == 0
        assert f"step records    no step record for {silent:.1f} s" in capsys.readouterr().out
