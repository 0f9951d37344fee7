"""What stands in vLLM's scheduler, over a stand-in that has what a steered one must have: no vLLM is needed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.engines.vllm.requests import QUEUES
from autotune.engines.vllm.steering import Steering
from runtime.clock import VirtualClock
from runtime.llm.admission import AdmissionPolicy, Verdict
from runtime.records import SLO_REASON
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO
from runtime.tunable import SchedulerView

BLOCK, BLOCKS, BUDGET = 16, 1024, 64


class Theirs:
    """A request of vLLM's."""

    def __init__(self, name: str, prompt: int, priority: int = 0, **params: Any) -> None:
        self.request_id, self.num_prompt_tokens, self.priority = name, prompt, float(priority)
        self.sampling_params = SimpleNamespace(extra_args=None, **params)
        self.arrival_time, self.max_tokens = time.time(), 1
        self.num_computed_tokens, self.ended = 0, False
        self.num_tokens = prompt
        self.block_hashes: list[object] = []  # vLLM has none where it caches no prefixes

    @property
    def is_prefill_chunk(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.ended

    def get_finished_reason(self) -> str:
        return "length"


class Queue(list[Theirs]):
    """One of vLLM's, by priority."""

    def add_request(self, request: Theirs) -> None:
        self.append(request)
        self.sort(key=lambda one: one.priority)

    def remove_requests(self, requests: Iterable[Theirs]) -> None:
        self[:] = [one for one in self if one not in requests]


class FullAttentionManager:
    """Of the KV blocks of all layers."""

    block_size = BLOCK

    def __init__(self, block_pool: object) -> None:
        self.block_pool = block_pool


class World:
    """A scheduler that is steered. ``stuck``: names of requests that it does not begin."""

    def __init__(self, *queues: str, slos: dict[str, SLO] | None = None) -> None:
        pool = SimpleNamespace(num_gpu_blocks=BLOCKS + 1, get_num_free_blocks=lambda: BLOCKS)
        self.scheduler = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=BUDGET, long_prefill_token_threshold=0),
            kv_cache_manager=SimpleNamespace(
                block_pool=pool, coordinator=SimpleNamespace(single_type_managers=[FullAttentionManager(pool)]),
                get_computed_blocks=lambda request: (None, 0), enable_caching=False, watermark_blocks=0,
            ),
            kv_cache_config=SimpleNamespace(), block_size=BLOCK, max_model_len=4096, max_num_running_reqs=8,
            max_num_active_reqs=8, max_num_scheduled_tokens=BUDGET, running=[],
            **{name: Queue() for name in (queues or QUEUES[:1])},
        )  # fmt: skip
        self.clock = VirtualClock()
        self.steering = Steering(self.scheduler, self.clock, lambda names: None, slos=slos)
        self.stuck: set[str] = set()

    def add(self, request: Theirs, queue: str = QUEUES[0]) -> Sequence:
        self.clock.advance(0.01)
        self.steering.adding(request)
        getattr(self.scheduler, queue).add_request(request)
        self.steering.added()
        return self.steering._by_name[request.request_id]

    def step(self) -> list[str]:
        """As vLLM's: running ones first, then those that wait, but for those that are stuck. Returns who is in it."""
        self.steering.before()
        scheduler, left = self.scheduler, self.scheduler.max_num_scheduled_tokens
        counts: dict[str, int] = {}
        begun = [one for one in scheduler.waiting if one.request_id not in self.stuck]
        began = []
        for request in (*scheduler.running, *begun):
            count = min(left, request.num_prompt_tokens - request.num_computed_tokens)
            if not count:
                continue
            left -= count
            counts[request.request_id] = count
            request.num_computed_tokens += count
            if request not in scheduler.running:
                began.append(request)
        scheduler.waiting.remove_requests(began)
        scheduler.running += began
        self.steering.put_back()
        again = SimpleNamespace(resumed_req_ids=())
        self.steering.planned(
            SimpleNamespace(
                preempted_req_ids=(), num_scheduled_tokens=counts, scheduled_new_reqs=began, scheduled_cached_reqs=again,
                total_num_scheduled_tokens=sum(counts.values()),
            )
        )  # fmt: skip
        done = [one for one in scheduler.running if not one.is_prefill_chunk]
        for request in done:
            request.ended = True
            scheduler.running.remove(request)
        self.steering.dropped([one.request_id for one in done])
        return list(counts)


def test_a_prompt_does_not_starve_while_newer_ones_begin_behind_one_that_is_passed_over() -> None:
    world = World()
    world.add(Theirs("long", 1000))
    assert world.step() == ["long"]
    world.add(Theirs("urgent", 30, priority=-5))
    world.stuck.add("urgent")  # its grammar is being compiled
    steps = []
    for number in range(18):
        world.add(Theirs(f"newer {number}", 34))
        steps.append(world.step())
    assert steps[0] == ["newer 0"], "the prompt in progress yields to the urgent one"
    assert sum("long" in step for step in steps) >= 15
    world.stuck.clear()
    assert any("urgent" in world.step() for _ in range(8))


def test_a_prompt_that_comes_behind_stays_in_the_step_if_what_it_lacks_fits_in_a_step_budget() -> None:
    world = World()

    class Whole:
        def budget(self, view: SchedulerView) -> int:
            return view.knobs.token_budget

    world.steering.settings.set_policy(Whole())
    for name, tokens, priority in (("long", 1000, 1), ("middle", 70, 0)):
        world.add(Theirs(name, tokens, priority))
        assert world.step() == [name]
    world.add(Theirs("urgent", 30, -5))
    assert world.step() == ["middle", "urgent"], (
        "of the 64 tokens 34 are left: its 6 fit, the 936 of the long one do not"
    )
    assert world.steering.planned_last is not None and world.steering.planned_last.prefill_tokens == 36
    assert world.step() == ["long"]
    world.add(Theirs("another", 70, 0))
    assert world.step() == ["another"]
    world.steering.settings.set_policy(None)
    world.add(Theirs("last", 30, -5))
    assert world.step() == ["last"], "where knobs alone say how long a step is, who begins has it short"


def test_a_step_says_whether_vllm_was_idle_before_it() -> None:
    world, found = World(), []
    for name in "abc":
        world.add(Theirs(name, 100))
        world.step()
        assert world.steering.planned_last is not None
        found.append(world.steering.planned_last.after_idle)
        if name == "b":
            for request in world.scheduler.running:
                request.ended = True
            world.scheduler.running.clear()
            world.steering.dropped(["a", "b"])
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("yields_for", "waiting", "vain"),
    [
        ("", "", ""),
        ("abc", "abc", "abc"),  # nothing began
        ("abc", "bc", ""),  # there was no room for the others
        ("abc", "ac", "a"),
        ("abcd", "abd", "ab"),
        ("abc", "", ""),
        ("abc", "a", "a"),  # b and c have ended, or begun
        ("pabc", "pac", "a"),  # one that was preempted
        ("pa", "pa", "pa"),
    ],
)
def test_only_who_was_passed_over_is_yielded_to_in_vain(yields_for: str, waiting: str, vain: str) -> None:
    def made(name: str) -> Sequence:
        sequence = Sequence(Request(name, (), SamplingParams(), 1, 0.0))
        sequence.state, sequence.preemptions = "waiting" if name in waiting else "prefill", int(name == "p")
        return sequence

    steering = World().steering
    steering._by_name = {name: made(name) for name in yields_for}
    steering._yields_for, steering._steps_planned = [*yields_for], 100
    steering._note_in_vain()
    assert steering._in_vain == dict.fromkeys(vain, 108)


LATE = Verdict(SLO_REASON, "late", 1.0)


def test_who_is_late_twice_waits_once() -> None:
    """By its SLO, and by a time in the queue that says nothing of the SLO."""
    world = World(slos={"default": SLO(ttft_ms=100)})
    steering = world.steering
    steering.set_admission(AdmissionPolicy(late="reject", queue_timeout=5.0, order="fcfs"))
    assert steering._admission is not None
    request = Theirs("a", 30, prompt_logprobs=1)
    sequence = world.add(request)
    own = sequence.key
    steering._late(steering._admission, sequence, LATE, 0.0)
    behind = sequence.key
    world.clock.advance(10.0)
    steering.prepare()
    assert list(steering.waiting) == [sequence] and list(steering.waiting.in_order()) == [sequence]
    steering.waiting.check_integrity()
    assert (sequence.key, sequence.relegated) == (behind, own) and list(world.scheduler.waiting) == [request]
    assert world.step() == ["a"]


@pytest.mark.parametrize("queue", QUEUES)
def test_who_is_late_goes_behind_in_whichever_queue_it_waits(queue: str) -> None:
    world = World(*QUEUES, slos={"default": SLO(ttft_ms=100)})
    steering = world.steering
    steering.set_admission(AdmissionPolicy(late="relegate"))
    assert steering._admission is not None
    late, other = Theirs("late", 30), Theirs("other", 30)
    sequence = world.add(late, queue)
    world.add(other, queue)
    assert getattr(world.scheduler, queue) == [late, other]
    steering._late(steering._admission, sequence, LATE, 0.0)
    assert getattr(world.scheduler, queue) == [other, late] and late.priority == sequence.key > 1e11
    assert sum(len(getattr(world.scheduler, name)) for name in QUEUES) == 2


def test_whoever_waits_goes_by_the_slo_of_now() -> None:
    classes = {"default": SLO(ttft_ms=100), "urgent": SLO(ttft_ms=300)}
    world = World(slos=classes)
    steering = world.steering
    steering.set_admission(AdmissionPolicy(late=None))
    first, second = Theirs("first", 30), Theirs("second", 30)
    second.sampling_params.extra_args = {"request_class": "urgent"}
    sequences = world.add(first), world.add(second)
    assert world.scheduler.waiting == [first, second]
    expires = steering.next_expiry
    steering.slack.slos["urgent"] = SLO(ttft_ms=50)
    steering.retarget()
    assert world.scheduler.waiting == [second, first], "vLLM's queue stands as ours does"
    assert [one.data.priority for one in sequences] == [one.key for one in sequences]
    assert steering.next_expiry == pytest.approx(expires + 0.01 - 0.05, abs=5e-3)
    steering.slack.slos["default"] = steering.slack.slos["urgent"] = SLO(tpot_ms=50)
    steering.retarget()
    assert steering.next_expiry == float("inf")


def test_who_comes_too_late_is_queued_behind_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks through vLLM's queue for it."""
    world = World(slos={"default": SLO(ttft_ms=100)})
    world.steering.set_admission(AdmissionPolicy(late="relegate"))
    world.add(Theirs("first", 30))
    monkeypatch.setattr(world.steering._admission, "arrive", lambda *about: LATE)
    monkeypatch.delattr(Queue, "remove_requests")
    late = world.add(Theirs("late", 40))
    assert late.was_relegated and late.data.priority == late.key > 1e11
    assert (world.steering.waiting.relegated_tokens, world.steering.refusal) == (40, None)
    world.steering.waiting.check_integrity()
    assert [one.request_id for one in world.scheduler.waiting] == ["first", "late"]


def test_who_comes_too_late_for_good_is_ended_once_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(slos={"default": SLO(ttft_ms=100)})
    steering = world.steering
    steering.set_admission(AdmissionPolicy(late="reject"))
    monkeypatch.setattr(steering._admission, "arrive", lambda *about: LATE)
    request = Theirs("late", 40)
    steering.adding(request)
    assert list(steering._by_name) == ["late"] and not steering.ended
    steering.added()
    assert not steering._by_name and steering.refusal == LATE
    assert [(s.request.id, record.cause) for s, record in steering.ended] == [("late", SLO_REASON)]


def test_an_id_that_was_rejected_may_be_tried_again() -> None:
    """As by a client that gives the same ``X-Request-Id``."""
    world, mine = World(), "cmpl-0af7651916cd43dd8448eb211c80319c-0-"
    world.steering.set_admission(AdmissionPolicy(late="reject", queue_timeout=None))
    world.steering.reject(world.add(Theirs(f"{mine}00000001", 30)), SLO_REASON, world.clock.now())
    world.scheduler.waiting.clear()
    again = world.add(Theirs(f"{mine}00000002", 30))
    assert again.state == "waiting" and world.step() == [again.request.id]


@pytest.mark.parametrize(("took", "met"), [(0.05, True), (0.2, False)])
def test_the_answer_to_a_pooling_request_is_its_first_token(took: float, met: bool) -> None:
    slo = SLO(ttft_ms=100, tpot_ms=1)
    world = World(slos={"default": slo})
    world.add(Theirs("embedding", 30))
    world.clock.advance(took)
    out = SimpleNamespace(request_id="embedding", new_token_ids=[], pooling_output=object(), finish_reason="stop")
    world.steering.landed(object(), {0: SimpleNamespace(outputs=[out])})
    ((_, record),) = world.steering.take_ended()
    assert record.ttft == pytest.approx(record.finished - record.arrival) == pytest.approx(took, abs=0.03)
    assert (record.output_tokens, slo.met(record)) == (1, met)


def test_a_class_that_nobody_has_set_up_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(slos={"default": SLO(ttft_ms=100), "chat": SLO(ttft_ms=50)})
    for number, name in enumerate(["chat", "default", "chatt", "chatt", *map(str, range(40)), "x\n" * 500]):
        request = Theirs(str(number), 30)
        request.sampling_params.extra_args = {"request_class": name}
        with caplog.at_level("WARNING", logger="vllm.autotune"):
            assert world.add(request).request.request_class == name
    assert caplog.messages[0] == (
        "request_class is 'chatt'; it must be one of default, chat: such requests go by the common SLO"
    )
    assert len(caplog.messages) == 20 and all(len(line) < 250 for line in caplog.messages)
    caplog.clear()
    without = World(slos={"default": SLO(ttft_ms=100)})
    request = Theirs("a", 30)
    request.sampling_params.extra_args = {"request_class": "chatt"}
    without.add(request)
    assert not caplog.messages, "there are none"
