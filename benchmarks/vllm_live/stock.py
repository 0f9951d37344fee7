"""vLLM's own scheduler in the engine that is steered otherwise: for as long as a turn takes, the steering only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from autotune.bench import Contender
from autotune.engines import Engine
from autotune.engines.vllm import VllmEngine
from autotune.engines.vllm.scheduler import _queue_by
from autotune.engines.vllm.steering import Steering
from runtime.slo import SLO


@dataclass(frozen=True)
class Stock(Contender):
    """vLLM as it is: its queue, its order, the limits that it was started with."""

    def at_work(self, engine: Engine, slo: SLO) -> AbstractContextManager[None]:
        return let_go(engine)


@contextmanager
def let_go(engine: Engine) -> Iterator[None]:
    """In the block, vLLM's own code schedules. What is left of ours records steps and requests, by which turns are judged. A
    simulated engine has no such code, and serves at its knobs."""
    if not isinstance(engine, VllmEngine):
        yield
        return
    steering, ask = engine._core.steering, engine._loop.ask
    scheduler = engine._core._llm.engine_core.engine_core.scheduler
    ask(partial(_let_go, scheduler, steering))
    try:
        yield
    finally:
        ask(partial(_take_back, scheduler, steering))


def _let_go(scheduler: Any, steering: Steering) -> None:
    scheduler.let_go()
    scheduler.steering = steering
    vars(steering)["prepare"] = partial(_note, steering)


def _note(steering: Steering) -> float:
    """In place of :meth:`Steering.prepare`: change nothing, and note under what the coming step is planned."""
    epoch, knobs = steering.settings.current
    steering._preparing = steering.clock.now(), epoch, knobs, knobs.token_budget, steering._slots(knobs), -inf
    steering._prepared = True
    return -inf


def _take_back(scheduler: Any, steering: Steering) -> None:
    """As it is installed; the limits follow with the next step."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    del vars(steering)["prepare"]
    scheduler.adaptive_long_prefill_threshold = False
    _queue_by(scheduler, SchedulingPolicy.PRIORITY)
