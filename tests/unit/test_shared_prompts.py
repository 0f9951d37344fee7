"""Prompts with a beginning in common that come at once: it is computed once, counted once, and nobody is rejected for it."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from runtime.errors import StepFailedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.holdings import Computing
from runtime.llm.kv_blocks import KVBlocks
from runtime.llm.prefill_rate import RateSource
from runtime.ordering import Fcfs
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO, RequestClass
from tests.unit.control_world import Formula
from tests.unit.late_executor import LateWorld
from tests.unit.scheduler_world import BLOCK, World, chain
from tests.unit.test_scheduler import chunks, last, world

DOCUMENT = [7] * 40
"""Of ten blocks."""


def shared(**options: Any) -> World:
    return world(Knobs(100, 0, 200, 200), worth_waiting=2 * BLOCK, **options)


def test_a_prompt_waits_a_step_for_what_another_computes_in_it() -> None:
    w = shared()
    for own in range(4):
        w.add([*DOCUMENT, own, own])
    assert chunks(last(w)) == [("r1", 0, 42)]
    assert chunks(last(w)) == [("r2", 40, 2), ("r3", 40, 2), ("r4", 40, 2)]
    w.drain()


def test_others_go_past_one_that_waits_for_a_prompt_in_progress() -> None:
    w = shared()
    w.set_knobs(Knobs(100, 0, 20, 12))
    w.add(DOCUMENT)
    w.add([*DOCUMENT, 1])
    w.add([5] * 6)
    assert chunks(last(w)) == [("r1", 0, 12), ("r3", 0, 6)]
    assert [chunks(last(w)) for _ in range(3)] == [[("r1", at, 12)] for at in (12, 24)] + [
        [("r1", 36, 4), ("r2", 36, 5)]
    ]
    w.drain()


def test_little_in_common_is_computed_twice() -> None:
    w = shared()
    w.add([7] * BLOCK + [1] * 9)
    w.add([7] * BLOCK + [2] * 9)
    assert chunks(last(w)) == [("r1", 0, 13), ("r2", 0, 13)]
    w.drain()


def test_what_one_in_progress_has_computed_before_is_shared_and_the_rest_of_it_awaited() -> None:
    w = shared()
    w.set_knobs(Knobs(100, 0, 16, 16))
    w.add(DOCUMENT)
    last(w)
    w.add([*DOCUMENT, 1])
    w.set_knobs(Knobs(100, 0, 200, 200))
    assert chunks(last(w)) == [("r1", 16, 24)]
    assert chunks(last(w)) == [("r2", 40, 1)]
    w.drain()


def test_one_in_a_hurry_does_not_wait_for_a_prompt_that_goes_after_it() -> None:
    w = shared()
    w.set_knobs(Knobs(100, 0, 16, 16))
    w.add(DOCUMENT)
    last(w)
    w.set_knobs(Knobs(100, 0, 200, 200))
    w.add([*DOCUMENT, 1], priority=1)
    assert chunks(last(w)) == [("r2", 16, 25)]
    w.drain()


@pytest.mark.parametrize("what", ["cancelled", "failed"])
def test_where_the_other_ends_early_the_next_computes_all_of_it(what: str) -> None:
    w = shared()
    w.set_knobs(Knobs(100, 0, 16, 16))
    first = w.add(DOCUMENT)
    for own in range(2):
        w.add([*DOCUMENT, own])
    if what == "failed":
        w.executor.fail = lambda sequence: sequence is first
    last(w)
    w.executor.fail = lambda sequence: False
    w.set_knobs(Knobs(100, 0, 200, 200))
    if what == "cancelled":
        w.cancel(first)
    known = 16 if what == "cancelled" else 0
    assert chunks(last(w)) == [("r2", known, 41 - known)]
    assert chunks(last(w)) == [("r3", 40, 1)]
    w.drain()


def test_where_steps_overlap_it_waits_until_what_is_in_flight_has_come() -> None:
    late = LateWorld(True, kv_blocks=60, worth_waiting=2 * BLOCK)
    late.set_knobs(Knobs(8, 0, 100, 100))
    late.add(DOCUMENT, 1)  # it ends with the step that computes it: nothing else runs
    late.add([*DOCUMENT, 5], 3)
    while late.live:
        late.step()
    assert [late.records[name].cached_tokens for name in ("r0", "r1")] == [0, 40]
    assert all(record.reason in (FinishReason.LENGTH, FinishReason.STOP) for record in late.records.values())


def test_work_that_waits_counts_what_is_in_common_once() -> None:
    w = shared()
    for own in range(4):
        w.add([*DOCUMENT, own, own])
    assert w.scheduler.waiting.tokens == 42 + 3 * 2
    first, *others = list(w.live)
    w.cancel(first)
    assert w.scheduler.waiting.tokens == 3 * 2, "until its turn each counts on the others"
    assert chunks(last(w)) == [("r2", 0, 42)]
    w.cancel(others[0])
    assert chunks(last(w)) == [("r3", 40, 2), ("r4", 40, 2)]
    w.drain()


def test_no_more_blocks_are_remembered_than_the_pool_has() -> None:
    w = World(kv_blocks=30)
    for own in range(9):
        w.add([own] * 24)  # six blocks
    assert len(w.scheduler.holdings._coming) == 30
    assert w.scheduler.waiting.tokens == 9 * 24
    w.drain()
    assert not len(w.scheduler.holdings._coming)


def test_an_ordering_that_raises_leaves_nothing_to_count_on() -> None:
    class Raises(Fcfs):
        def key(self, request: Request) -> float:
            raise ValueError("no place")

    w = shared()
    own = w.scheduler.waiting.ordering
    w.scheduler.reorder(Raises())
    with pytest.raises(StepFailedError):
        w.add(DOCUMENT)
    w.scheduler.reorder(own)
    w.live.clear()
    w.scheduler.check_integrity()
    assert not len(w.scheduler.holdings._coming)


def test_a_prompt_with_fewer_names_than_blocks_awaits_nobody() -> None:
    """As of one that was preempted, where outputs are not named."""

    def sequence(named: int) -> Sequence:
        request = Request("r", tuple(DOCUMENT), SamplingParams(), 4, 0.0, block_hashes=chain(DOCUMENT)[:named])
        return Sequence(request)

    computing = Computing(KVBlocks(100, BLOCK), BLOCK)
    computing.add(sequence(10), 5 * BLOCK)
    assert computing.awaited_by(sequence(10)) and not computing.awaited_by(sequence(3))


# -- who is rejected --------------------------------------------------------------------------------------------------


class Rate(RateSource):
    prefill_rate, prompts_per_step, pair_tokens = 10_000.0, 1, 0.0


class Engine(SimulatedEngine):
    """10,000 prompt tokens a second, 1 ms a step."""

    def __init__(self, budget: int, **options: Any) -> None:
        super().__init__(
            Formula(lambda step: 1e-3 + 1e-4 * step.prefill_tokens), knobs=Knobs(64, 0, budget, budget),
            limits=KnobLimits(), kv_tokens=100_000, slo="ttft=500ms", admission=AdmissionPolicy(), **options,
        )  # fmt: skip
        self.set_admission(self.admission, source=Rate())
        self.records: list[RequestRecord] = []
        self.asked = 0
        self.subscribe(self)

    def on_step(self, record: object) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def ask(self, prompts: int, document: int, own: int, at: float = 0.0, request_class: str = "default") -> None:
        for _ in range(prompts):
            self.asked += 1
            arrival = Arrival(at, document + own, 2, ((0, document), (self.asked, own)), request_class=request_class)
            self.offer(arrival, f"r{self.asked}", due=at, shared=True)


@pytest.mark.parametrize("budget", [512, 8192])
def test_eight_questions_about_one_long_document_are_all_answered(budget: int) -> None:
    """Counted each for itself they would take 2.4 s; together they take .33."""
    engine = Engine(budget)
    engine.ask(8, 3000, 32)
    engine.run()
    assert [r.reason for r in engine.records] == [FinishReason.LENGTH] * 8
    assert max(r.ttft or 9.0 for r in engine.records) < 0.36


def test_where_the_one_that_all_count_on_is_cancelled_the_next_takes_its_place() -> None:
    engine = Engine(512)
    engine.ask(1, 0, 2500)
    engine.run_until(0.01)
    engine.ask(3, 1500, 32, at=0.01)
    first, *_ = sorted(engine.scheduler.waiting, key=lambda s: s.key)
    engine.core.finish(first, FinishReason.CANCELLED, 0.02)
    engine.ask(1, 0, 1300, at=0.02)  # accepted: those before it still count on the first
    engine.run()
    ends = {r.id: (r.reason, r.cached_tokens) for r in engine.records}
    assert ends == {
        "r1": (FinishReason.LENGTH, 0), "r3": (FinishReason.LENGTH, 0), "r4": (FinishReason.LENGTH, 1488),
        "r5": (FinishReason.REJECTED, 0),
    }  # fmt: skip


def test_nobody_counts_on_one_that_is_relegated() -> None:
    """It is computed last: who comes for the same document computes all of it before."""
    engine = Engine(512, classes=[RequestClass("batch", SLO(ttft_ms=100), weight=0.2)])
    engine.ask(1, 0, 3000)
    engine.run_until(0.01)
    engine.ask(1, 1500, 32, at=0.01, request_class="batch")  # late behind the other
    assert engine.scheduler.waiting.relegated_tokens == 1532
    engine.ask(1, 2500, 32, at=0.01)
    (refused,) = engine.records
    assert (refused.id, refused.reason) == ("r3", FinishReason.REJECTED), (
        "it is late whoever computes 1,500 of it some day"
    )
