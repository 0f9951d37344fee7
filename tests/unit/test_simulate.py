"""The simulated engine: like a naive simulator written from the rules, event by event, and the same at any speed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from autotune.profile.parts import JitterFacts
from autotune.simulate import SimulatedEngine
from autotune.simulate.drafts import guessable
from autotune.simulate.names import prompt_names, shares_prefixes
from autotune.workload import Arrival, parse_workload, prompt_ids
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import StepPlan, StepResult
from runtime.records import RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass
from runtime.tunable import KvAllocation, SchedulerView
from tests.examples import examples
from tests.tiers import slow_but_for
from tests.unit.jitter_cases import STALLS
from tests.unit.reference_simulator import Reference, Request
from tests.unit.simulated_cases import LIMITS, Case, Everything, RunMachine, case

CASES = range(examples(3))
WORTH_WAITING = 8
"""Of the tokens that prompts of these cases have in common."""
FAST = RunMachine(base=1e-3, chunk=0.0, token=2e-5, context=1e-8, pair=0.0, overlap=False)


@dataclass
class Allowance:
    """A step policy made of a function of the decodes."""

    of: Any

    def budget(self, view: SchedulerView) -> int:
        return int(self.of(view.decoding))


def events(made: Case) -> list[tuple[float, Request | Knobs]]:
    """Arrivals and changes of knobs, in order."""
    happen: list[tuple[float, Request | Knobs]] = [*((r.arrival, r) for r in made.requests), *made.changes]
    return sorted(happen, key=lambda event: event[0])


def simulated(
    made: Case,
    *,
    fast_forward: bool,
    noise: float = 0.0,
    jitter: JitterFacts | None = None,
    policy: bool = True,
    allocation: KvAllocation = "whole",
) -> tuple[Any, Everything]:
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
        jitter=jitter,
        seed=3,
        fast_forward=fast_forward,
        acceptance=made.acceptance,
        kv_allocation=allocation,
    )
    engine.scheduler.holdings.worth_waiting = WORTH_WAITING
    if made.policy is not None and policy:
        engine.set_step_policy(Allowance(made.policy))
    heard = Everything()
    engine.subscribe(heard)
    for when, what in events(made):
        engine.run_until(when)
        if isinstance(what, Knobs):
            engine.set_knobs(what)
            continue
        assert isinstance(what, Request)
        arrival = Arrival(0.0, len(what.tokens), what.output, what.segments, tenant=what.tenant)
        engine.offer(
            arrival, what.id, due=when, shared=made.shared,
            priority=what.priority, deadline=what.deadline, expires=what.expires,
        )  # fmt: skip
        engine.scheduler.check_integrity()
    engine.run()
    engine.scheduler.check_integrity()
    return engine, heard


def referred(made: Case, allocation: KvAllocation) -> Reference:
    def known(request_id: str, place: int) -> bool:
        return guessable(request_id, place, made.acceptance)

    reference = Reference(
        made.machine, made.knobs, blocks=made.blocks, block_size=made.block_size, ordering=made.ordering,
        prefix_cache=made.prefix_cache, policy=made.policy, first_s=0.05, guessable=known if made.acceptance else None,
        most_sampled=LIMITS.max_batch_size, by_chunk=allocation == "chunk", worth_waiting=WORTH_WAITING,
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


@pytest.mark.parametrize("allocation", get_args(KvAllocation))
@pytest.mark.parametrize("drafts", slow_but_for((True,), (False, True)), ids=["", "drafts"])
def test_it_agrees_with_the_reference_event_by_event(drafts: bool, allocation: KvAllocation) -> None:
    seen: dict[str, int] = dict.fromkeys(("preempted", "cached", "timeout", "drafted", "accepted"), 0)
    for number in CASES:
        made = case(number, drafts=drafts)
        reference = referred(made, allocation)
        _, heard = simulated(made, fast_forward=True, allocation=allocation)
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
        seen["drafted"] += sum(step.drafted for step in heard.steps)
        seen["accepted"] += sum(step.accepted for step in heard.steps)
        assert sum(s.sampled * s.steps for s in heard.steps) >= sum(r.output_tokens for r in heard.requests)
    cases = len(CASES)
    assert seen["preempted"] > cases and seen["cached"] > 10 * cases and seen["timeout"] > cases / 5, seen
    assert (seen["drafted"] > 1000 and 0 < seen["accepted"] < seen["drafted"]) if drafts else not seen["drafted"], seen


@pytest.mark.parametrize("allocation", get_args(KvAllocation))
@pytest.mark.parametrize(
    ("noise", "jitter"),
    slow_but_for(((0.05, STALLS),), ((0.0, None), (0.1, None), (0.0, STALLS), (0.05, STALLS))),
)
def test_fast_forward_changes_nothing(noise: float, jitter: JitterFacts | None, allocation: KvAllocation) -> None:
    runs = steps = 0
    for number in CASES:
        made = case(number)
        single, one = simulated(made, fast_forward=False, noise=noise, jitter=jitter, allocation=allocation)
        fast, many = simulated(made, fast_forward=True, noise=noise, jitter=jitter, allocation=allocation)
        assert many.requests == one.requests, f"case {number}"
        assert list(map(planned, many.steps)) == list(map(planned, one.steps)), f"case {number}"
        assert fast.clock.now() == single.clock.now()
        assert fast.scheduler.preemptions == single.scheduler.preemptions
        assert fast.scheduler.kv.free == fast.scheduler.kv.total
        runs, steps = runs + many.runs, steps + len(many.steps)
    assert runs > 500


def test_tokens_given_and_tokens_imagined_find_the_same_prefixes() -> None:
    """Prompts of real token ids, as the live engine gets them, and the segments they stand for."""
    load = parse_workload("shared-prefix:tenants=2,turns=4,think=0.4").at_rate(15.0)
    arrivals = list(load.arrivals(1, limit=300))
    kept: list[list[RequestRecord]] = []
    for real in (True, False):
        engine = SimulatedEngine(FAST, kv_tokens=4800, knobs=Knobs(16, 0, 256, 256), limits=LIMITS)
        heard = Everything()
        engine.subscribe(heard)
        for i, arrival in enumerate(arrivals):
            engine.run_until(arrival.time)
            if real:
                tokens = SamplingParams(max_tokens=arrival.output_tokens)
                engine.submit(prompt_ids(arrival, 50_000), tokens, tenant=arrival.tenant, request_id=f"r{i}")
            else:
                engine.offer(arrival, f"r{i}", due=engine.clock.now())
        engine.run()
        kept.append(heard.requests)
    assert kept[0] == kept[1]
    assert sum(r.cached_tokens for r in kept[0]) > 10_000
    assert any(r.preemptions for r in kept[0])


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_drafts_are_right_as_often_as_the_workload_says(acceptance: float) -> None:
    """With k drafts, acceptance + … + acceptanceᵏ of them on average; and the same tokens are, whatever k is."""
    load = parse_workload(f"poisson:prompt=20,output=200,acceptance={acceptance}").at_rate(20.0)
    assert load.acceptance == acceptance
    arrivals, steps = list(load.arrivals(1, limit=60)), {}
    tokens = sum(arrival.output_tokens for arrival in arrivals)
    for each in (1, 4):
        engine = SimulatedEngine(
            FAST, kv_tokens=1 << 17, knobs=Knobs(64, 0, 512, 512, each), limits=LIMITS, acceptance=load.acceptance
        )
        heard = Everything()
        engine.subscribe(heard)
        engine.serve(arrivals)
        engine.run()
        full = [s for s in heard.steps if s.drafted == each * s.decodes]
        drafted, accepted = sum(s.drafted for s in full), sum(s.accepted for s in full)
        wanted = sum(acceptance**i for i in range(1, each + 1)) / each
        assert drafted > 5000 * each / 4 and accepted / drafted == pytest.approx(wanted, abs=0.03)
        steps[each] = sum(s.decodes for s in heard.steps)
        assert sum(r.output_tokens for r in heard.requests) == tokens
        assert sum(s.sampled * s.steps for s in heard.steps) == tokens
    assert steps[4] < steps[1] < tokens


def test_drafts_of_a_mix_are_right_as_often_as_its_classes_say() -> None:
    """Each class as it would be alone; one that says nothing is not drafted for."""
    each = "poisson:prompt=20,output=200"
    mix = f"chat={each},acceptance=0.8@0.5+code={each},acceptance=0.3@0.3+batch={each}@0.2"
    load = parse_workload(mix).at_rate(20.0)
    arrivals = list(load.arrivals(1, limit=150))
    engine = SimulatedEngine(
        FAST, kv_tokens=1 << 17, knobs=Knobs(256, 0, 4096, 512, 1), limits=KnobLimits(), acceptance=load.acceptances,
        classes=[RequestClass(name, SLO(e2e_ms=1e6)) for name in ("chat", "code", "batch")],
    )  # fmt: skip
    seen: dict[str, list[int]] = {}
    execute = engine.core.executor.execute

    def heard(plan: StepPlan, now: float, until: float) -> StepResult:
        found = execute(plan, now, until)
        for sequence, accepted in found.accepted:
            seen.setdefault(sequence.request.request_class, []).append(accepted)
        return found

    engine.core.executor.execute = heard  # type: ignore[method-assign]
    engine.serve(arrivals)
    engine.run()
    assert seen.keys() == {"chat", "code"} and {a.request_class for a in arrivals} == {"chat", "code", "batch"}
    for name, acceptance in (("chat", 0.8), ("code", 0.3)):
        assert len(seen[name]) > 1000 and sum(seen[name]) / len(seen[name]) == pytest.approx(acceptance, abs=0.03)
    with pytest.raises(ValueError, match="acceptance of class chat is 2; it must be a number from 0 to 1"):
        SimulatedEngine(FAST, kv_tokens=4800, acceptance={"chat": 2})


def test_drafts_that_no_workload_accepts_are_not_made() -> None:
    runs = []
    for knobs in (Knobs(16, 0, 256, 256), Knobs(16, 0, 256, 256, 8)):
        engine = SimulatedEngine(FAST, kv_tokens=4800, knobs=knobs, limits=LIMITS)
        heard = Everything()
        engine.subscribe(heard)
        engine.serve(parse_workload("azure-conv").at_rate(10.0).arrivals(0, limit=30))
        engine.run()
        runs.append((heard.steps, heard.requests))
    assert runs[0] == runs[1]


def test_what_shares_nothing_is_not_named_until_something_is_preempted() -> None:
    arrivals = list(parse_workload("poisson:prompt=50,output=90").at_rate(50.0).arrivals(0, limit=100))
    assert not shares_prefixes(arrivals)
    for kv_tokens, preempts in ((20_000, False), (320, True)):
        engine = SimulatedEngine(FAST, kv_tokens=kv_tokens, knobs=Knobs(16, 0, 256, 256), limits=LIMITS)
        engine.serve(arrivals)
        assert (engine.scheduler.kv.published > 0) == preempts == (engine.scheduler.preemptions > 0)


def test_names_are_equal_where_the_tokens_are() -> None:
    """Against the tokens themselves, block by block, over random pieces of a few texts."""
    dice = random.Random(5)
    named: dict[int, tuple[Any, ...]] = {}
    blocks = 0
    for _ in range(400):
        pieces = tuple((dice.randrange(3), dice.randrange(1, 30)) for _ in range(dice.randrange(1, 5)))
        arrival = Arrival(0.0, sum(n for _, n in pieces), 1, pieces)
        tokens = prompt_ids(arrival, 2**31)
        names = prompt_names(pieces, 4, root=7)
        assert len(names) == len(tokens) // 4
        for index, name in enumerate(names):
            content = tuple(tokens[: 4 * (index + 1)])
            assert named.setdefault(name, content) == content
            blocks += 1
        assert set(names).isdisjoint(prompt_names(pieces, 4, root=8))
    assert len(named) < 0.8 * blocks  # some were indeed shared
    assert len(set(named.values())) == len(named)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_same_seed_gives_the_same_run_and_another_one_another(noise: float) -> None:
    arrivals = list(parse_workload("azure-conv").at_rate(10.0).arrivals(0, limit=50))

    def ends(seed: int) -> list[float]:
        engine = SimulatedEngine(FAST, kv_tokens=200_000, noise=noise, seed=seed)
        heard = Everything()
        engine.subscribe(heard)
        engine.serve(arrivals)
        engine.run()
        return [r.finished for r in heard.requests]

    assert ends(1) == ends(1)
    assert (ends(1) == ends(2)) == (noise == 0)
