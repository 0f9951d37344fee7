"""``autotune.control``: lease, log, pause, kill switch, and a controller that breaks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import control, load_profile, save_profile, shipped_profiles
from autotune.control.attach import attach
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Proposal
from autotune.control.decision_log import Decision, describe, read_decisions
from autotune.control.loop import Control
from autotune.cost.model import fit_cost_model
from runtime.batching.batcher import Batcher
from runtime.errors import AutotuneError, EngineClosedError, InputError, LeaseError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.records import RequestRecord, StepRecord, percentile
from runtime.slo import SLO
from runtime.tunable import Capabilities, Effect, Listener, SchedulerView
from tests.building import request_record
from tests.sample_profile import sample_profile
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson, slow_cpu
from tests.unit.test_cost_model import measured

SLO_ = SLO(ttft_ms=500, tpot_ms=30)
LOAD = poisson(15, 10, 1000, 200, seed=1)


class Fixed:
    """Always proposes the same; breaks on request."""

    name = "fixed"

    def __init__(self, knobs: Knobs, breaks: str = "") -> None:
        self.knobs = knobs
        self.breaks = breaks

    def observe_step(self, record: StepRecord) -> None:
        self._maybe("step")

    def observe_request(self, record: RequestRecord) -> None:
        self._maybe("request")

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        self._maybe("decide")
        return Proposal(self.knobs, "fixed", "because", {"n": 1})

    def budget(self, view: SchedulerView) -> int:
        self._maybe("budget")
        return view.knobs.token_budget

    def _maybe(self, where: str) -> None:
        if where == self.breaks:
            raise ZeroDivisionError(where)


def test_one_controller_at_a_time() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_):
        with pytest.raises(LeaseError, match="predictive controller controls this engine"):
            control(engine, slo=SLO_)
        with pytest.raises(LeaseError):
            engine.set_knobs(Knobs())
    with control(engine, slo="ttft=1s"):
        assert engine.slos["default"] == SLO(ttft_ms=1000)
    assert engine.core.settings.policy is None and not engine.listeners


def test_needs_an_slo() -> None:
    with pytest.raises(ValueError, match="slo is None, and the engine has none"):
        control(SimulatedEngine(h200))


def test_a_profile_made_without_an_slo_has_none_to_give() -> None:
    mean = sample_profile(objective="mean-e2e")
    with pytest.raises(ValueError, match=r"and the profile was made without one \(objective mean-e2e\); pass slo="):
        attach(SimulatedEngine(h200), profile=mean)
    with attach(SimulatedEngine(h200), profile=mean, slo=SLO_) as attached:
        assert attached.slo == SLO_
    with attach(SimulatedEngine(h200), profile=sample_profile()) as attached:
        assert attached.slo == sample_profile().slo


def test_a_profile_says_where_to_start(tmp_path: Path) -> None:
    """Its setting for balanced use, below this engine's ceilings, at once and whatever the guardrails think of the step."""
    path = tmp_path / "mine.yaml"
    save_profile(sample_profile({"balanced": Knobs(24, 0, 192, 128)}), path)
    limits = KnobLimits(chunk_size=100)
    engine = SimulatedEngine(h200, knobs=limits.clamp(VLLM), limits=limits)
    with control(engine, slo=SLO_, profile=path) as attached:
        assert engine.knobs == Knobs(24, 0, 192, 100)
        assert [(d.action, d.epoch) for d in attached.decisions] == [("attach", 0), ("set", 1)]
        assert attached.decisions[-1].cause == "starting knobs of the profile"
        attached.kill()
    assert engine.knobs == engine.limits.clamp(VLLM), "what it had before, not the profile's"
    with control(engine, slo=SLO_, profile=path, observe_only=True):
        assert engine.knobs == engine.limits.clamp(VLLM)


def test_a_profile_that_was_loaded_already_warms_the_controller_and_leaves_the_knobs_given() -> None:
    """What ``autotune serve --profile`` does: it chooses among the profile's settings itself."""
    loaded = sample_profile({"balanced": Knobs(24, 0, 192, 128)})
    loaded = loaded.model_copy(update={"cost_model": fit_cost_model(measured(lambda step: h200(step) / 5)).facts})
    engine, given = SimulatedEngine(h200), Knobs(64, 0, 512, 512)
    engine.set_knobs(given)
    with attach(engine, slo=SLO_, profile=loaded, start=given) as attached:
        assert isinstance(attached.controller, PredictiveController)
        assert engine.knobs == given and attached.controller.model.ready, "it knows the steps before the first"
        engine.play(LOAD)
        notes = [d.cause for d in attached.decisions if d.action == "note"]
        assert any("steps take 5" in note for note in notes), "and says that the profile is of a faster machine"


def test_observing_sets_nothing_but_says_what_it_would() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_, observe_only=True) as attached:
        engine.play(LOAD)
        assert engine.knobs == VLLM and engine.epoch == 0 and engine.core.settings.policy is None
        would = [d for d in attached.decisions if d.action == "observe"]
        assert would and "(would set)" in describe(would[0])[0]


def test_observing_leaves_the_engine_its_slo() -> None:
    """It is judged by its own, until somebody sets the engine's to another."""
    engine = SimulatedEngine(h200)
    engine.set_slo("ttft=9s")
    for others, slo in (({"default": SLO(ttft_ms=9000)}, "ttft=100ms"), ({}, "ttft=200ms")):
        engine._put_slo("default", others.get("default"))
        with control(engine, slo=slo, observe_only=True) as attached:
            assert engine.slos == others and attached.slo == SLO.parse(slo)
            for late in (0.05, 1.0):
                attached.on_request(request_record((late,)))
            assert (attached.status().attainment.met, str(attached.status().slo)) == (1, f"{slo}@99%")
            assert attached.decisions[0].evidence["slos"] == {"default": f"{slo}@99%"}
            engine.play(LOAD)
            assert attached.slo == SLO.parse(slo) and not any(d.action == "note" for d in attached.decisions)
            engine.set_slo("ttft=3s")
            attached.on_request(request_record((engine.now + 2.0,), arrival=engine.now))
            assert attached.status().attainment.met >= 2, "the engine's counts at once, for who comes from then on"
            engine.play([(engine.now + t, p, o) for t, p, o in LOAD[:9]])
            assert attached.slo == SLO(ttft_ms=3000)
            attached.kill()
            assert engine.slos == {"default": SLO(ttft_ms=3000)}


@pytest.mark.parametrize("former", [None, SLO(ttft_ms=9000)])
@pytest.mark.parametrize("end", ["kill", "fail", "fault", "close"])
def test_the_slo_from_before_comes_back_with_the_knobs(former: SLO | None, end: str) -> None:
    engine = SimulatedEngine(h200)
    engine._put_slo("default", former)
    attached = control(engine, slo=SLO_, controller=Fixed(Knobs(16, 0, 512, 512), "step" if end == "fail" else ""))
    assert engine.slos == engine.core.slack.slos == {"default": SLO_}
    engine.play(LOAD[:9])
    if end == "fault":
        attached.on_fault(ValueError("of the steering"), "it failed")
    elif end != "fail":
        getattr(attached, end)()
    assert attached.status().ended
    before = {} if former is None else {"default": former}
    stays = end == "close"
    assert (engine.slos, engine.knobs) == (({"default": SLO_}, Knobs(16, 0, 512, 512)) if stays else (before, VLLM))
    assert engine.core.slack.slos == engine.slos


def test_an_slo_that_somebody_else_has_set_stays() -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_)
    engine.set_slo("ttft=3s")
    attached.kill()
    assert engine.slos == {"default": SLO(ttft_ms=3000)}


def test_operator_bounds_and_pins_hold_from_the_start() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_, bounds={"max_batch_size": (16, 48)}, pinned={"chunk_size": 256}) as attached:
        assert engine.knobs.max_batch_size == 48 and engine.knobs.chunk_size == 256
        engine.play(LOAD)
        for decision in attached.decisions:
            if decision.action == "set":
                assert 16 <= decision.new["max_batch_size"] <= 48 and decision.new["chunk_size"] == 256
        first, *later = [d.cause for d in attached.decisions if d.action == "set"]
        assert first == "bounds and pins of the operator" and later
        assert all(cause.endswith("; chunk_size is pinned at 256") for cause in later), "it proposed another"


def test_it_is_detached_when_it_is_told_to_be_not_when_the_last_step_ended() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_) as attached:
        engine.play(LOAD)
        engine.run_until(engine.clock.now() + 10)
    assert attached.decisions[-1].action == "detach" and attached.decisions[-1].at == round(engine.clock.now(), 6)


def test_log_holds_every_decision_and_can_be_read_again(tmp_path: Path) -> None:
    engine, path = SimulatedEngine(h200), tmp_path / "run.jsonl"
    with control(engine, slo=SLO_, log=path) as attached:
        engine.play(LOAD)
    read = list(read_decisions(path))
    assert read == list(attached.decisions)
    assert read[0].action == "attach" and read[-1].action == "detach"
    sets = [d for d in read if d.action == "set"]
    assert sets and all(d.cause and d.evidence and d.changes for d in sets)
    assert [d.epoch for d in sets] == list(range(1, len(sets) + 1))
    assert describe(sets[0])[0].count("→") == len(sets[0].changes)


def test_pause_set_and_resume() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_, controller=Fixed(Knobs(16, 0, 512, 512))) as attached:
        attached.pause()
        engine.play(LOAD)
        assert engine.knobs == VLLM and attached.status().paused
        assert attached.set(max_batch_size=99).max_batch_size == 99
        with pytest.raises(ValueError, match="batch is not a knob"):
            attached.set(batch=3)
        attached.resume()
        engine.play([(engine.now + t, p, o) for t, p, o in LOAD])
        assert engine.knobs == Knobs(16, 0, 512, 512)
    with pytest.raises(AutotuneError, match="detached"):
        attached.pause()


def test_what_is_not_set_by_hand_holds_without_budgets_as_in_a_pause() -> None:
    def steered(do: Callable[[Control], object]) -> tuple[Knobs, list[Decision]]:
        engine = SimulatedEngine(slow_cpu, knobs=Knobs(256, 0, 2048, 2048), seed=1)
        with control(engine, slo="ttft=2s,tpot=30ms") as attached:
            engine.play(poisson(6, 30, 300, 60, seed=3))
            total = attached.since(0)[1]
            do(attached)
            return engine.knobs, attached.since(total)[0]

    paused, _ = steered(Control.pause)
    knobs, (last, by_hand) = steered(lambda attached: attached.set(max_wait_ms=3))
    assert knobs == paused.with_(max_wait_ms=3)
    assert (last.action, by_hand.action) == ("set", "pause") and "no per-step budgets from here on" in last.cause
    assert by_hand.changes == [("max_wait_ms", 0, 3)]


def test_knobs_cannot_be_set_by_hand_above_the_limits_nor_for_a_controller_that_fails() -> None:
    class Last(Fixed):
        def budgets_apply(self, applied: bool) -> None:
            self.breaks = "" if applied else "decide"

    engine = SimulatedEngine(h200, limits=KnobLimits(1024, 1000, 8192, 8192))
    attached = control(engine, slo=SLO_, controller=Last(Knobs(16, 0, 512, 512)))
    engine.play(LOAD[:9])
    with pytest.raises(ValueError, match="max_batch_size is 2000; it must be"):
        attached.set(max_batch_size=2000)
    assert not attached.status().paused and engine.knobs == Knobs(16, 0, 512, 512)
    with pytest.raises(AutotuneError, match="the controller has been detached"):
        attached.set(max_batch_size=20)
    assert attached.failed and engine.knobs == VLLM


def test_while_it_is_paused_admission_goes_by_what_is_measured() -> None:
    """What it last predicted, in a busy moment, says nothing of an engine that is idle by now."""
    engine = SimulatedEngine(slow_cpu)
    slo = SLO(ttft_ms=400, tpot_ms=30)
    with control(engine, slo=slo, admission=True) as attached:
        engine.play(poisson(4, 20, 200, 60, seed=2))
        for _ in range(40):
            engine.offer_now((engine.now, 20, 200))
        engine.run_until(engine.now + 2)
        assert attached.prefill_rate > 0
        attached.pause()
        assert (attached.prefill_rate, attached.prompts_per_step) == (0, 1)
        engine.run()
        served = engine.play([(engine.now + n, 800, 4) for n in range(1, 13)])
        assert all(r.completed for r in served)
        attached.resume()
        engine.play(poisson(4, 5, 200, 60, seed=3, start=engine.now))
        assert attached.prefill_rate > 0


def test_misses_under_knobs_set_by_hand_teach_nothing() -> None:
    engine, slo = SimulatedEngine(h200), SLO(tpot_ms=8)
    with control(engine, slo=slo) as attached:
        assert isinstance(attached.controller, PredictiveController)
        engine.play(poisson(15, 10, 1000, 200, seed=1))
        attached.pause()
        attached.set(token_budget=8192, chunk_size=8192)
        before = attached.controller.target
        missed = engine.play(poisson(25, 10, 1500, 100, seed=2, start=engine.now))
        assert sum(not slo.met(r) for r in missed) > 50
        attached.resume()
        assert attached.controller.target == before


def test_observing_learns_nothing_from_requests_that_its_proposals_did_not_serve() -> None:
    engine, slo = SimulatedEngine(h200), SLO(tpot_ms=8)
    with control(engine, slo=slo, observe_only=True) as attached:
        assert isinstance(attached.controller, PredictiveController)
        missed = engine.play(poisson(25, 20, 1500, 100, seed=2))
        assert sum(not slo.met(r) for r in missed) > 50
        assert attached.controller.target == 0.008
        assert any(d.action == "observe" for d in attached.decisions)
        assert not any("under others" in d.cause for d in attached.decisions)


def test_until_it_is_attached_nothing_is_decided() -> None:
    """A step that ends meanwhile: the engine serves on while a controller is attached to it."""

    class Serving(SimulatedEngine):
        def set_step_policy(self, policy: Any, **given: Any) -> None:
            super().set_step_policy(policy, **given)
            if policy is not None:
                self.run_until(self.now + 1)

    engine = Serving(h200)
    for _ in range(50):
        engine.offer_now((0.0, 1000, 200))
    with control(engine, slo=SLO_) as attached:
        assert [d.action for d in attached.decisions] == ["attach"]
        engine.run()
        assert len(attached.decisions) > 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_knobs_lowered_while_memory_is_short_come_back(by_hand: bool) -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_, controller=Fixed(VLLM))
    settings = engine.core.settings
    settings.limit(replace(engine.limits, max_batch_size=100))
    if by_hand:
        assert attached.set(token_budget=4096).max_batch_size == 100
    else:
        attached.kill()
    settings.limit(engine.limits)
    assert engine.knobs == (VLLM.with_(token_budget=4096) if by_hand else VLLM)
    attached.close()


def test_knobs_lowered_before_it_came_come_back_too() -> None:
    """It goes by the knobs that were asked for, as memory may last for them again."""
    engine = SimulatedEngine(h200)
    settings = engine.core.settings
    settings.limit(replace(engine.limits, max_batch_size=100))
    attached = control(engine, slo=SLO_)
    assert engine.knobs.max_batch_size == 100 and attached.controller.start == VLLM  # type: ignore[attr-defined]
    attached.set(token_budget=512)
    attached.kill()
    settings.limit(engine.limits)
    assert engine.knobs == VLLM
    settings.limit(replace(engine.limits, max_batch_size=100))
    start = Knobs(200, 0, 512, 512)
    with attach(engine, slo=SLO_, start=start, pinned={"token_budget": 256}) as attached:
        assert engine.knobs == Knobs(100, 0, 256, 512) and attached.controller.start == start  # type: ignore[attr-defined]
        settings.limit(engine.limits)
        assert engine.knobs == Knobs(200, 0, 256, 512)


def test_kill_switch_puts_the_old_knobs_back() -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_, controller=Fixed(Knobs(16, 0, 512, 512)))
    engine.play(LOAD)
    assert engine.knobs != VLLM
    attached.kill()
    attached.kill()
    assert engine.knobs == VLLM and engine.core.settings.policy is None and attached.status().ended
    engine.acquire("another").release()


def test_knobs_set_by_hand_while_a_controller_observes_are_restored_too() -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_, observe_only=True)
    attached.set(token_budget=512)
    attached.kill()
    assert engine.knobs == VLLM
    assert [(d.action, d.new["token_budget"]) for d in attached.latest(2)] == [("kill", 8192), ("detach", 8192)]


@pytest.mark.parametrize("observe_only", [False, True])
def test_knobs_that_nobody_set_are_not_restored(observe_only: bool) -> None:
    """They were lowered when the controller came, and have risen since."""
    engine = SimulatedEngine(h200)
    engine.core.settings.limit(replace(engine.limits, max_batch_size=100))
    attached = control(engine, slo=SLO_, controller=Fixed(VLLM), observe_only=observe_only)
    engine.core.settings.limit(engine.limits)
    attached.kill()
    assert engine.knobs == VLLM


@pytest.mark.parametrize(("effect", "why"), [("none", "has no such knob"), ("restart", "takes a restart for it")])
def test_a_knob_that_cannot_be_turned_is_not_set_and_pauses_nothing(effect: Effect, why: str) -> None:
    class Other(SimulatedEngine):
        @property
        def capabilities(self) -> Capabilities:
            known = super().capabilities
            return replace(known, knobs={**known.knobs, "chunk_size": effect})

    engine = Other(h200)
    with control(engine, slo=SLO_) as attached:
        with pytest.raises(ValueError, match=f"^chunk_size is 64; this engine {why}$"):
            attached.set(token_budget=512, chunk_size=64)
        assert engine.knobs == VLLM and not attached.status().paused
        assert "pause" not in [d.action for d in attached.decisions]


@pytest.mark.parametrize("where", ["step", "request", "decide", "budget"])
def test_a_controller_that_breaks_is_detached_and_the_engine_goes_on(where: str) -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_, controller=Fixed(Knobs(16, 0, 512, 512), where))
    records = engine.play(LOAD)
    assert len(records) == len(LOAD) and all(r.completed for r in records)
    assert attached.status().ended and engine.knobs == VLLM
    assert any("ZeroDivisionError" in d.cause for d in attached.decisions)


class Stingy(Fixed):
    """Grants each step what it was told to, which is no sensible number of tokens."""

    def __init__(self, granted: float) -> None:
        super().__init__(VLLM)
        self.granted = granted

    def budget(self, view: SchedulerView) -> int:
        return self.granted  # type: ignore[return-value]  # on purpose


class Hasty(SimulatedEngine):
    """Makes steps as soon as somebody listens."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        end = super().subscribe(listener)
        self.offer_now((self.now, 10, 3))
        self.run()
        return end


def test_a_controller_that_breaks_while_it_is_attached_leaves_nothing() -> None:
    engine = Hasty(h200)
    attached = attach(
        engine, slo=SLO_, controller=Fixed(VLLM, "step"), admission=True, start=Knobs(8, 0, 64, 64)
    )  # fmt: skip
    assert [d.action for d in attached.decisions] == ["attach", "set", "kill", "detach"]
    assert attached.failed and attached.status().ended
    assert engine.knobs == VLLM and not engine.slos and engine.admission is None
    assert engine.core.settings.policy is None and not engine.listeners
    engine.acquire("another").release()


class Half(SimulatedEngine):
    """Is closed before its admission policy can be set."""

    def set_admission(self, policy: Any, **given: Any) -> None:
        if policy is not None:
            raise EngineClosedError("the engine is closed")
        super().set_admission(policy, **given)


def test_an_engine_that_fails_while_a_controller_is_attached_has_nothing_of_it() -> None:
    engine, controller = Half(h200), Fixed(Knobs(16, 0, 512, 512))
    with pytest.raises(EngineClosedError):
        control(engine, slo=SLO_, controller=controller, admission=True)
    assert not engine.slos and engine.core.settings.policy is None and not engine.listeners
    with control(engine, slo=SLO_, controller=controller) as attached:
        assert not attached.status().ended


def test_a_controller_has_one_engine_at_a_time() -> None:
    one, other = SimulatedEngine(h200), SimulatedEngine(slow_cpu)
    controller = PredictiveController(SLO_, VLLM)
    with control(one, slo=SLO_, controller=controller) as attached:
        with pytest.raises(
            ValueError, match=r"controller is <.*PredictiveController.*>, which another engine has; make one"
        ):
            control(other, slo=SLO_, controller=controller)
        assert not other.slos and not attached.status().ended
        with control(other, slo=SLO_):  # the lease was not taken
            one.play(LOAD)
    with control(other, slo=SLO_, controller=controller) as attached:
        assert len(other.play(poisson(1, 5, 100, 20, seed=1))) > 1 and not attached.status().ended
        other.close()
        with control(SimulatedEngine(h200), slo=SLO_, controller=controller):
            pass


def test_a_budget_that_is_no_number_is_a_controller_that_breaks() -> None:
    engine = SimulatedEngine(h200)
    attached = control(engine, slo=SLO_, controller=Stingy(math.nan))
    records = engine.play(LOAD[:5])
    assert all(r.completed for r in records)
    assert attached.status().ended and any("Stingy.budget returned nan" in d.cause for d in attached.decisions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"controller": object()},
            "controller is <object .*; a Controller has name, observe_step, observe_request, decide",
        ),
        ({"interval_s": "a"}, "interval_s is 'a'; it must be a number of seconds above 0"),
        ({"interval_s": math.inf}, "interval_s is inf; it must be"),
    ],
)
def test_what_control_cannot_be_made_of(options: dict[str, Any], message: str) -> None:
    engine = SimulatedEngine(h200)
    with pytest.raises(ValueError, match=message):
        control(engine, slo=SLO_, **options)
    with control(engine, slo=SLO_):  # the lease was not taken
        pass


def test_a_request_is_judged_by_the_slo_of_its_class() -> None:
    engine = SimulatedEngine(h200)
    engine.set_slo(SLO(ttft_ms=60_000), request_class="batch")
    with control(engine, slo="ttft=100ms") as attached:
        for kind, late in (("default", 0.05), ("default", 2.0), ("batch", 2.0), ("unknown", 2.0)):
            attached.on_request(request_record((late,), request_class=kind))
        seen = attached.status().attainment
    assert (seen.met, seen.offered) == (2, 4)


def test_status_is_a_line_and_data() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_) as attached:
        assert "no request has ended yet" in str(attached.status())
        engine.play(LOAD)
        line, data = str(attached.status()), attached.status().as_dict()
        assert "attainment" in line and "regime" in line and json.dumps(data)
        assert data["knobs"] == engine.knobs.as_dict() and data["offered"] == len(LOAD)
        assert set(data["classes"]) == {"default"}
        fared = data["classes"]["default"]
        assert (fared["attainment"], fared["offered"], fared["slo"]) == (
            data["attainment"],
            data["offered"],
            data["slo"],
        )
        assert fared["targets_ms"] == {n: ms for n, ms in SLO_.targets_ms.items() if ms is not None}
        for name, found in fared["latencies_ms"].items():
            seen = [getattr(r, name) for r in engine.records if name != "itl" and getattr(r, name) is not None]
            assert found["p50"] == pytest.approx(1e3 * percentile(seen, 50), abs=1e-3)
            assert found["p99"] == pytest.approx(1e3 * percentile(seen, 99), abs=1e-3)
        assert set(fared["latencies_ms"]) == {"ttft", "tpot", "e2e"}


def test_an_slo_changed_on_the_engine_is_the_controllers_from_then_on() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo="ttft=2s,tpot=100ms") as attached:
        engine.play(LOAD)
        engine.set_slo("ttft=2s,tpot=20ms")
        engine.play([(engine.now + t, p, o) for t, p, o in LOAD])
        assert attached.slo == SLO(ttft_ms=2000, tpot_ms=20)
        assert attached.controller.target == pytest.approx(0.02, rel=0.5)


class Posted(SimulatedEngine):
    """Takes an admission policy at the next look at it, as an engine with a step in progress does."""

    def _post(self, change: Callable[[], None]) -> None:
        self.__dict__.setdefault("posted", []).append(change)

    def view(self) -> Any:
        for change in self.__dict__.pop("posted", []):
            change()
        return super().view()


def test_a_policy_switched_off_just_before_is_not_put_back() -> None:
    engine = Posted(h200)
    with control(engine, slo=SLO_, admission=True):
        engine.view()
        assert engine.admission == AdmissionPolicy()
    with control(engine, slo=SLO_):
        engine.view()
        assert engine.admission is None
    engine.view()
    assert engine.admission is None


def test_admission_is_on_while_it_is_attached() -> None:
    engine = SimulatedEngine(h200)
    with control(engine, slo=SLO_, admission=True) as attached:
        assert engine.admission == AdmissionPolicy()
        engine.play(LOAD)
        assert attached.prefill_rate > 1000
    assert engine.admission is None and attached.prefill_rate == 0
    engine.set_admission(AdmissionPolicy(queue_timeout=3.0))
    with control(engine, slo=SLO_):
        assert engine.admission == AdmissionPolicy(queue_timeout=3.0), "the engine's own stays"
    assert engine.admission == AdmissionPolicy(queue_timeout=3.0)
    with pytest.raises(ValueError, match="admission is 1; it must be True, False or an AdmissionPolicy"):
        control(engine, slo=SLO_, admission=1)


@pytest.mark.parametrize("own", [None, AdmissionPolicy(queue_timeout=3.0)])
def test_admission_that_is_false_is_off_while_it_is_attached(own: AdmissionPolicy | None) -> None:
    engine = SimulatedEngine(h200)
    engine.set_admission(own)
    with control(engine, slo=SLO_, admission=False) as attached:
        assert engine.admission is None
        assert all(r.completed for r in engine.play(LOAD[:9])) and not attached.status().ended
    assert engine.admission == own
    with Batcher(list, slo="e2e=1s") as batcher, control(batcher, admission=False):
        assert list(batcher.map([1, 2])) == [1, 2]


def test_admission_hears_what_a_controller_says_of_prefill() -> None:
    class Plain(Fixed):
        pass

    class Rated(Fixed, RateSource):
        prefill_rate = 1234.0

    class Half(Fixed):
        prefill_rate = 1234.0

    engine = SimulatedEngine(h200)
    for kind, rates in ((Plain, (0, 1, 0)), (Rated, (1234, 1, 0))):
        with control(engine, slo=SLO_, controller=kind(VLLM), admission=True) as attached:
            assert (attached.prefill_rate, attached.prompts_per_step, attached.pair_tokens) == rates
        assert (attached.prefill_rate, attached.prompts_per_step, attached.pair_tokens) == (0, 1, 0)
    lacking = "fixed controller failed: ValueError: it has prefill_rate but not prompts_per_step and pair_tokens; a RateSource"
    with pytest.raises(InputError, match=lacking):
        control(engine, slo=SLO_, controller=Half(VLLM))
    engine.acquire("who comes next").release()
    assert engine.acquire("another").release() is None


def test_a_shipped_profile_is_known_by_its_name() -> None:
    engine = SimulatedEngine(h200)
    shipped = load_profile(shipped_profiles()["cpu-2core-tiny"])
    with control(engine, slo=SLO_, profile="cpu-2core-tiny"):
        assert engine.knobs == shipped.knobs
    with pytest.raises(InputError, match=r"nobodys: cannot be read .* and is no shipped profile either"):
        control(engine, slo=SLO_, profile="nobodys")


def test_a_log_that_cannot_be_written_is_said_at_once_and_leaves_no_lease(tmp_path: Path) -> None:
    engine = SimulatedEngine(h200)
    with pytest.raises(InputError, match="cannot be written"):
        control(engine, slo=SLO_, log=tmp_path / "no" / "such.jsonl")
    engine.acquire("someone").release()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 is not a decision"),
        ('{"v":9}\n', "no version 1 decision"),
        ('{"v":1,"at":1}\n', "missing field action"),
    ],
)
def test_a_log_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        list(read_decisions(path))


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    knobs = Knobs().as_dict()
    line = Decision(1.0, "set", "r", knobs, knobs, 1, "c", {}).as_json()
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n" + line[:20])
    assert len(list(read_decisions(path))) == 1
