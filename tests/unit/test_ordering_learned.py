"""Orderings that age, learn, or weigh deadline against work: their keys to the number, and who waits how long at most."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from autotune.simulate import SimulatedEngine
from runtime.batching.groupings import grouping_of
from runtime.batching.item import WAITING, Item
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.waiting import WaitingQueue
from runtime.ordering import (
    AGEING_STEP_S,
    ORDERINGS,
    SHORTEST_STEP_S,
    Ageing,
    Fcfs,
    Hybrid,
    LeastSlack,
    Ordering,
    Queued,
    ShortestExpected,
    ordering_of,
)
from runtime.ordering.learned import OutputLengths, TokenTimes
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO, RequestClass
from tests.fakes import Records
from tests.unit.simulated_cases import LIMITS, Machine

SLOS: Mapping[str, SLO] = {
    "default": SLO(ttft_ms=500),
    "long": SLO(ttft_ms=10_000),
    "batch": SLO(e2e_ms=60_000),
    "both": SLO(ttft_ms=2000, e2e_ms=20_000),
}
FAST = Machine(base=5e-3, chunk=0.0, token=1e-4, context=0.0, pair=0.0, overlap=False)


def prompt(arrival: float, size: int, request_class: str = "default", **fields: Any) -> Request:
    return Request("r", (), SamplingParams(), 4, arrival, request_class=request_class, prompt_len=size, **fields)


def ended(
    output: int, size: int = 100, request_class: str = "default", gap_s: float = 0.02, reason: str = "length"
) -> RequestRecord:
    times = [1.0 + gap_s * i for i in range(output)]
    return RequestRecord(
        "r", 0.0, 0.5, times[-1], times, size, output, 0, 0, FinishReason(reason), request_class, "", 0, 0, 0
    )


def step(seconds: float, tokens: int, *, decodes: int = 0, failed: int = 0) -> StepRecord:
    return StepRecord(
        3.0, 3.0 + seconds, 1, decodes, 100 * decodes, tokens > 0, tokens, tokens, tokens * tokens, decodes, 1, 0, 0, 99, 0, 0,
        512, LimitedBy.BUDGET, failed,
    )  # fmt: skip


class TestOutputLengths:
    def test_it_is_the_mean_of_like_prompts_of_the_class_of_all_in_turn(self) -> None:
        learned = OutputLengths()
        assert learned.expected("chat", 100) == 0
        learned.observe(ended(30, 100, "chat"))
        assert learned.expected("chat", 100) == learned.expected("other", 5) == 30
        for _ in range(16):
            learned.observe(ended(200, 2000, "chat"))
            learned.observe(ended(5, 100, "batch"))
        assert learned.expected("chat", 1500) == 200, "1500 and 2000 have as many binary digits"
        assert learned.expected("chat", 100) == (30 + 16 * 200) / 17, "one alike is not enough"
        assert learned.expected("batch", 9) == 5
        assert learned.expected("other", 9) == (30 + 16 * 205) / 33

    def test_the_latest_count_and_only_whole_answers(self) -> None:
        learned = OutputLengths()
        for output in (10, 70):
            for _ in range(256):
                learned.observe(ended(output))
        assert learned.expected("default", 100) == 70
        for reason in ("cancelled", "timeout", "error", "rejected"):
            learned.observe(ended(1, reason=reason))
        assert learned.expected("default", 100) == 70
        learned.observe(ended(326, reason="stop"))
        assert learned.expected("default", 100) == 71

    def test_ever_new_classes_are_forgotten(self) -> None:
        learned = OutputLengths()
        for number in range(10_000):
            learned.observe(ended(8, request_class=f"class-{number}"))
        assert len(learned._means) < 5000
        assert learned.expected("class-0", 100) == learned.expected("class-9999", 100) == 8


class TestTokenTimes:
    def test_prompts_by_steps_and_outputs_by_requests(self) -> None:
        times = TokenTimes()
        assert times.prompt_token_s == times.output_token_s == 0
        times.on_step(step(0.5, 0, decodes=8))
        times.on_step(step(0.5, 100, failed=1))
        assert times.prompt_token_s == 0, "nothing of a step without prompts, nor of one that failed"
        times.on_step(step(0.1, 100))
        assert times.prompt_token_s == pytest.approx(0.001)
        times.on_request(ended(1))
        times.on_request(ended(9, reason="timeout"))
        assert times.output_token_s == 0
        times.on_request(ended(11, gap_s=0.03))
        assert times.output_token_s == pytest.approx(0.03)

    def test_a_machine_that_slows_down_is_followed(self) -> None:
        times = TokenTimes()
        for seconds in (0.1, 0.3):
            for _ in range(200):
                times.on_step(step(seconds, 100))
        assert times.prompt_token_s == pytest.approx(0.003, rel=0.05)


class TestKeys:
    def test_shortest_expected(self) -> None:
        order = ShortestExpected()
        assert order.key(prompt(3.0, 200)) == 3.0 + 200 * SHORTEST_STEP_S, "before anything is known"
        order.on_request(ended(400))
        assert order.key(prompt(3.0, 200)) == 3.0 + 600 * SHORTEST_STEP_S
        assert ShortestExpected(0.5).key(prompt(3.0, 2)) == 4.0

    def test_max_tokens_is_not_looked_at(self) -> None:
        order = ShortestExpected()
        few, many = prompt(0.0, 10), prompt(0.0, 10)
        few.max_tokens, many.max_tokens = 1, 4096
        assert order.key(few) == order.key(many)

    def test_ageing(self) -> None:
        order = Ageing()
        assert order.key(prompt(3.0, 1024)) == 3.0 + 10 * AGEING_STEP_S
        assert order.key(prompt(3.0, 1024, priority=1)) == order.key(prompt(3.0, 512))
        assert order.key(prompt(0.0, 1024)) == order.key(prompt(AGEING_STEP_S, 512)), "two seconds are worth a level"
        assert order.key(prompt(0.0, 1, priority=2**31)) == order.key(prompt(0.0, 1, priority=8)) == -8 * AGEING_STEP_S
        assert order.key(prompt(0.0, 1, priority=-99)) == 8 * AGEING_STEP_S

    def test_hybrid(self) -> None:
        slos = dict(SLOS)
        order = Hybrid(slos, alpha=0.001)
        assert order.key(prompt(3.0, 200)) == pytest.approx(3.0 + 0.5 + 0.2)
        assert order.key(prompt(3.0, 200, "long")) == pytest.approx(3.0 + 10 + 0.2)
        assert order.key(prompt(3.0, 200, deadline=9.0)) == pytest.approx(9.0 + 0.2)
        assert order.key(prompt(3.0, 200, "batch")) == pytest.approx(3.0 + 60 + 0.2)
        order.on_request(ended(5000, 200, "batch"))
        assert order.key(prompt(3.0, 200, "batch")) == pytest.approx(3.0 + 60 + 0.2 + 5), "its whole answer is due"
        assert order.key(prompt(3.0, 200, "both")) == pytest.approx(3.0 + 2 + 0.2), "of these the first token is"
        slos["default"] = SLO(ttft_ms=2000)
        assert order.key(prompt(3.0, 200)) == pytest.approx(5.2), "SLOs are those in force"
        assert Hybrid(slos, alpha=0.0).key(prompt(3.0, 200)) == 5.0
        assert Hybrid().key(prompt(3.0, 100)) == pytest.approx(63.8)

    def test_least_slack(self) -> None:
        order = LeastSlack(SLOS)
        assert order.key(prompt(3.0, 200)) == 3.5, "the deadline, before anything is known"
        order.on_step(step(0.1, 100))
        assert order.key(prompt(3.0, 200)) == pytest.approx(3.5 - 0.2)
        assert order.key(prompt(3.0, 200, deadline=9.0)) == pytest.approx(9.0 - 0.2)
        assert order.key(prompt(3.0, 200, "batch")) == pytest.approx(63.0 - 0.2)
        assert order.key(prompt(3.0, 200, "both")) == pytest.approx(3.0 + 2 - 0.2), (
            "its first token is due before its last"
        )
        order.on_request(ended(1000, 200, "batch", gap_s=0.03))
        assert order.key(prompt(3.0, 200, "batch")) == pytest.approx(63.0 - 0.2 - 30.0)
        order.on_request(ended(2000, 200, "both", gap_s=0.03))
        assert order.key(prompt(3.0, 200, "both")) < 0, "an answer of a minute is not to be had in 20 s"
        assert LeastSlack().key(prompt(3.0, 200)) == 63.0
        assert LeastSlack().key(prompt(3.0, 200, deadline=math.inf)) == 63.0

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda: ShortestExpected(0), "step_s is 0; it must be a number of seconds above 0"),
            (lambda: Ageing(math.inf), "step_s is inf; it must be a number of seconds above 0"),
            (lambda: Hybrid(alpha=-1), "alpha is -1; it must be a number of seconds of at least 0"),
            (lambda: Hybrid(alpha=math.nan), "alpha is nan; it must be a number of seconds of at least 0"),
        ],
    )
    def test_constants_out_of_range_are_named(self, make: Any, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            make()

    def test_those_with_deadlines_go_by_the_slos_in_force(self) -> None:
        for name in ("deadline", "least_slack", "hybrid"):
            early, late = (ordering_of(name, {"default": SLO(ttft_ms=ms)}).key(prompt(0.0, 10)) for ms in (500, 9500))
            assert late - early == pytest.approx(9.0)


BOUNDS_S = {
    "fcfs": 0.0,
    "priority": 10.0 * 3,
    "shortest": 0.01 * 3000,
    "shortest_expected": 0.01 * (3000 + 40),
    "ageing": 2.0 * (math.log2(3000) + 3),
    "deadline": 10.0,
    "least_slack": 10.0 - 3.0 + 1.0,  # a millisecond a prompt token: 3 s of its own, 1 s of theirs
    "hybrid": 10.0 + 0.008 * 3000,
}


@pytest.mark.parametrize("name", sorted(BOUNDS_S))
def test_nobody_is_passed_over_for_longer_than_the_bound(name: str) -> None:
    """A long prompt, with the longest target and no priority, in an endless stream of those that its order likes best."""
    bound = BOUNDS_S[name]
    order = ordering_of(name, {"default": SLO(ttft_ms=10_000), "urgent": SLO(ttft_ms=1)})
    queue = WaitingQueue(order)
    queue.ended(ended(40, 3000))
    queue.stepped(step(0.1, 100))
    victim = Sequence(prompt(0.0, 3000))
    queue.push(victim)
    size = 1000 if name == "least_slack" else 1
    passed = 0.0
    for tick in range(1, 10_000):
        newcomer = Sequence(prompt(0.01 * tick, size, "urgent", priority=3))
        queue.push(newcomer)
        taken = queue.pop()
        taken.state = "prefill"
        if taken is victim:
            break
        passed = taken.request.arrival
    assert victim.state == "prefill", "it starved"
    assert passed <= bound + 1e-6
    assert passed >= 0.5 * bound - 4.0, "the bound is not a number out of the air"


def test_every_ordering_has_its_bound_tested_or_is_fair() -> None:
    assert {*BOUNDS_S, "fair"} == ORDERINGS.keys()


class CountingFcfs(Fcfs):
    """Counts the calls for a key, and keeps what it hears."""

    def __init__(self) -> None:
        self.calls = 0
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def key(self, queued: Queued) -> float:
        self.calls += 1
        return super().key(queued)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


def engine(ordering: str | Ordering, knobs: Knobs = Knobs(8, 0, 64, 64), **options: Any) -> SimulatedEngine:  # noqa: B008  # frozen
    return SimulatedEngine(FAST, kv_tokens=100_000, knobs=knobs, limits=LIMITS, ordering=ordering, **options)


def test_an_engine_tells_of_every_step_and_request_and_asks_once() -> None:
    order, heard = CountingFcfs(), Records()
    made = engine(order)
    made.subscribe(heard)
    handles = [made.submit([1] * 20, SamplingParams(max_tokens=1 + i % 5)) for i in range(300)]
    made.wait(0.2)
    handles[-1].cancel()
    made.run()
    assert order.calls == 300, "whatever waits, and however long, is not asked again"
    assert order.steps == heard.steps and order.requests == heard.requests
    assert order.requests[-1].finished == order.steps[-1].end


def test_the_order_of_a_policy_learns_while_it_is_in_force() -> None:
    own = CountingFcfs()
    made = engine(own, slo="ttft=60s")
    made.submit([1] * 20, SamplingParams(max_tokens=3))
    made.run()
    seen = len(own.steps), len(own.requests)
    made.set_admission(AdmissionPolicy(late=None, queue_timeout=None, order="least_slack"))
    made.submit([1] * 20, SamplingParams(max_tokens=3))
    made.run()
    assert (len(own.steps), len(own.requests)) == seen
    order = made.scheduler.waiting.ordering
    assert isinstance(order, LeastSlack)
    assert order.key(prompt(0.0, 100)) < 60.0
    made.set_admission(False)
    made.submit([1] * 20, SamplingParams(max_tokens=3))
    made.run()
    assert len(own.requests) == 2


@pytest.mark.parametrize("raises", ["on_step", "on_request"])
def test_an_ordering_that_raises_at_a_record_hears_no_more_and_orders_on(
    raises: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(record: Any) -> None:
        raise LookupError("no such class")

    order = CountingFcfs()
    setattr(order, raises, fail)
    made = engine(order)
    with caplog.at_level(logging.WARNING):
        handles = [made.submit([1] * 20, SamplingParams(max_tokens=2)) for _ in range(20)]
        made.run()
    assert all(handle.record is not None and handle.record.completed for handle in handles)
    assert caplog.text.count("will hear no more") == 1 and "no such class" in caplog.text
    assert len(order.steps) + len(order.requests) <= 1
    assert order.calls == 20


def mean_e2e(ordering: str | Ordering) -> float:
    """Two classes: short prompts with long answers, and the other way round. One at a time, so that length is what counts."""
    made = engine(
        ordering,
        Knobs(1, 0, 64, 64),
        classes=[RequestClass("talk", SLO(e2e_ms=1e6)), RequestClass("look", SLO(e2e_ms=1e6))],
    )
    heard = Records()
    made.subscribe(heard)
    for i in range(100):
        talk = i % 2 == 0
        made.submit(
            [1] * (10 if talk else 40),
            SamplingParams(max_tokens=150 if talk else 5),
            request_class="talk" if talk else "look",
        )
        made.wait(0.3)
    made.run()
    return statistics.fmean(r.e2e or 0.0 for r in heard.requests)


def test_what_answers_have_been_shortens_the_mean_wait() -> None:
    fcfs, shortest, expected = (mean_e2e(order) for order in ("fcfs", "shortest", ShortestExpected(1.0)))
    assert expected < 0.8 * min(fcfs, shortest)


@pytest.mark.parametrize(
    "order", [Ageing(), ShortestExpected(), Hybrid(), LeastSlack()], ids=lambda o: type(o).__name__
)
def test_items_of_the_batcher_go_by_them_too(order: Ordering) -> None:
    items = [Item(None, 0.1 * i, cost, deadline=40.0 - i, id=i) for i, cost in enumerate((4000, 3, 900, 60))]
    keys = {item.id: order.key(item) for item in items}
    grouping = grouping_of(order)
    for item in items:
        item.state = WAITING
        grouping.add(item)
    assert [item.id for item in grouping.first(4)] == sorted(keys, key=keys.__getitem__)
