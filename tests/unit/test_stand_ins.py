"""What hears an engine and holds it does not keep it alive: its threads hold stand-ins."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import autotune
from runtime import Batcher
from runtime.llm.engine import Engine
from runtime.llm.prefill_rate import RateSource
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView
from tests.fakes import FakeExecutor, FakeModel, Records
from tests.unit.batcher_doubles import double
from tests.waiting import until


class Holder(RateSource):
    """Hears records, gives budgets and names a rate, and holds what it is given to."""

    holds_engine = True

    def __init__(self, held: object) -> None:
        self.held = held

    def on_step(self, record: StepRecord) -> None: ...

    def on_request(self, record: RequestRecord) -> None: ...

    def budget(self, view: SchedulerView) -> int:
        return 100

    @property
    def prefill_rate(self) -> float:
        return 1000.0


class Counting(Records):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held, self.holds_engine = held, True


def listener(tunable: Any) -> None:
    tunable.subscribe(Holder(tunable))


def policy(tunable: Any) -> None:
    tunable.set_step_policy(Holder(tunable))


def source(tunable: Any) -> None:
    tunable.set_admission(True, source=Holder(tunable))


def controller(tunable: Any) -> None:
    autotune.control(tunable, slo="e2e=1s" if isinstance(tunable, Batcher) else "ttft=1s")


def steered(tunable: Any) -> None:
    autotune.control(tunable, slo="ttft=1s", steer=True)


def engine() -> Engine:
    return Engine(FakeModel(), executor=FakeExecutor(), kv_tokens=1024)


def threads_of(made: Callable[[], Any], act: Callable[[Any], None]) -> list[threading.Thread]:
    """Those of what is ``made``, used and forgotten."""
    before = {*threading.enumerate()}
    tunable = made()
    act(tunable)
    if isinstance(tunable, Batcher):
        assert tunable.submit(1).result(30) == 2
    else:
        assert tunable.generate([[7]], max_tokens=2)
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("act", [listener, policy, source, controller, steered])
def test_an_engine_that_is_forgotten_stops_whoever_hears_it(act: Callable[[Any], None]) -> None:
    threads = threads_of(engine, act)
    assert threads
    until(lambda: gc.collect() is not None and not any(thread.is_alive() for thread in threads))


@pytest.mark.parametrize("act", [listener, policy, controller])
def test_a_batcher_that_is_forgotten_stops_whoever_hears_it(act: Callable[[Any], None]) -> None:
    threads = threads_of(lambda: Batcher(double), act)
    assert threads
    until(lambda: gc.collect() is not None and not any(thread.is_alive() for thread in threads))


def test_what_nobody_else_holds_hears_on_until_it_is_ended() -> None:
    with engine() as one:
        heard = Counting(one)
        requests = heard.requests
        end = one.subscribe(heard)
        del heard
        gc.collect()
        one.generate([[7]], max_tokens=2)
        until(lambda: len(requests) == 1)
        end()
        end()
        one.generate([[7]], max_tokens=2)
        assert len(requests) == 1 and not one._held_listeners


def test_a_policy_that_nobody_else_holds_gives_budgets_until_another_does() -> None:
    with engine() as one:
        one.set_step_policy(Holder(None))
        gc.collect()
        policy = one._settings.policy
        assert policy is not None and policy.budget(one.view()) == 100
        one.set_step_policy(None)
        assert policy.budget(one.view()) == one.knobs.token_budget and one._settings.policy is None
