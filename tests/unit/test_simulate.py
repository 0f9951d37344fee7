"""The simulated engine: like a naive simulator written from the rules, event by event, and the same at any speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView
from tests.unit.reference_simulator import Asked, Reference
from tests.unit.simulated_cases import LIMITS, Case, case

CASES = range(150)


@dataclass
class Everything:
    """Keeps all records, those of runs taken apart."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    runs: int = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        assert record.steps == len(ends) > 1
        self.runs += 1
        self.steps += record.split(ends)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


@dataclass
class Allowance:
    """A step policy made of a function of the decodes."""

    of: Any

    def budget(self, view: SchedulerView) -> int:
        return int(self.of(view.decoding))


def events(made: Case) -> list[tuple[float, Asked | Knobs]]:
    """Arrivals and changes of knobs, in order."""
    happen: list[tuple[float, Asked | Knobs]] = [*((r.arrival, r) for r in made.requests), *made.changes]
    return sorted(happen, key=lambda event: event[0])


def simulated(made: Case, *, fast_forward: bool, noise: float = 0.0, policy: bool = True) -> tuple[Any, Everything]:
    engine = SimulatedEngine(
        made.machine,
        kv_tokens=made.blocks * made.block_size,
        block_size=made.block_size,
        limits=LIMITS,
        knobs=made.knobs,
        slo="ttft=50ms,tpot=9ms",
        ordering=made.ordering,
        prefix_cache=made.prefix_cache,
        noise=noise,
        seed=3,
        fast_forward=fast_forward,
    )
    if made.policy is not None and policy:
        engine.set_step_policy(Allowance(made.policy))
    heard = Everything()
    engine.subscribe(heard)
    for when, what in events(made):
        engine.run_until(when)
        if isinstance(what, Knobs):
            engine.set_knobs(what)
            continue
        assert isinstance(what, Asked)
        arrival = Arrival(0.0, len(what.tokens), what.output, what.segments, tenant=what.tenant)
        engine.offer(
            arrival, what.id, due=when, shared=made.shared,
            priority=what.priority, deadline=what.deadline, expires=what.expires,
        )  # fmt: skip
        engine.scheduler.check_integrity()
    engine.run()
    engine.scheduler.check_integrity()
    return engine, heard


def referred(made: Case) -> Reference:
    reference = Reference(
        made.machine, made.knobs, blocks=made.blocks, block_size=made.block_size, ordering=made.ordering,
        prefix_cache=made.prefix_cache, policy=made.policy,
    )  # fmt: skip
    for when, what in events(made):
        reference.run(when)
        if isinstance(what, Knobs):
            reference.knobs = what
        else:
            reference.add(what)
    reference.run()
    return reference


def planned(step: StepRecord) -> tuple[Any, ...]:
    """What a step was, without what was counted after it: of a run, that is as of its last step."""
    return (
        *step[: StepRecord._fields.index("running")],
        step.preemptions,
        step.epoch,
        step.budget_used,
        step.limited_by,
    )


def test_it_agrees_with_the_reference_event_by_event() -> None:
    seen: dict[str, int] = dict.fromkeys(("preempted", "cached", "timeout"), 0)
    for number in CASES:
        made = case(number)
        reference = referred(made)
        _, heard = simulated(made, fast_forward=True)
        assert [(s.start, s.end) for s in heard.steps] == reference.steps, f"case {number}"
        assert {r.id for r in heard.requests} == reference.ended.keys() == {r.id for r in made.requests}
        for record in heard.requests:
            theirs = reference.ended[record.id]
            assert record.token_times == theirs.times, f"case {number}, {record.id}"
            assert (record.reason, record.finished, record.scheduled, record.preemptions, record.cached_tokens) == (
                theirs.reason, theirs.finished, theirs.scheduled, theirs.preemptions, theirs.cached,
            ), f"case {number}, {record.id}"  # fmt: skip
            seen["preempted"] += record.preemptions
            seen["cached"] += record.cached_tokens
            seen["timeout"] += record.reason == "timeout"
    assert seen["preempted"] > 100 and seen["cached"] > 1000 and seen["timeout"] > 20, seen


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_fast_forward_changes_nothing(noise: float) -> None:
    runs = steps = 0
    for number in CASES:
        made = case(number)
        single, one = simulated(made, fast_forward=False, noise=noise)
        fast, many = simulated(made, fast_forward=True, noise=noise)
        assert many.requests == one.requests, f"case {number}"
        assert list(map(planned, many.steps)) == list(map(planned, one.steps)), f"case {number}"
        assert fast.clock.now() == single.clock.now()
        assert fast.scheduler.preemptions == single.scheduler.preemptions
        assert fast.scheduler.kv.free == fast.scheduler.kv.total
        runs, steps = runs + many.runs, steps + len(many.steps)
    assert runs > 500
