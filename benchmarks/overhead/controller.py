"""The controller's part of ``benchmarks.overhead``: recorded steps of an engine without a model, and what they cost it."""

from __future__ import annotations

import pickle
import random
import statistics
import time
from collections.abc import Callable, Mapping
from math import inf

from autotune import control
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.loop import Control
from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.plan import StepPlan, StepResult
from runtime.llm.scheduler import Scheduler
from runtime.records import RequestRecord, StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO
from runtime.tunable import Capabilities, Facts, Lease, LeaseHolder, Listener, SchedulerView, StepPolicy

KNOBS = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)
TARGET = SLO(ttft_ms=1000, tpot_ms=30)


class NullExecutor:
    """Takes no time and makes no tokens: what is left is the scheduler's own cost."""

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        return StepResult(ends=(now + 1.0,))

    def release(self, sequence: Sequence) -> None:
        pass


def request(number: int, prompt: int, output: int, now: float = 0.0) -> Request:
    hashes = tuple(number << 16 | block for block in range(prompt // 16))  # as with the prefix cache on, nothing shared
    return Request(f"r{number}", (1,) * prompt, SamplingParams(max_tokens=output), output, now, block_hashes=hashes)


class FormulaExecutor(NullExecutor):
    """Takes 8 ms and 0.1 ms a decode and 10 µs a prompt token, give or take: something to learn."""

    def __init__(self) -> None:
        self._dice = random.Random(1)

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        prefill = sum(chunk.count for chunk in plan.chunks)
        return StepResult(ends=(now + (8e-3 + 1e-4 * plan.n_decode + 1e-5 * prefill) * self._dice.gauss(1, 0.02),))


Event = tuple[StepRecord, list[RequestRecord], SchedulerView]


def served(batch: int, steps: int) -> list[Event]:
    """(step, requests that ended in it, view before the next) of a core that keeps ``batch`` sequences running."""
    scheduler = Scheduler(kv_blocks=batch * 80, slos={"default": TARGET})
    core = EngineCore(scheduler, FormulaExecutor(), knobs=KNOBS.with_(max_batch_size=batch))
    number, now = 0, 0.0
    for _ in range(batch):
        core.add(request(number := number + 1, 200 + 37 * number % 500, 100 + 37 * number % 200))
    events: list[Event] = []
    while len(events) < steps:
        outcome = core.step(now)
        now = outcome.end
        for _ in outcome.finished:
            core.add(request(number := number + 1, 200 + 37 * number % 500, 100 + 37 * number % 200, now))
        assert outcome.record is not None
        events.append((outcome.record, [record for _, record in outcome.finished], core.view(now)))
    assert statistics.mean(event[0].decodes for event in events) > 0.9 * batch, "the batch was not kept full"
    return events


_BLOCK = 200  # steps timed together: the clock of a process is coarse


def block_costs(events: list[Event], feed: Callable[[list[Event]], None]) -> list[float]:
    """µs of CPU that ``feed`` takes a step, for each block."""
    costs = []
    for begin in range(0, len(events) - _BLOCK + 1, _BLOCK):
        block = events[begin : begin + _BLOCK]
        started = time.process_time()
        feed(block)
        costs.append((time.process_time() - started) / len(block) * 1e6)
    return costs


def learn(made: PredictiveController, events: list[Event], *, every: float) -> None:
    """Observe each step and what ended in it, grant a budget, and decide every so many seconds (0: in every step)."""
    decided = -inf
    for step, ended, view in events:
        made.observe_step(step)
        for record in ended:
            made.observe_request(record)
        made.budget(view)
        if step.end - decided >= every:
            decided = step.end
            made.decide(step.end, view.knobs, view.effective_limits)


def observe(made: PredictiveController, events: list[Event]) -> None:
    """Each step and what ended in it, and no more."""
    for step, ended, _ in events:
        made.observe_step(step)
        for record in ended:
            made.observe_request(record)


def controller_cost(events: list[Event], rounds: int) -> float:
    """Median µs of CPU a step, in blocks: observe the step and what ended, grant a budget, decide."""
    made = PredictiveController(TARGET, KNOBS)
    block_costs(events, lambda block: learn(made, block, every=0.0))  # to settle
    return statistics.median(
        cost for _ in range(rounds) for cost in block_costs(events, lambda block: learn(made, block, every=0.0))
    )


def decision_cost(events: list[Event], rounds: int, every: float = 0.0) -> float:
    """Median µs of CPU a step to grant a budget, and to decide every so many seconds of the engine (0: in every step): what all
    takes, less what observing takes, block by block."""
    made = PredictiveController(TARGET, KNOBS)
    block_costs(events, lambda block: learn(made, block, every=every))  # to settle
    found = []
    for _ in range(rounds):
        everything = block_costs(events, lambda block: learn(made, block, every=every))
        found += [
            a - b for a, b in zip(everything, block_costs(events, lambda block: observe(made, block)), strict=True)
        ]
    return statistics.median(found)


class Recorded:
    """What ``autotune.control`` asks of an engine, without one."""

    def __init__(self) -> None:
        self.capabilities = Capabilities.live(admission=False)
        self.facts = Facts("recorded", kv_tokens=100_000, block_size=16)
        self.clock = VirtualClock()
        self.limits = self.effective_limits = KnobLimits()
        self.knobs, self.epoch, self.closed = KNOBS, 0, False
        self.admission = None
        self.slos: Mapping[str, SLO] = {}
        self.weights: Mapping[str, float] = {}
        self.listeners: list[Listener] = []
        self._leases = LeaseHolder()

    @property
    def wanted_knobs(self) -> Knobs:
        return self.knobs

    def set_slo(self, slo: SLO, *, request_class: str = "default") -> None: ...
    def set_admission(self, policy: object, *, source: object = None, lease: Lease | None = None) -> None: ...
    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None: ...

    def set_knobs(self, knobs: Knobs | None = None, *, lease: Lease | None = None, **changes: float) -> int:
        self.knobs, self.epoch = self.knobs.with_(**changes) if knobs is None else knobs, self.epoch + 1
        return self.epoch

    def acquire(self, owner: str) -> Lease:
        return self._leases.acquire(owner)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self.listeners.append(listener)
        return self.listeners.clear

    def view(self) -> SchedulerView:
        return SchedulerView(0.0, 0, 0, 0, 0, 0, 0, 1, 1, inf, inf, inf, self.knobs, self.epoch, self.limits)


def attached_cost(events: list[Event], rounds: int) -> float:
    """Median µs of CPU a step of all that an attached controller does, deciding every 0.25 s of its time."""
    costs: list[float] = []
    for _ in range(rounds):
        with control(Recorded(), slo=TARGET) as attached:
            costs += block_costs(events, attached_feed(attached))
            assert not attached.status().ended
    return statistics.median(costs)


def attached_feed(attached: Control) -> Callable[[list[Event]], None]:
    def feed(block: list[Event]) -> None:
        for step, ended, view in block:
            attached.on_step(step)
            for record in ended:
                attached.on_request(record)
            attached.budget(view)

    return feed


def controller_growth(events: list[Event], steps: int) -> list[tuple[int, int, float]]:
    """(steps seen, bytes of the controller's state, median µs of a step since the row before), ten rows."""
    made = PredictiveController(TARGET, KNOBS)
    rows, seen = [], 0
    for _ in range(10):
        costs = []
        for _ in range(max(1, steps // 10 // len(events))):
            started = time.process_time()
            learn(made, events, every=inf)
            costs.append((time.process_time() - started) / len(events) * 1e6)
            seen += len(events)
            made.decide(0.0, KNOBS, KnobLimits())
        rows.append((seen, len(pickle.dumps(made)), statistics.median(costs)))
    return rows
