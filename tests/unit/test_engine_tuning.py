"""Knobs, policies, listeners and the view of a running engine."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from runtime import EngineClosedError, KnobLimits, Knobs, LeaseError, RequestRecord, SchedulerView, StepRecord
from runtime.llm.core import EngineCore
from runtime.tunable import Tunable
from tests.engines import Bench, bench
from tests.fakes import Heard
from tests.threads import in_threads


def test_an_engine_is_tunable() -> None:
    with bench(limits=KnobLimits(max_batch_size=8)) as b:
        tunable: Tunable = b.engine
        assert tunable.limits == tunable.effective_limits == KnobLimits(max_batch_size=8)
        assert tunable.epoch == 0


def test_knobs_can_be_named() -> None:
    with bench(knobs=Knobs(2, 0, 64, 64), limits=KnobLimits(token_budget=1024)) as b:
        assert b.engine.set_knobs(token_budget=512, max_wait_ms=1) == 1
        assert b.engine.knobs == Knobs(2, 1, 512, 64)
        for wrong, says in (
            (
                {"budget": 512},
                "budget is not a knob; the knobs are max_batch_size, max_wait_ms, token_budget, chunk_size",
            ),
            ({"token_budget": 2048}, "token_budget is 2048"),
            ({}, r"set_knobs takes Knobs\(…\), or knobs by name such as token_budget=512; given: nothing"),
            ({"knobs": {"token_budget": 512}}, "given: {'token_budget': 512}"),
            ({"knobs": Knobs(), "token_budget": 512}, "given: Knobs.*, token_budget"),
        ):
            with pytest.raises(ValueError, match=says):
                b.engine.set_knobs(**wrong)  # type: ignore[arg-type]
        assert b.engine.epoch == 1


def test_knobs_hold_from_the_very_next_step() -> None:
    with bench(knobs=Knobs(max_batch_size=2, chunk_size=64)) as b:
        keep = b.decoding(2)
        waiting = [b.engine.submit(list(range(100)), max_tokens=50) for _ in range(4)]
        during = b.executor.plans[-1]
        assert not during.chunks
        epoch = b.engine.set_knobs(Knobs(max_batch_size=5, chunk_size=10))
        assert (epoch, b.engine.epoch, b.engine.knobs.max_batch_size) == (1, 1, 5)
        at = len(b.executor.plans)
        b.executor.go()
        for stream in waiting[:3]:
            next(iter(stream))
        plan = b.executor.plans[at]
        assert (during.epoch, plan.epoch) == (0, 1)
        assert [chunk.count for chunk in plan.chunks] == [10, 10, 10]
        assert [record.epoch for record in b.heard.steps[: at + 1]] == [0] * at + [1]
        assert keep


def test_lowered_knobs_drain() -> None:
    with bench() as b:
        keep = b.decoding(6)
        b.engine.set_knobs(Knobs(max_batch_size=2))
        at = len(b.executor.plans)
        late = b.engine.submit([9], max_tokens=1)
        b.executor.go()
        assert late.result(timeout=30).token_ids == (10,)
        sizes = [plan.n_decode + len(plan.chunks) for plan in b.executor.plans[at:]]
        assert sizes[0] == 6 and sizes == sorted(sizes[:-1], reverse=True) + sizes[-1:]
        assert keep


def test_a_knob_wakes_an_engine_that_waits() -> None:
    with bench(knobs=Knobs(max_wait_ms=10000), limits=KnobLimits()) as b:
        stream = b.engine.submit("a", max_tokens=1)
        assert b.engine.view().waiting == 1 and not b.executor.plans
        b.engine.set_knobs(Knobs(max_wait_ms=0))
        assert stream.result(timeout=9).text == "b"  # the window was 10 s


def test_waiting_costs_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait window is slept through: the core is asked when a request comes, when it may go, and then per token."""
    steps = 0
    through = EngineCore.step

    def counted(self: EngineCore, now: float, until: float = float("inf")) -> object:
        nonlocal steps
        steps += 1
        return through(self, now, until)

    monkeypatch.setattr(EngineCore, "step", counted)
    with bench(knobs=Knobs(max_wait_ms=150)) as b:
        done = b.engine.submit("a", max_tokens=2).result(timeout=30)
        assert done.record.queue_time is not None and done.record.queue_time >= 0.15
        assert (
            steps <= 2 + 3 + 3
        )  # asked at arrival, woken (perhaps a hair early, twice), 2 steps, 1 that finds nothing


def test_setting_the_same_knobs_is_no_change() -> None:
    with bench() as b:
        knobs = b.engine.knobs
        assert b.engine.set_knobs(knobs) == 0
        assert b.engine.set_knobs(knobs.with_(token_budget=7)) == 1
        with pytest.raises(ValueError, match="token_budget"):
            b.engine.set_knobs(knobs.with_(token_budget=9000))
        assert (b.engine.epoch, b.engine.knobs.token_budget) == (1, 7)


def test_epochs_from_many_threads_are_all_different() -> None:
    with bench() as b:
        epochs: list[int] = []

        def turn(n: int) -> None:
            for i in range(20):
                epochs.append(b.engine.set_knobs(Knobs(token_budget=1000 + 20 * n + i)))

        in_threads(turn, 8)
        assert sorted(epochs) == list(range(1, 161))


def test_one_controller_at_a_time() -> None:
    with bench() as b:
        with b.engine.acquire("first") as lease:
            with pytest.raises(LeaseError, match="first controls this engine"):
                b.engine.acquire("second")
            with pytest.raises(LeaseError, match="first"):
                b.engine.set_knobs(Knobs(token_budget=3))
            with pytest.raises(LeaseError, match="first"):
                b.engine.set_step_policy(None)
            assert b.engine.set_knobs(Knobs(token_budget=3), lease=lease) == 1
        assert b.engine.set_knobs(Knobs(token_budget=4)) == 2


class Budget:
    def __init__(self) -> None:
        self.tokens = 5
        self.seen: list[SchedulerView] = []

    def budget(self, view: SchedulerView) -> int:
        self.seen.append(view)
        if self.tokens < 0:
            raise RuntimeError("no budget")
        return self.tokens


def test_a_step_policy_budgets_each_step(caplog: pytest.LogCaptureFixture) -> None:
    policy = Budget()
    with bench(step_policy=policy) as b:
        assert b.engine.submit(list(range(12)), max_tokens=1).result(timeout=30).token_ids == (12,)
        assert [plan.chunks[0].count for plan in b.executor.plans] == [5, 5, 2]
        assert {record.budget_used for record in b.heard.steps} == {5}
        assert b.engine.epoch == 0
        policy.tokens = -1
        assert b.engine.submit("a", max_tokens=1).result(timeout=30).text == "b"
        assert b.executor.plans[-1].budget_used == 2048
        b.engine.set_step_policy(Budget())
        assert b.engine.submit(list(range(50, 62)), max_tokens=1).result(timeout=30)
        assert b.executor.plans[-1].budget_used == 5
        b.engine.set_step_policy(None)
        assert b.engine.submit("a", max_tokens=1).result(timeout=30).text == "b"
        assert b.executor.plans[-1].budget_used == 2048
    assert caplog.text.count("the step policy failed") == 1


class Bad(Heard):
    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        raise RuntimeError("cannot bear it")


def test_a_listener_that_raises_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    with bench() as b:
        bad, after = Bad(), Heard()
        b.engine.subscribe(bad)
        b.engine.subscribe(after)
        assert b.engine.submit("a", max_tokens=3).result(timeout=30).text == "bcd"
        assert after.request() == b.heard.request()
        assert (len(bad.steps), len(after.steps), len(b.heard.steps)) == (1, 3, 3)
    assert [r.levelno for r in caplog.records if "will hear no more" in r.message] == [logging.WARNING]


def test_listeners_come_and_go() -> None:
    with bench() as b:
        one = Heard()
        leave = b.engine.subscribe(one)
        b.engine.submit("a", max_tokens=1).result(timeout=30)
        assert one.request().completed and b.heard.request()
        leave()
        leave()
        b.engine.submit("a", max_tokens=1).result(timeout=30)
        assert b.heard.request() and one.requests.empty()


class Asks(Heard):
    """A listener that uses the engine it listens to."""

    def __init__(self, b: Bench) -> None:
        super().__init__()
        self.b = b
        self.views: list[SchedulerView] = []
        self.errors: list[Exception] = []

    def on_step(self, record: StepRecord) -> None:
        engine = self.b.engine
        self.views.append(engine.view())
        engine.set_knobs(engine.knobs.with_(chunk_size=1 + len(self.views)))

    def on_request(self, record: RequestRecord) -> None:
        super().on_request(record)
        if self.errors:
            return
        self.stream = stream = self.b.engine.submit("a", max_tokens=1)
        try:
            stream.result()
        except RuntimeError as error:
            self.errors.append(error)
        try:
            next(iter(stream))
        except RuntimeError as error:
            self.errors.append(error)


def test_a_listener_may_use_the_engine_but_not_wait_for_it() -> None:
    with bench() as b:
        asks = Asks(b)
        b.engine.subscribe(asks)
        b.engine.submit("a", max_tokens=2).result(timeout=30)
        assert asks.request().completed and asks.request().completed
        assert [view.decoding for view in asks.views] == [1, 0, 0]
        assert b.engine.epoch == 3
        assert ["cannot wait for its tokens" in str(error) for error in asks.errors] == [True, True]


def test_view_is_taken_between_steps() -> None:
    with bench() as b:
        keep = b.decoding(3)
        waiting = [b.engine.submit("x", deadline_s=60) for _ in range(2)]
        views: list[SchedulerView] = []
        thread = threading.Thread(target=lambda: views.append(b.engine.view()))
        thread.start()
        while b.engine._loop._inbox.qsize() < len(waiting) + 1:  # until it has asked
            time.sleep(0.001)
        b.executor.go()
        thread.join(timeout=30)
        assert views[0].running + views[0].waiting == 5
        assert views[0].kv_total_blocks == 64
        assert len(waiting) == 2
        assert keep


def test_after_close_knobs_stand_still() -> None:
    with bench() as b:
        b.engine.close()
        assert b.engine.view().running == 0
        for call in (lambda: b.engine.set_knobs(Knobs()), lambda: b.engine.acquire("x")):
            with pytest.raises(EngineClosedError, match="the engine is closed"):
                call()
