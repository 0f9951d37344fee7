"""The simulated engine as an engine: listeners that act, a full queue, cancelling, bounds, a controller."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest

from autotune import control
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, parse_workload
from runtime.errors import RejectedError
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.request import SamplingParams
from tests.unit.simulated_cases import LIMITS, Everything, RunMachine
from tests.unit.simulated_profile import scenario

FAST = RunMachine(base=1e-3, chunk=0.0, token=2e-5, context=1e-8, pair=0.0, overlap=False)


class Turning:
    """Listens, and turns a knob after the fifth step it hears: it must be heard between steps."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.heard = engine, 0

    def on_step(self, record: StepRecord) -> None:
        assert record.steps == 1
        self.heard += 1
        if self.heard == 5:
            self.engine.set_knobs(self.engine.knobs.with_(chunk_size=7))

    def on_request(self, record: RequestRecord) -> None:
        pass


def test_a_listener_that_acts_hears_every_step_by_itself() -> None:
    engine = SimulatedEngine(FAST, kv_tokens=20_000, limits=LIMITS)
    passive, turning = Everything(), Turning(engine)
    engine.subscribe(passive)
    stop = engine.subscribe(turning)
    engine.offer(Arrival(0.0, 5, 100, ((1, 5),)), "a", due=0.0)
    engine.run_until(0.05)
    assert passive.runs == 0 and turning.heard == len(passive.steps) > 5
    assert [s.epoch for s in passive.steps] == [0] * 5 + [1] * (len(passive.steps) - 5)
    stop()
    engine.run()
    assert passive.runs > 0 and len(passive.requests[0].token_times) == 100


class Chatting:
    """Asks again as soon as it is answered, or gives up: a closed loop made of a listener."""

    def __init__(self, engine: SimulatedEngine, rounds: int) -> None:
        self.engine, self.left = engine, rounds
        self.records: list[RequestRecord] = []

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.left -= 1
        if self.left:
            self.engine.submit([self.left] * 20, SamplingParams(max_tokens=5), timeout_s=0.012)


def test_a_listener_may_bring_the_next_request() -> None:
    """At the moment of its record, be it of a step or of a timeout while nothing ran."""
    engine = SimulatedEngine(FAST, kv_tokens=20_000, limits=LIMITS, knobs=Knobs(4, 15, 64, 64))
    chatting = Chatting(engine, 6)
    engine.subscribe(chatting)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5), timeout_s=0.012)  # the wait window outlasts it
    engine.run()
    assert [str(r.reason) for r in chatting.records] == ["timeout"] * 6
    for before, after in itertools.pairwise(chatting.records):
        assert after.arrival == before.finished and after.finished == pytest.approx(before.finished + 0.012)
    engine.set_knobs(Knobs(4, 0, 64, 64))
    chatting.left = 4
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    assert engine.run()
    assert [str(r.reason) for r in chatting.records[6:]] == ["length"] * 4
    assert engine.clock.now() == chatting.records[-1].finished < 1


def test_a_full_queue_rejects_and_says_so() -> None:
    engine = SimulatedEngine(FAST, kv_tokens=20_000, limits=LIMITS, max_queue=2)
    heard = Everything()
    engine.subscribe(heard)
    taken = [engine.offer(Arrival(0.0, 5, 3, ((i, 5),)), f"r{i}", due=0.0) for i in range(4)]
    assert [t is None for t in taken] == [False, False, True, True]
    assert [(r.id, str(r.reason)) for r in heard.requests] == [("r2", "rejected"), ("r3", "rejected")]
    with pytest.raises(RejectedError, match="max_queue is 2"):
        engine.submit([1, 2, 3])
    engine.run()
    assert sum(r.completed for r in heard.requests) == 2


def test_requests_can_be_cancelled_and_time_out() -> None:
    engine = SimulatedEngine(FAST, kv_tokens=20_000, limits=LIMITS)
    kept, dropped, late = (
        engine.submit([1, 2, 3], SamplingParams(max_tokens=50), timeout_s=t) for t in (None, None, 0.02)
    )
    engine.run_until(0.01)
    assert dropped.cancel() and not dropped.cancel()
    assert engine.view().running == 2
    engine.run()
    assert kept.record is not None and kept.record.output_tokens == 50
    assert dropped.record is not None and dropped.record.reason == "cancelled" and dropped.record.finished < 0.02
    assert late.record is not None and late.record.reason == "timeout" and 0.02 <= late.record.finished < 0.03
    assert engine.cancel_all() == 0
    with pytest.raises(ValueError, match="the KV pool holds"):
        engine.submit([1] * 30_000)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_tokens": 8}, "kv_tokens is 8; it must be a whole number of at least 16"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_queue": 0}, "max_queue is 0"),
        ({"noise": 1.5}, "noise is 1.5; it must be at least 0 and below 1"),
        ({"ordering": "lifo"}, "ordering is 'lifo'"),
    ],
)
def test_arguments_out_of_bounds(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        SimulatedEngine(FAST, **{"kv_tokens": 1600} | options)


def test_a_controller_decides_the_same_whether_or_not_steps_could_be_skipped() -> None:
    made = []
    for fast_forward in (True, False):
        engine = SimulatedEngine(FAST, kv_tokens=60_000, limits=LIMITS, fast_forward=fast_forward, noise=0.02)
        heard = Everything()
        engine.subscribe(heard)
        with control(engine, slo="ttft=200ms,tpot=4ms") as attached:
            engine.serve(list(parse_workload("poisson:prompt=60,output=50").at_rate(150.0).arrivals(2, limit=600)))
            engine.run()
            decisions = [d._replace(wall=None) for d in attached.decisions]
        assert engine.core.settings.policy is None and heard.runs == 0
        made.append((decisions, heard.requests, heard.steps))
    assert made[0] == made[1]
    assert sum(bool(d.changes) for d in made[0][0]) >= 2


def test_nothing_of_the_hosts_time_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole measurement under a controller, with the clocks of the host gone."""
    world = scenario()
    usual = world.measure(Knobs(64, 0, 512, 512), 10.0, 1, requests=60, controller="predictive")

    def looked(*_: Any) -> float:
        raise AssertionError("a clock of the host was looked at")

    with monkeypatch.context() as gone:
        for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
            gone.setattr(time, clock, looked)
            gone.setattr(time, f"{clock}_ns", looked)
        alone = world.measure(Knobs(64, 0, 512, 512), 10.0, 1, requests=60, controller="predictive")
    assert alone.model_dump(exclude={"wall_s"}) == usual.model_dump(exclude={"wall_s"})
