"""The algorithms by themselves, fed any history: one suite over the registry."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.control.controllers.protocol import Controller, SLOAware
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.contract.contract_of_controllers import ALL, FALLS_BACK, SLOS, make
from tests.unit.control_world import VLLM

any_float = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 10**7)
steps = st.builds(
    StepRecord,
    start=any_float, end=any_float, steps=st.integers(1, 100), decodes=counts, decode_context=counts, chunks=counts,
    prefill_tokens=counts, prefill_context=counts, prefill_attention=st.integers(0, 10**14), sampled=counts, running=counts,
    waiting=counts, waiting_tokens=counts, kv_free_blocks=counts, preemptions=counts, epoch=counts, budget_used=counts,
    limited_by=st.sampled_from(LimitedBy), failed=st.sampled_from([0, 0, 0, 1]),
)  # fmt: skip
requests = st.builds(
    RequestRecord,
    id=st.just("r"), arrival=any_float, scheduled=st.none() | any_float, finished=any_float,
    token_times=st.lists(any_float, max_size=4), prompt_tokens=counts, output_tokens=counts, cached_tokens=st.just(0),
    preemptions=counts, reason=st.sampled_from(FinishReason), request_class=st.just("default"), tenant=st.just(""),
    priority=st.just(0), epoch_first=st.just(-1), epoch_last=st.just(-1),
)  # fmt: skip
knobs = st.builds(
    Knobs,
    max_batch_size=st.integers(1, 512),
    max_wait_ms=st.floats(0, 1000),
    token_budget=st.integers(1, 8192),
    chunk_size=st.integers(1, 8192),
)
ceilings = st.builds(
    KnobLimits,
    max_batch_size=st.integers(1, 512),
    max_wait_ms=st.floats(0, 1000),
    token_budget=st.integers(1, 8192),
    chunk_size=st.integers(1, 8192),
)


def view(now: float, in_force: Knobs, limits: KnobLimits, decoding: int, slack: float, context: int) -> SchedulerView:
    return SchedulerView(
        now, decoding, 1, 3, 900, 200, context, 100, 1000, 0.0, slack, slack, in_force, 0, limits
    )  # fmt: skip


views = st.builds(view, any_float, knobs, ceilings, st.integers(0, 4000), any_float, counts)


@pytest.mark.parametrize("name", ALL)
@given(st.lists(steps | requests | st.sampled_from(SLOS), max_size=40), views, knobs, ceilings, st.sampled_from(SLOS))
def test_any_history_gives_a_proposal_inside_the_limits_and_a_budget_that_lets_work_go_on(
    name: str,
    history: list[StepRecord | RequestRecord | SLO],
    seen: SchedulerView,
    start: Knobs,
    limits: KnobLimits,
    slo: SLO,
) -> None:
    made = make(name, slo, start)
    for i in range(20):  # something learned before it goes wrong
        made.observe_step(sound(i))
    for record in history:
        if isinstance(record, StepRecord):
            made.observe_step(record)
        elif isinstance(record, RequestRecord):
            made.observe_request(record)
        elif isinstance(made, SLOAware):
            made.set_slos({"default": record, "other": slo})
        check(made, seen, limits)
    for i in range(20):
        made.observe_step(sound(i))
    check(made, seen, limits)


def check(made: Controller, seen: SchedulerView, limits: KnobLimits) -> None:
    proposal = made.decide(seen.now, limits.clamp(seen.knobs), limits)
    assert limits.check(proposal.knobs) == proposal.knobs
    assert proposal.regime and proposal.cause and "\n" not in proposal.cause
    json.dumps(proposal.evidence, allow_nan=False)
    granted, top = made.budget(seen), seen.knobs.token_budget
    assert granted <= top and granted >= min(top, max(1, seen.decoding)), (
        "decodes, or the first prompt, would wait for ever"
    )


def sound(i: int, decodes: int = 0, end: float | None = None) -> StepRecord:
    decodes, prefill = decodes or 8 + i % 32, 128 * (i % 3)
    seconds = 0.004 + 1e-4 * decodes + 2e-5 * prefill
    end = 0.02 * i if end is None else end
    return StepRecord(
        end - seconds, end, 1, decodes, 300 * decodes, int(prefill > 0), prefill, prefill, prefill * (prefill + 1) // 2,
        decodes, decodes, 0, 0, 1000, 0, 0, 8192, LimitedBy.BUDGET if i % 4 == 0 else LimitedBy.DEMAND,
    )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_the_same_records_give_the_same_proposals(name: str) -> None:
    one, other = make(name), make(name)
    for i in range(200):
        assert _fed(one, i) == _fed(other, i)


def _fed(made: Controller, i: int) -> object:
    made.observe_step(sound(i))
    made.observe_request(request(i))
    seen = view(0.02 * i, VLLM, KnobLimits(), 8, 0.03, 2400)
    return made.decide(0.02 * i, VLLM, KnobLimits()), made.budget(seen)


def request(i: int) -> RequestRecord:
    n = 2 + i * 7 % 60
    times = [1.0 + 0.02 * k for k in range(n)]
    return RequestRecord(
        "r", 0.5, 0.6, times[-1], times, 100 + i % 900, n, 0, 0, FinishReason.LENGTH, "default", "", 0, 0, 0
    )  # fmt: skip


def grown(made: Controller, steps: int, first: int) -> tuple[int, float]:
    """(bytes of its state, CPU s of the quietest twentieth) after ``steps`` more steps; a request and a decision every ten."""
    block, costs = max(1, steps // 20), []
    for begin in range(first, first + steps, block):
        started = time.process_time()
        for i in range(begin, begin + block):
            made.observe_step(sound(i))
            if i % 10 == 0:
                _fed(made, i)
        costs.append(time.process_time() - started)
    return len(pickle.dumps(made)), min(costs)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("steps", [6_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_neither_grows_nor_slows_with_the_steps_seen(name: str, steps: int) -> None:
    made = make(name)
    early_bytes, early = grown(made, 6_000, 0)
    for first in range(6_000, 6_000 + steps - 6_000, 6_000):
        grown(made, 6_000, first)
    late_bytes, late_cost = grown(made, 6_000, steps)
    assert late_bytes <= 1.02 * early_bytes + 64
    assert steps < 60_000 or late_cost < 2 * early + 0.002


@pytest.mark.parametrize("name", ALL)
def test_a_start_above_a_shrunken_ceiling_is_never_proposed(name: str) -> None:
    limits = replace(KnobLimits(), token_budget=100, chunk_size=100, max_batch_size=10)
    made = make(name, start=VLLM)
    regimes = set()
    for i in range(600):  # nothing explains these times
        made.observe_step(sound(i)._replace(end=0.02 * i + (5.0 if i % 2 else 0.0)))
        proposal = made.decide(0.0, limits.clamp(VLLM), limits)
        regimes.add(proposal.regime)
        assert limits.check(proposal.knobs)
    assert ("fallback" in regimes) == (name in FALLS_BACK)
