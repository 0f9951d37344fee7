from __future__ import annotations

import itertools
import logging
from math import inf

import pytest

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import StepPlan, StepResult
from runtime.records import FinishReason
from runtime.request import Sequence
from runtime.shared.ceilings import StepLoad
from runtime.tunable import SchedulerView
from tests.unit.scheduler_world import CheckingExecutor, World


def test_time_out_in_the_queue_wakes_the_engine_and_ends_the_request() -> None:
    w = World(kv_blocks=20)
    w.core.settings.set_knobs(Knobs(4, 10_000, 64, 64))
    w.add([1, 2], expires=2.5)
    outcome = w.step()
    assert outcome.record is None and outcome.wake_at == 2.5 == w.core.next_expiry
    w.now = 2.5
    outcome = w.step()
    assert [r.reason for _, r in outcome.finished] == [FinishReason.TIMEOUT]
    assert outcome.record is None and outcome.wake_at == inf and not w.core.has_work


def test_time_out_while_running_keeps_the_tokens() -> None:
    w = World(kv_blocks=20)
    w.add([1, 2], 16, expires=0.025)
    while w.live:
        w.step()
    record = w.records["r1"]
    assert record.reason is FinishReason.TIMEOUT and record.output_tokens == 3
    w.drain()


def test_a_step_says_whether_the_engine_was_idle_before_it() -> None:
    w = World(kv_blocks=20)
    first, second = w.add([1, 2], 16), w.add([3], 16)
    w.step()
    w.cancel(first)
    w.step()
    w.cancel(second)  # nothing is left, whatever the last step said
    w.now += 0.02
    w.add([4], 1)
    w.step()
    w.add([5], 3)
    w.drain()
    assert [step.after_idle for step in w.steps] == [True, False, True, True, False, False]


def test_steps_of_a_fast_forwarded_record_follow_each_other() -> None:
    w = World(kv_blocks=20)
    first = w.add([1], 2)
    w.step()
    w.cancel(first)
    w.add([1], 4)
    w.step()
    assert [one.after_idle for one in w.steps[-1].split([1.0, 2.0, 3.0])] == [True, False, False]


def test_knobs_above_the_limits_are_refused_and_the_old_ones_stay() -> None:
    w = World(kv_blocks=20)
    w.core.settings.limits = KnobLimits(max_batch_size=8)
    before = w.core.settings.current
    with pytest.raises(ValueError, match="max_batch_size is 9"):
        w.core.settings.set_knobs(Knobs(max_batch_size=9))
    assert w.core.settings.current is before


def test_an_executor_that_raises_fails_its_step_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    w = World(kv_blocks=20)

    class Breaks(CheckingExecutor):
        def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
            if any(c.sequence.request.id == "r2" for c in plan.chunks):
                raise RuntimeError("no such kernel")
            return super().execute(plan, now, until)

    w.executor = w.core.executor = Breaks()
    w.core.settings.set_knobs(Knobs(1, 0, 64, 64))
    w.add([1], 3)
    w.add([2], 3)
    w.add([3], 3)
    with caplog.at_level(logging.ERROR):
        while w.core.has_work:
            for sequence, record in w.core.step(w.now).finished:
                w._ended(sequence, record)
            w.scheduler.check_integrity()
            w.now += 0.01
    assert {i: str(r.reason) for i, r in w.records.items()} == {"r1": "length", "r2": "error", "r3": "length"}
    assert w.records["r2"].cause == "RuntimeError: no such kernel"


def test_out_of_memory_lowers_the_effective_limits_and_the_knobs_in_force() -> None:
    w = World(kv_blocks=20)

    class Tight(CheckingExecutor):
        def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
            result = super().execute(plan, now, until)
            tokens = plan.n_decode + plan.prefill_tokens
            return (
                result._replace(oom=[StepLoad(1, 24, 24)], fitted=[StepLoad(1, 12, 12)] * 2) if tokens > 12 else result
            )

    w.executor = w.core.executor = Tight()
    w.core.settings.set_knobs(Knobs(8, 0, 40, 40))
    w.add([1] * 24, 3)
    w.core.step(0.0)
    assert w.core.settings.effective_limits.token_budget == 12 == w.core.settings.knobs.token_budget
    assert w.core.settings.effective_limits.chunk_size == 12 and w.core.settings.knobs.max_batch_size == 8
    assert w.core.settings.limits.token_budget == 8192
    w.core.settings.set_knobs(Knobs(8, 0, 40, 40))
    assert w.core.settings.knobs.token_budget == 12, "above the effective limit knobs are lowered to it"
    settings = w.core.settings
    assert settings.effective_limits.max_batch_size == settings.limits.max_batch_size, "one sequence was never too many"


class Short(CheckingExecutor):
    """Memory for ``most`` sequences; a step with more runs in halves."""

    most = 4

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        result = super().execute(plan, now, until)
        sequences, tokens = plan.n_decode + len(plan.chunks), plan.n_decode + plan.prefill_tokens
        parts, oom, fitted = [(sequences, tokens)], [], []
        while parts:
            n, t = parts.pop()
            if n > self.most:
                oom.append(StepLoad(n, t))
                parts += [(n // 2, t // 2), (n - n // 2, t - t // 2)]
            else:
                fitted.append(StepLoad(n, t))
        return result._replace(oom=oom, fitted=fitted) if oom else result


def test_decodes_above_a_lowered_ceiling_are_preempted_once_and_lose_nothing() -> None:
    w = World(kv_blocks=200)
    w.core.settings.set_knobs(Knobs(16, 0, 64, 64))
    short = w.executor = w.core.executor = Short()
    short.most = 99
    for i in range(8):
        w.add([i + 1] * 4, 12)
    w.step()
    w.step()
    assert w.scheduler.running == 8
    short.most = 4
    w.step()
    assert w.core.settings.effective_limits.max_batch_size == 4
    assert w.scheduler.running == 4, "those above the ceiling wait"
    failures = []
    while w.live:
        record = w.step().record
        assert record is None or record.running <= 4
        failures.append(w.core.settings.effective_limits.max_batch_size)
    assert set(failures) == {4}, "no further step ran out of memory"
    assert sum(step.preemptions for step in w.steps) == 4
    assert all(r.reason is FinishReason.LENGTH and r.output_tokens == 12 for r in w.records.values())
    w.drain()


def test_a_fault_that_has_passed_is_forgotten() -> None:
    """One step of two sequences ran out of memory; it once left one sequence at a time for good."""
    w = World(kv_blocks=400)
    knobs = Knobs(16, 0, 64, 64)
    w.core.settings.set_knobs(knobs)
    short = w.executor = w.core.executor = Short()
    short.most = 1
    w.add([1] * 4, 100)
    w.add([2] * 4, 100)
    w.step()
    short.most = 99
    assert w.core.settings.effective_limits.max_batch_size == 1 == w.core.settings.knobs.max_batch_size
    for i in range(20):
        w.add([i + 3] * 4, 100)
    for _ in range(64 * 14):
        if w.live:
            w.step()
        else:
            w.add([1], 100)
    assert w.core.settings.effective_limits.max_batch_size >= 16 and w.core.settings.knobs.max_batch_size == 16
    w.drain()


@pytest.mark.slow
def test_a_shortage_that_stays_is_run_into_ever_more_rarely() -> None:
    w = World(kv_blocks=4000)
    w.core.settings.set_knobs(Knobs(16, 0, 64, 64))
    w.executor = w.core.executor = Short()
    ran_out = []
    for step in range(1500):
        while len(w.live) < 16:
            w.add([step % 200] * 4, 100)
        result = w.step().result
        assert result is not None
        if result.oom:
            ran_out.append(step)
    assert 2 < len(ran_out) < 9
    gaps = [b - a for a, b in itertools.pairwise(ran_out)]
    assert gaps[1:] == sorted(gaps[1:]), "each rise is tried after more steps than the one before"
    w.drain()


def test_a_policy_that_raises_is_taken_off(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def budget(self, view: object) -> int:
            raise ZeroDivisionError("oops")

    w = World(kv_blocks=20)
    w.core.settings.policy = Bad()
    w.add([1] * 12, 2)
    with caplog.at_level(logging.ERROR):
        assert w.step().record is not None
    assert w.core.settings.policy is None and "step policy failed" in caplog.text
    w.drain()


def test_a_policy_that_raises_leaves_one_that_was_set_meanwhile() -> None:
    class Whole:
        def budget(self, view: SchedulerView) -> int:
            return view.knobs.token_budget

    class Superseded:
        def budget(self, view: object) -> int:
            w.core.settings.policy = new  # as another thread may, in this very moment
            raise ZeroDivisionError("oops")

    w, new = World(kv_blocks=20), Whole()
    w.core.settings.policy = Superseded()
    w.add([1] * 12, 2)
    w.step()
    assert w.core.settings.policy is new
    w.drain()


def test_a_policy_bounds_one_step_and_the_record_says_so() -> None:
    class Small:
        def budget(self, view: object) -> int:
            return 5

    w = World(kv_blocks=20)
    w.core.settings.policy = Small()
    epoch = w.core.settings.epoch
    w.add([1] * 12, 2)
    record = w.step().record
    assert record is not None and record.budget_used == 5 == record.prefill_tokens
    assert record.prefill_context == 5 and record.prefill_attention == 15 and record.limited_by == "budget"
    assert w.core.settings.epoch == epoch
    w.drain()


def test_finish_in_every_state() -> None:
    w = World(kv_blocks=20)
    w.core.settings.set_knobs(Knobs(2, 0, 8, 4))
    decoding = w.add([1, 2], 9)
    w.step()
    prefilling, waiting = w.add([2] * 8, 9), w.add([3] * 8, 9)
    w.step()
    assert (decoding.state, prefilling.state, waiting.state) == ("decode", "prefill", "waiting")
    for sequence in (waiting, prefilling, decoding):
        w.cancel(sequence)
        w.scheduler.check_integrity()
    assert not w.core.has_work and w.scheduler.kv.free == 20
    assert w.records["r3"].scheduled is None and w.records["r3"].queue_time is None


def test_many_time_outs_do_not_pile_up() -> None:
    w = World(kv_blocks=20)
    for _ in range(5000):
        sequence: Sequence = w.add([1], 1, expires=1e9)
        w.cancel(sequence)
    assert len(w.core._expiries) < 2100
