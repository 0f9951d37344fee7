"""What comes too late is ended early, with a reason and a hint; nothing is ended that could still be in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autotune import control
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import PROBE_S, AdmissionPolicy
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass, attainment
from runtime.step_model import StepFeatures
from runtime.tunable import SchedulerView
from tests.unit.control_world import Formula, poisson


def steady(step: StepFeatures) -> float:
    """1 ms, and 0.1 ms a token: 100 tokens of a prompt take 11 ms, and 9,091 tokens come in a second at most."""
    return 1e-3 + 1e-4 * (step.decodes + step.prefill_tokens)


class World(SimulatedEngine):
    def __init__(self, *, source: float | None = None, budget: int = 100, **options: Any) -> None:
        options = {"kv_tokens": 1_000_000, "slo": "ttft=200ms", "prefix_cache": False, **options}
        self.formula = Formula(steady)
        super().__init__(self.formula, knobs=Knobs(256, 0, budget, budget), limits=KnobLimits(), **options)
        self.records: dict[str, RequestRecord] = {}
        self.steps: list[StepRecord] = []
        self.subscribe(self)
        if source is not None:
            self.set_admission(self.admission, source=Rate(source))

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.records[record.id] = record

    def play(self, arrivals: list[tuple[float, int, int]], request_class: str = "default") -> list[RequestRecord]:
        for number, (due, prompt, output) in enumerate(arrivals):
            self.run_until(due)
            arrival = Arrival(due, prompt, output, ((number, prompt),), request_class=request_class)
            self.offer(arrival, f"{request_class}-{number}", due=due, shared=False)
        self.run()
        return list(self.records.values())


class Rate:
    prompts_per_step = 1

    def __init__(self, per_second: float) -> None:
        self.prefill_rate = per_second
        self.pair_tokens = 0.0


def crowd(count: int, prompt: int = 100) -> list[tuple[float, int, int]]:
    """All at once."""
    return [(0.0, prompt, 1)] * count


def reasons(records: list[RequestRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in records:
        word = record.cause if record.reason is FinishReason.REJECTED else record.reason.value
        found[word] = found.get(word, 0) + 1
    return found


# -- who is rejected --------------------------------------------------------------------------------------------------


def test_without_a_policy_everything_is_computed() -> None:
    world = World()
    assert world.admission is None
    assert reasons(world.play(crowd(50))) == {"length": 50}


def test_at_arrival_exactly_those_that_come_too_late_are_refused() -> None:
    """Steps of 100 tokens take 11 ms: of a hundred requests the first 16 have their token within 180 ms of the target of 200."""
    world = World(admission=True, source=100 / 11e-3)
    records = world.play(crowd(100))
    assert reasons(records) == {"length": 16, "slo": 84}
    assert all(SLO(ttft_ms=200).met(r) for r in records if r.completed)
    refused = [r for r in records if not r.completed]
    assert all(r.finished == 0 and r.scheduled is None and not r.token_times for r in refused)
    assert [r.retry_after_s for r in refused] == pytest.approx([17 * 0.011 - 0.18] * 84)


@pytest.mark.parametrize(("beside", "accepted"), [(1.0, 16), (0.2, 18)])
def test_nothing_is_reserved_where_what_comes_late_took_the_time_of_lighter_ones(beside: float, accepted: int) -> None:
    """Within 180 or 200 ms, in steps of 11 ms."""
    classes = [RequestClass("chat", "ttft=200ms"), RequestClass("batch", "ttft=200ms", beside)]
    world = World(admission=AdmissionPolicy(late="reject"), source=100 / 11e-3, classes=classes)
    assert reasons(world.play(crowd(100), "chat")) == {"length": accepted, "slo": 100 - accepted}
    other = World(admission=AdmissionPolicy(late="reject"), source=100 / 11e-3, classes=classes)
    assert reasons(other.play(crowd(100), "batch"))["length"] == 16


def test_what_is_not_known_is_learned_from_the_queue() -> None:
    """Nobody says how fast prompts are: all are accepted, and ended when their turn comes too late for them."""
    world = World(admission=True)
    records = world.play(crowd(100))
    found = reasons(records)
    assert 16 <= found["length"] <= 17 and found["slo"] + found.get("queue_timeout", 0) == 100 - found["length"]
    assert all(SLO(ttft_ms=200).met(r) for r in records if r.completed)
    assert max(r.finished for r in records) <= 0.2 + 0.011


def test_more_requests_are_in_time_than_without_it() -> None:
    load = poisson(130, 8, 100, 1, seed=3)  # 1.4 times what the machine can compute
    slo = SLO(ttft_ms=200)
    met = [attainment(World(admission=policy).play(load), slo).met for policy in (False, True)]
    assert met[1] > 4 * met[0]
    timeout = AdmissionPolicy(late=None)  # what waits is ended, what has begun goes on: late, mostly
    assert met[1] > 1.2 * attainment(World(admission=timeout).play(load), slo).met


def slowed_within_a_prompt(admission: AdmissionPolicy | bool) -> World:
    """A machine that turned five times as slow while it computed the long prompt of a request."""
    world = World(admission=admission, source=100 / 11e-3)
    world.offer(Arrival(0.0, 1500, 4, ((0, 1500),)), "long", due=0.0, shared=False)
    world.run_until(0.05)
    world.formula.hardware = lambda step: 5 * steady(step)
    world.run()
    return world


def test_a_prompt_in_progress_ends_when_the_machine_turns_slow() -> None:
    world = slowed_within_a_prompt(True)
    record = world.records["long"]
    assert record.reason is FinishReason.REJECTED and record.cause == "slo"
    assert record.scheduled is not None and record.output_tokens == 0 and record.retry_after_s
    assert world.scheduler.kv.free == world.scheduler.kv.total, "its blocks are given back"


def test_a_first_token_is_an_slo_met_and_nothing_ends_after_it() -> None:
    """Preempted and recomputed under a TTFT long past: it goes on."""
    world = World(admission=True, kv_tokens=160, budget=64, slo="ttft=30ms")
    for name in ("a", "b"):
        world.offer(Arrival(0.0, 30, 60, ((ord(name), 30),)), name, due=0.0, shared=False)
    world.run()
    assert world.scheduler.preemptions > 0
    assert reasons(list(world.records.values())) == {"length": 2}


def test_an_e2e_target_leaves_room_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1.3 times what the machine computes the queue is as long as the target: let in by first tokens, answers come late."""
    slo, load = SLO(e2e_ms=1000), poisson(100, 10, 100, 20, seed=3)
    records = World(admission=True, slo=slo).play(load)
    in_time = attainment(records, slo).met
    assert in_time > 0.85 * sum(r.completed for r in records)
    monkeypatch.setattr("runtime.llm.admission._LEAST_PROMPT", 1.0)  # nothing is left for answers
    assert in_time > 1.15 * attainment(World(admission=True, slo=slo).play(load), slo).met


def test_an_answer_longer_than_its_e2e_target_still_leaves_the_prompt_a_tenth() -> None:
    world = World(admission=True, source=100 / 11e-3, slo="e2e=100ms")
    for name in ("first", "second"):
        now = world.clock.now()
        world.offer(Arrival(now, 10, 500, ((ord(name[0]), 10),)), name, due=now, shared=False)
        world.run()
    assert reasons(list(world.records.values())) == {"length": 2}


def test_one_step_far_too_long_rejects_nobody_once_it_is_over() -> None:
    """2,000 tokens in one step of 201 ms, in which others wait; then there is room, and 100 tokens take 11 ms."""
    world = World(admission=True, source=50_000.0, budget=2000)
    for number, (due, prompt) in enumerate([(0.0, 100), (0.005, 1990), (0.006, 1500), (0.6, 100), (0.8, 100)]):
        world.run_until(due)
        world.offer(Arrival(due, prompt, 8, ((number, prompt),)), f"{number}", due=due, shared=False)
    world.run()
    assert any(step.limited_by == "budget" and step.duration > 0.18 for step in world.steps)
    assert [world.records[f"{n}"].reason for n in (3, 4)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(("prompts", "found"), [(1, {"length": 1, "slo": 1}), (2, {"length": 2})])
def test_a_long_prompt_in_small_chunks_counts_by_what_it_computes_beside_a_short_one(
    prompts: int, found: dict[str, int]
) -> None:
    """4,000 tokens in chunks of 50 take 80 steps of 11 ms; the 100 tokens of another need two of those steps."""

    class Sharing(Rate):
        prompts_per_step = prompts

    world = World(admission=AdmissionPolicy(order="fcfs"), classes=[RequestClass("long", SLO(ttft_ms=10_000))])
    world.set_knobs(Knobs(256, 0, 100, 50))
    world.set_admission(world.admission, source=Sharing(100 / 11e-3))
    world.offer(Arrival(0.0, 4000, 1, ((0, 4000),), request_class="long"), "long", due=0.0, shared=False)
    world.run_until(0.1)
    world.offer(Arrival(0.1, 100, 1, ((1, 100),)), "short", due=0.1, shared=False)
    world.run()
    assert reasons(list(world.records.values())) == found
    short = world.records["short"]
    if short.completed:
        assert short.ttft is not None and short.ttft < 0.05


def test_in_deadline_order_a_prompt_with_time_yields_to_one_in_a_hurry() -> None:
    """And does not count for it as work before its own: in the order of arrival the short one would be 440 ms late."""
    world = World(admission=True, source=100 / 11e-3, classes=[RequestClass("long", SLO(ttft_ms=10_000))])
    world.offer(Arrival(0.0, 6000, 1, ((0, 6000),), request_class="long"), "long", due=0.0, shared=False)
    world.run_until(0.1)
    world.offer(Arrival(0.1, 100, 1, ((1, 100),)), "short", due=0.1, shared=False)
    world.run()
    assert reasons(list(world.records.values())) == {"length": 2}
    assert (world.records["short"].ttft or 1.0) < 0.03 and (world.records["long"].ttft or 0.0) > 0.66


@pytest.mark.parametrize(("pair_tokens", "found"), [(0.0, {"length": 2, "slo": 3}), (1e-3, {"length": 5})])
def test_the_end_of_a_long_prompt_does_not_make_those_behind_it_late(pair_tokens: float, found: dict[str, int]) -> None:
    """Behind 20,000 tokens one takes 21 times as long as a fresh one: at that rate a hundred others take 0.2 s, and not 11 ms."""

    source = Rate(0.0)
    source.pair_tokens = pair_tokens
    world = World(admission=AdmissionPolicy(order="fcfs"), classes=[RequestClass("long", SLO(ttft_ms=100_000))])
    world.formula.hardware = lambda step: steady(step) + 1e-7 * step.prefill_attention
    world.set_admission(world.admission, source=source)
    world.offer(Arrival(0.0, 20_000, 1, ((0, 20_000),), request_class="long"), "long", due=0.0, shared=False)
    world.run()
    now = world.view().now
    for number in range(4):  # the first of them is let in to see
        world.offer(Arrival(now, 100, 1, ((number, 100),)), f"short {number}", due=now, shared=False)
    world.run()
    assert reasons(list(world.records.values())) == found


def test_a_rate_far_too_low_locks_nobody_out() -> None:
    """A source that has it wrong by a thousand: one is let in every :data:`PROBE_S`, and served."""
    world = World(admission=True, source=9.0)
    records = world.play([(0.05 * k, 150, 1) for k in range(400)])
    assert [r.arrival for r in records if r.completed] == pytest.approx([PROBE_S * k for k in range(4)])


def test_one_whose_turn_it_is_waits_while_the_pool_is_short() -> None:
    """A pool that is full for longer than the target: prompts at the head of the queue are told before they are late."""
    world = World(budget=512, admission=AdmissionPolicy(), slo="ttft=1s", kv_tokens=4096)
    world.serve([Arrival(0.05 * n, 500, 400, ((n, 500),)) for n in range(100)])
    world.run()
    assert any(step.limited_by is LimitedBy.KV for step in world.steps)
    told = [r for r in world.records.values() if r.reason is FinishReason.REJECTED]
    early = [r for r in told if r.finished - r.arrival < 0.85]
    assert len(told) > 40 and len(early) > 0.8 * len(told)


def test_a_prefix_that_others_have_computed_meanwhile_counts_no_more() -> None:
    """Forty prompts that share 4,000 tokens come at once. The first computes them, and the rest are in time."""

    def met(policy: AdmissionPolicy | None) -> int:
        world = World(budget=2048, admission=policy, slo="ttft=1s", prefix_cache=True)
        world.serve([Arrival(0.0, 4064, 4, ((0, 4000), (1 + n, 64))) for n in range(40)])
        world.run()
        return sum(map(SLO(ttft_ms=1000).met, world.records.values()))

    assert met(None) == 40
    assert met(AdmissionPolicy()) >= 30


def test_a_source_that_raises_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @property
        def prefill_rate(self) -> float:
            raise ZeroDivisionError

        prompts_per_step, pair_tokens = 1, 0.0

    world = World(admission=True)
    world.set_admission(True, source=Broken())
    assert reasons(world.play(crowd(100)))["length"] >= 16
    assert caplog.text.count("is no longer used") == 1


# -- relegation -----------------------------------------------------------------------------------------------------------


LATER = AdmissionPolicy(late="relegate")


def test_what_is_late_is_computed_behind_what_can_be_met_by_arrival() -> None:
    """Of a hundred at once 16 can be met, as by rejection, and two more by the tenth that is reserved for prediction error. One
    that comes while the others wait goes before them."""
    world = World(admission=LATER, source=100 / 11e-3)
    records = world.play([*crowd(100), (0.5, 100, 1)])
    assert reasons(records) == {"length": 101}, "none is ended"
    met = [r.id for r in records if SLO(ttft_ms=200).met(r)]
    assert met == [f"default-{n}" for n in (*range(18), 100)]
    begun = sorted(records, key=lambda r: r.scheduled or 0.0)
    assert [r.id for r in begun if r.id not in met] == [f"default-{n}" for n in range(18, 100)]
    found = attainment(records, SLO(ttft_ms=200))
    assert (found.met, found.offered) == (19, 101), "late ones are misses"


BATCH = RequestClass("batch", SLO(ttft_ms=200), 0.2)


def test_by_default_a_class_of_less_weight_is_relegated_and_the_others_are_rejected() -> None:
    """A hundred of each at once, of which the machine computes 16 in time."""
    world = World(admission=True, source=100 / 11e-3, classes=[BATCH, RequestClass("twice", SLO(ttft_ms=200), 2.0)])
    for number in range(300):
        name = ("default", "batch", "twice")[number % 3]
        world.offer(Arrival(0.0, 100, 1, ((number, 100),), name), f"{name}-{number}", due=0.0, shared=False)
    world.run()
    records = list(world.records.values())
    assert len(records) == 300
    batch = [r for r in records if r.request_class == "batch"]
    assert all(r.completed and r.relegated for r in batch), "the others took their places"
    met = [r for r in records if r.request_class == "twice" and SLO(ttft_ms=200).met(r)]
    assert len(met) >= 15
    assert {r.cause for r in records if r not in met and r not in batch} == {"slo"}
    assert not any(r.relegated for r in records if r not in batch)


def test_a_record_says_of_one_that_was_relegated_and_got_its_place_back_that_it_was() -> None:
    world = World(admission=LATER, source=100 / 11e-3)
    for number in range(40):
        world.offer(Arrival(0.0, 100, 1, ((number, 100),)), f"{number}", due=0.0, shared=False)
    behind = {s.request.id for s in world.scheduler.waiting if s.relegated is not None}
    world.set_admission(None)
    world.run()
    assert behind and {r.id for r in world.records.values() if r.relegated} == behind


@pytest.mark.parametrize("late", ["relegate", None])
def test_a_prompt_that_comes_too_late_while_it_is_computed_goes_behind_the_others(late: Any) -> None:
    """Alone it takes 2.2 s of 2.5; 50 short ones take 0.55 s. By its deadline it would go before one that comes at 2.2 s."""
    world = World(
        admission=AdmissionPolicy(late=late, queue_timeout=None), source=100 / 11e-3, slo="ttft=1s",
        classes=[RequestClass("long", SLO(ttft_ms=2500))],
    )  # fmt: skip
    world.offer(Arrival(0.0, 20_000, 1, ((0, 20_000),), request_class="long"), "long", due=0.0, shared=False)
    for number in range(50):
        due = 0.3 + 0.02 * number
        world.run_until(due)
        world.offer(Arrival(due, 100, 1, ((number, 100),)), f"{number}", due=due, shared=False)
    world.run_until(2.2)
    world.offer(Arrival(2.2, 100, 1, ((99, 100),)), "last", due=2.2, shared=False)
    world.run()
    long, last = world.records["long"], world.records["last"]
    assert reasons(list(world.records.values())) == {"length": 52}
    assert long.relegated is (late is not None) and (long.ttft or 0) > 2.5
    assert ((last.ttft or 9) < 0.03) is (late is not None)


def test_no_relegated_tokens_count_for_those_that_come_later() -> None:
    """And in deadline order, whatever their class: relegated with a target of 1 s they wait behind one of 2 s."""
    world = World(admission=LATER, source=100 / 11e-3, slo="ttft=1s", classes=[RequestClass("slow", SLO(ttft_ms=2000))])
    for number in range(300):
        world.offer(Arrival(0.0, 100, 1, ((number, 100),)), f"{number}", due=0.0, shared=False)
    waiting = world.scheduler.waiting
    behind = sum(s.relegated is not None for s in waiting)
    assert waiting.relegated_tokens == 100 * behind and behind == 300 - int(0.9 / 11e-3)
    patient = Arrival(0.0, 100, 1, ((999, 100),), request_class="slow")
    world.offer(patient, "patient", due=0.0, shared=False)
    sequence = next(s for s in waiting if s.request.id == "patient")
    assert sequence.relegated is None and waiting.work_before(sequence).tokens == 100 * (300 - behind)
    world.scheduler.check_integrity()
    world.run()
    records = sorted(world.records.values(), key=lambda r: r.scheduled or 0.0)
    assert all(r.completed for r in records)
    assert [r.id for r in records].index("patient") == 300 - behind, "after those that can be met, before all others"
    assert waiting.relegated_tokens == waiting.tokens == 0


@pytest.mark.parametrize("prompts", [100, 700])
def test_relegation_meets_more_than_no_admission_and_loses_nobody(prompts: int) -> None:
    """1.5 times what the machine can compute."""
    slo = SLO(ttft_ms=400)
    load = poisson(1.5 * 100 / 11e-3 / prompts, 2 * prompts**0.5, prompts, 1, seed=3)
    plain, relegated, rejected = (
        World(admission=policy, slo="ttft=400ms").play(load) for policy in (False, LATER, True)
    )
    assert reasons(relegated) == {"length": len(load)}
    met = [attainment(records, slo).met for records in (plain, relegated, rejected)]
    assert met[1] > 2 * met[0] and met[1] >= 0.8 * met[2], met


def test_under_a_controller_relegated_requests_cost_next_to_nothing() -> None:
    """Twice what the machine can compute: budgets of single steps are not for the queue of those that are late."""
    load = poisson(36, 15, 250, 40, seed=3)
    found = {}
    for late in (None, "relegate", "reject"):
        world = World(slo="ttft=500ms,tpot=25ms", kv_tokens=200_000)
        world.formula.hardware = lambda step: 4e-3 + 2e-4 * step.decodes + 1e-4 * step.prefill_tokens
        policy = None if late is None else AdmissionPolicy(late=late)  # type: ignore[arg-type]
        with control(world, slo=SLO(ttft_ms=500, tpot_ms=25), admission=policy):
            records = world.play(load)
        assert len(records) == len(load) and (late == "reject" or all(r.completed for r in records))
        found[late] = attainment(records, SLO(ttft_ms=500, tpot_ms=25)).met
    assert found["relegate"] > 2 * found[None] and found["relegate"] >= 0.95 * found["reject"], found


def test_at_loads_that_can_be_met_nobody_is_relegated() -> None:
    load = poisson(40, 10, 100, 1, seed=3)
    plain, relegated = World(ordering="fcfs").play(load), World(admission=LATER, ordering="fcfs").play(load)
    assert plain == relegated


def test_a_relegated_request_ends_by_its_own_timeout_and_by_the_queue_s() -> None:
    world = World(admission=AdmissionPolicy(late="relegate", queue_timeout=0.5), source=100 / 11e-3)
    for number in range(100):
        arrival = Arrival(0.0, 100, 1, ((number, 100),))
        world.offer(arrival, f"{number}", due=0.0, shared=False, expires=0.3 if number == 99 else None)
    world.run()
    assert world.records["99"].reason is FinishReason.TIMEOUT
    assert world.records["99"].finished == pytest.approx(0.3, abs=0.012)
    found = reasons(list(world.records.values()))
    assert found == {"length": 46, "timeout": 1, "queue_timeout": 53}, "those that have begun within half a second"


def test_slots_that_are_full_relegate_what_waits_past_its_target() -> None:
    """Nobody looks at the queue while no slot is free; whoever comes then is not late for those that are."""
    world = World(admission=LATER, source=100 / 11e-3)
    world.set_knobs(Knobs(1, 0, 100, 100))
    world.offer(Arrival(0.0, 100, 300, ((0, 100),)), "long", due=0.0, shared=False)
    for number in range(10):
        world.offer(Arrival(0.0, 100, 1, ((1 + number, 100),)), f"{number}", due=0.0, shared=False)
    world.run_until(0.25)
    assert all(s.relegated is not None for s in world.scheduler.waiting) and len(world.scheduler.waiting) == 10
    world.offer(Arrival(0.28, 100, 1, ((99, 100),)), "late comer", due=0.28, shared=False)
    world.run()
    order = sorted(world.records.values(), key=lambda r: r.scheduled or 0.0)
    assert [r.id for r in order] == ["long", "late comer", *(f"{n}" for n in range(10))]
    assert SLO(ttft_ms=200).met(world.records["late comer"])


def test_a_prompt_in_progress_that_turns_late_is_computed() -> None:
    world = slowed_within_a_prompt(LATER)
    assert world.records["long"].completed and not SLO(ttft_ms=200).met(world.records["long"])


@pytest.mark.parametrize("order", ["deadline", None])
def test_without_the_policy_relegated_ones_have_their_places_back(order: str | None) -> None:
    world = World(ordering="fair", slo="ttft=200ms")
    world.set_admission(AdmissionPolicy(late="relegate", order=order), source=Rate(100 / 11e-3))
    for number in range(40):
        world.offer(Arrival(0.0, 100, 1, ((number, 100),)), f"{number}", due=0.0, shared=False)
    waiting = world.scheduler.waiting
    given = {s: s.relegated for s in waiting if s.relegated is not None}
    assert len(given) == 24
    world.set_admission(None)
    assert waiting.relegated_tokens == 0 and all(s.relegated is None for s in waiting)
    if order is None:
        assert all(s.key == key for s, key in given.items())
    world.run()
    assert [r.id for r in sorted(world.records.values(), key=lambda r: r.scheduled or 0.0)] == [
        f"{n}" for n in range(40)
    ]


def test_without_the_policy_a_prompt_in_progress_is_relegated_no_longer() -> None:
    """Where nothing waits behind, and the order stays what it was."""
    world = World(ordering="fcfs", slo="ttft=200ms")
    world.set_admission(AdmissionPolicy(late="relegate", order=None), source=Rate(100 / 11e-3))
    world.offer(Arrival(0.0, 2000, 1, ((0, 2000),)), "long", due=0.0, shared=False)
    world.run_until(0.05)
    (begun,) = world.scheduler.prefills
    key = begun.key
    world.scheduler.relegate(begun)
    assert begun.relegated == key != begun.key and world.scheduler.waiting.relegated_tokens == 0
    world.set_admission(None)
    assert begun.relegated is None and begun.key == key


def test_without_the_policy_one_that_decodes_is_relegated_no_longer_once_it_is_preempted() -> None:
    """Else it would wait behind all that come, with half an answer."""
    world = World(ordering="fcfs", slo="ttft=200ms")
    world.set_admission(AdmissionPolicy(late="relegate", order=None), source=Rate(1.0))
    for number in range(2):  # the first is a probe
        due = 0.001 * number
        world.offer(Arrival(due, 100, 50, ((number, 100),)), f"{number}", due=due, shared=False)
    world.run_until(0.06)
    late = next(s for s in world.scheduler.decodes.members if s.relegated is not None)
    world.set_admission(None)
    world.scheduler.shed(0)
    assert late.state == "waiting" and late.relegated is None
    assert [s.request.id for s in world.scheduler.waiting.in_order()] == ["0", "1"]


def test_what_is_relegated_has_no_slack_and_is_told_apart_in_the_view() -> None:
    world = World(admission=LATER, source=100 / 11e-3)
    for number in range(40):
        world.offer(Arrival(0.0, 100, 1, ((number, 100),)), f"{number}", due=0.0, shared=False)
    world.run_until(0.19)
    view = world.view()
    assert view.waiting_tokens == view.relegated_tokens > 2000
    assert view.oldest_arrival == float("inf") and view.least_slack == float("inf")
    seen: list[float] = []

    class Watching:
        def budget(self, view: SchedulerView) -> int:
            seen.append(view.least_slack)
            return view.knobs.token_budget

    world.run()
    world.set_step_policy(Watching())
    world.offer(Arrival(5.0, 500, 1, ((99, 500),)), "first", due=5.0, shared=False)
    world.run_until(5.03)
    for number in range(40):
        world.offer(Arrival(5.03, 100, 1, ((number, 100),)), f"again {number}", due=5.03, shared=False)
    world.run()
    assert len(seen) == 45 and min(seen) > 0, "those that are followed from step to step likewise"


# -- the queue's timeout, and order --------------------------------------------------------------------------------------


def test_queue_timeout_ends_what_waits_and_nothing_that_runs() -> None:
    world = World(admission=AdmissionPolicy(late=None, queue_timeout=0.1, order=None))
    records = world.play([(0.0, 3000, 1), *crowd(5)])
    assert reasons(records) == {"length": 1, "queue_timeout": 5}
    waited = [r for r in records if r.cause == "queue_timeout"]
    assert all(0.1 <= r.finished < 0.1 + 0.012 for r in waited), "at the first step's end after it"
    assert all(r.retry_after_s for r in waited)


def test_a_policy_put_in_force_and_taken_off_in_mid_run() -> None:
    world = World(ordering="fcfs", slo="ttft=5s")
    for number in range(30):
        world.offer(Arrival(0.0, 100, 1, ((number, 100),)), f"r{number}", due=0.0, shared=False)
    world.run_until(0.05)
    world.set_admission(AdmissionPolicy(late=None, queue_timeout=0.1))
    world.run_until(0.2)
    assert reasons(list(world.records.values()))["queue_timeout"] > 15
    world.set_admission(None)
    for number in range(30):
        world.offer(Arrival(0.2, 100, 1, ((100 + number, 100),)), f"s{number}", due=0.2, shared=False)
    world.run()
    assert all(r.completed for name, r in world.records.items() if name.startswith("s"))


@pytest.mark.parametrize("late", ["by_weight", None])
@pytest.mark.parametrize("order", ["deadline", "fcfs"])
def test_whoever_waits_goes_by_the_slo_of_now(late: Any, order: str) -> None:
    def reasons_after(first: str, then: str) -> dict[str, int]:
        world = World(slo=first, admission=AdmissionPolicy(late=late, order=order))
        world.set_knobs(max_batch_size=4)
        for number in range(20):
            world.offer(Arrival(0.0, 100, 20, ((number, 100),)), f"r{number}", due=0.0, shared=False)
        world.run_until(0.05)
        rate = world.scheduler.admission
        world.set_slo(then)
        assert world.scheduler.admission is rate, "nothing that it has learned is forgotten"
        world.scheduler.waiting.check_integrity()
        world.run()
        return reasons(list(world.records.values()))

    assert reasons_after("ttft=200ms", "ttft=60s") == {"length": 20}
    for never in ("ttft=60s", "tpot=10s"):
        ended = reasons_after(never, "ttft=200ms")
        assert ended["length"] < 20 and ended.get("queue_timeout", 0) + ended.get("slo", 0) == 20 - ended["length"]
    assert reasons_after("ttft=200ms", "tpot=10s") == {"length": 20}, "there is no time-out any more"


class WholeBudgets:
    """Asks in every step."""

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget


def test_those_that_wait_change_places_with_the_slo_of_their_class() -> None:
    classes = [RequestClass("one", "ttft=20s"), RequestClass("other", "ttft=30s")]
    by_deadline = AdmissionPolicy(late=None)
    for own, policy in (("deadline", None), ("fcfs", by_deadline), ("deadline", by_deadline)):
        world = World(slo="ttft=10s", classes=classes, ordering=own, admission=policy or False)
        world.set_step_policy(WholeBudgets())
        for number, name in enumerate(("default", "one", "other", "one", "other")):
            arrival = Arrival(0.0, 1000, 1, ((number, 1000),), request_class=name)
            world.offer(arrival, f"{number}", due=0.0, shared=False)
        world.run_until(0.015)
        world.set_slo("ttft=15s", request_class="other")
        assert world.view().least_slack == pytest.approx(10 - world.clock.now()), "of the one that has begun"
        world.set_slo("ttft=5s", request_class="other")
        assert world.view().least_slack == pytest.approx(5 - world.clock.now())
        if policy is not None:
            world.set_admission(None)
            world.set_admission(policy)
        world.run()
        begun = sorted(world.records.values(), key=lambda record: record.scheduled or 0.0)
        assert [record.id for record in begun] == ["0", "2", "4", "1", "3"]


def test_another_tpot_target_changes_no_place_and_gives_back_none() -> None:
    world = World(slo="ttft=200ms,tpot=50ms", admission=AdmissionPolicy(late="relegate"))
    world.set_knobs(max_batch_size=4)
    for number in range(20):
        world.offer(Arrival(0.0, 100, 20, ((number, 100),)), f"r{number}", due=0.0, shared=False)
    world.run_until(0.3)
    keys = {sequence: sequence.key for sequence in world.scheduler.waiting}
    assert world.scheduler.waiting.relegated_tokens
    world.set_slo("ttft=200ms,tpot=60ms")
    assert keys == {sequence: sequence.key for sequence in world.scheduler.waiting}
    world.set_slo("ttft=60s,tpot=60ms")
    assert not world.scheduler.waiting.relegated_tokens
    world.run()


def mixed(
    admission: AdmissionPolicy | bool, weights: tuple[float, float] = (1, 1), rate: float = 60
) -> dict[str, list[RequestRecord]]:
    """Urgent and patient requests, at rate 60 about 1.1 times what the machine can compute."""
    classes = [RequestClass("urgent", "ttft=100ms", weights[0]), RequestClass("patient", "ttft=2s", weights[1])]
    world = World(admission=admission, slo="ttft=1s", classes=classes, ordering="fcfs")
    arrivals = sorted(
        [
            (t, p, name)
            for name, seed in (("urgent", 4), ("patient", 5))
            for t, p, _ in poisson(rate, 6, 100, 1, seed=seed)
        ]
    )
    for number, (due, prompt, name) in enumerate(arrivals):
        world.run_until(due)
        arrival = Arrival(due, prompt, 1, ((number, prompt),), request_class=name)
        world.offer(arrival, f"{number}", due=due, shared=False)
    world.run()
    return {name: [r for r in world.records.values() if r.request_class == name] for name in ("urgent", "patient")}


def kept(**run: Any) -> dict[str, int]:
    """Attainment, by class."""
    slos = {"urgent": SLO(ttft_ms=100), "patient": SLO(ttft_ms=2000)}
    return {name: attainment(records, slos[name]).met for name, records in mixed(**run).items()}


def test_deadline_order_goes_by_each_class_s_slo() -> None:
    in_order = kept(admission=AdmissionPolicy(order=None))
    by_deadline = kept(admission=AdmissionPolicy())
    assert by_deadline["urgent"] > 1.2 * in_order["urgent"]
    assert sum(by_deadline.values()) > 1.05 * sum(in_order.values())


@pytest.mark.parametrize("heavy", ["urgent", "patient"])
def test_lighter_ones_make_room_for_heavier_ones(heavy: str) -> None:
    """Far past capacity: the heavy class meets its SLO more often, and what all met ones weigh is more."""
    weights = (10.0, 1.0) if heavy == "urgent" else (1.0, 10.0)
    alike = kept(admission=True, rate=120)
    weighed = kept(admission=True, rate=120, weights=weights)
    assert weighed[heavy] > alike[heavy]
    worth = dict(zip(("urgent", "patient"), weights, strict=True))
    assert sum(worth[n] * met for n, met in weighed.items()) > sum(worth[n] * met for n, met in alike.items())


def test_the_end_of_a_request_that_made_room_is_said_though_all_others_have_ended() -> None:
    """As when an engine is closed between two steps."""
    classes = [RequestClass("urgent", "ttft=100ms", 10), RequestClass("patient", "ttft=2s")]
    world = World(admission=AdmissionPolicy(order=None), source=100 / 11e-3, classes=classes, ordering="fcfs")
    for number, name in enumerate(["patient"] * 15 + ["urgent"]):
        arrival = Arrival(0.0, 100, 1, ((number, 100),), request_class=name)
        world.offer(arrival, f"{number}", due=0.0, shared=False)
    made_room = [sequence for sequence, _ in world.scheduler.rejected]
    assert made_room
    for sequence in list(world.scheduler.waiting):
        world.core.finish(sequence, FinishReason.CANCELLED, 0.0)
    assert world.core.has_work and not world.scheduler.has_work
    assert [sequence for sequence, _ in world.core.step(0.0).finished] == made_room
    assert not world.core.has_work


def test_a_prompt_longer_than_the_pool_is_refused_whatever_is_asked_of_it() -> None:
    world = World(kv_tokens=96)
    with pytest.raises(ValueError, match="the KV pool holds 96"):
        world.submit([1] * 100, SamplingParams(max_tokens=None))
    world.submit([1] * 90, SamplingParams(max_tokens=None), request_id="fits")
    world.run()
    assert world.records["fits"].completed


# -- what clients and operators see --------------------------------------------------------------------------------------


def test_a_client_is_told_why_and_when_to_come_again() -> None:
    world = World(admission=True, source=100 / 11e-3)
    first = world.submit([1] * 1600, SamplingParams(max_tokens=1))
    with pytest.raises(RejectedError, match=r"its first token is predicted after 0\.\d+ s, its target is 0.2 s") as e:
        world.submit([1] * 300, SamplingParams(max_tokens=1))
    assert e.value.reason == "slo" and e.value.retry_after_s == pytest.approx(19 * 0.011 - 0.18)
    world.run()
    assert first.record is not None and first.record.completed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_timeout": 0}, 'queue_timeout is 0; it must be a time above 0 s, "ttft" or None'),
        ({"queue_timeout": "soon"}, "queue_timeout is 'soon'"),
        ({"queue_timeout": True}, "queue_timeout is True"),
        ({"queue_timeout": float("inf")}, "queue_timeout is inf"),
        ({"late": "drop"}, 'late is \'drop\'; it must be "by_weight", "reject", "relegate" or None'),
        ({"late": True}, "late is True"),
        ({"order": "lifo"}, "ordering is 'lifo'; it must be one of priority, fcfs"),
    ],
)
def test_wrong_policies_name_the_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdmissionPolicy(**options)
    with pytest.raises(ValueError, match="admission is 'on'; it must be True, False or an AdmissionPolicy"):
        World(admission="on")


@pytest.mark.parametrize("policy", [AdmissionPolicy(), AdmissionPolicy(late=None), LATER])
def test_fast_forward_changes_nothing(policy: AdmissionPolicy) -> None:
    load = poisson(60, 4, 120, 30, seed=9)
    plain, quick = World(admission=policy, fast_forward=False), Silent(admission=policy)
    assert plain.play(load) == quick.play(load)
    assert any(r.reason is FinishReason.REJECTED for r in quick.records.values()) is (policy is not LATER)


class Silent(World):
    """One that can be told of many steps at once."""

    def on_run(self, record: StepRecord, ends: Any) -> None:
        pass


# -- fast-forward ---------------------------------------------------------------------------------------------------------


class Ends:
    """Hears of steps at once, so that it does not stand in the way of fast-forward, and counts how often it hears of any."""

    def __init__(self) -> None:
        self.heard = 0
        self.ends: list[tuple[str, str, float]] = []

    def on_step(self, record: StepRecord) -> None:
        self.heard += 1

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.heard += 1

    def on_request(self, record: RequestRecord) -> None:
        self.ends.append((record.id, record.cause or record.reason.value, record.finished))


def blocked(admission: AdmissionPolicy, *, fast_forward: bool) -> Ends:
    """One request decodes in 10 to 19 of 20 blocks. Another comes, needs 13, and would be too late when the first has ended."""
    engine = SimulatedEngine(
        Formula(steady),
        kv_tokens=320,
        slo="ttft=100ms",
        prefix_cache=False,
        admission=admission,
        fast_forward=fast_forward,
    )
    engine.set_admission(admission, source=Rate(5000.0))
    ends = Ends()
    engine.subscribe(ends)
    engine.offer(Arrival(0.0, 160, 145, ((0, 160),)), "first", due=0.0, shared=False)
    engine.run_until(0.03)
    engine.offer(Arrival(0.03, 200, 1, ((1, 200),)), "second", due=0.03, shared=False)
    engine.run()
    return ends


def test_a_request_that_the_kv_pool_holds_up_is_rejected_as_early_in_fast_forward() -> None:
    """Early rejection looks at the head of the queue in every step; steps at once would pass over the time to reject it."""
    policy = AdmissionPolicy(queue_timeout=None)
    slow, fast = blocked(policy, fast_forward=False), blocked(policy, fast_forward=True)
    [(_, second, rejected), (_, first, ended)] = slow.ends
    assert (first, second) == ("length", "slo") and rejected < ended - 0.05
    assert fast.ends == slow.ends
    accepting = AdmissionPolicy(late=None, queue_timeout=None)
    assert blocked(accepting, fast_forward=True).heard < slow.heard / 5, "nothing looks at each step there"
