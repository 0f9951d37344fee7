"""The batcher's core, without a thread or a clock: what goes into a call, when, and how each item ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import pytest

from runtime.batching.core import BatchCore
from runtime.batching.item import ENDED, RUNNING, WAITING, Item
from runtime.batching.strategies import Adaptive, Decision, Dynamic, State, Static
from runtime.batching.strategies.protocol import Plain
from runtime.errors import RejectedError
from runtime.knobs import Knobs
from runtime.records import FinishReason, LimitedBy
from runtime.slo import SLO
from tests.unit.batching_world import LIMITS, core_of, knobs


def fill(core: BatchCore, count: int, now: float = 0.0, **options: object) -> list[Item]:
    items = [Item(None, now, id=i, **options) for i in range(count)]  # type: ignore[arg-type]
    for item in items:
        core.submit(item, now)
    return items


def test_a_full_call_goes_at_once_and_the_rest_waits_for_its_window() -> None:
    core = core_of(Dynamic(), size=4, wait_ms=10)
    items = fill(core, 6, now=1.0)
    first = core.next(1.0)
    assert first.call is not None and [*first.call.items] == items[:4] and first.call.limited_by is LimitedBy.SLOTS
    assert [item.state for item in items] == [RUNNING] * 4 + [WAITING] * 2
    assert core.next(1.0) == (None, inf, [])  # the one worker is busy
    core.done(first.call, 1.005)
    assert {item.state for item in items[:4]} == {ENDED}
    held = core.next(1.005)
    assert (held.call, held.wake_at, core.hold_items) == (None, 1.010, 4)
    second = core.next(1.010).call
    assert second is not None and [*second.items] == items[4:] and second.limited_by is LimitedBy.DEMAND


def test_static_waits_for_a_full_call_and_gives_up_waiting_when_nothing_more_can_come() -> None:
    core = core_of(Static(), size=4)
    fill(core, 3)
    assert core.next(100.0) == (None, inf, []) and core.hold_items == 4
    core.state.closing = True
    call = core.next(100.0).call
    assert call is not None and len(call.items) == 3


def test_static_goes_when_the_queue_is_full() -> None:
    core = core_of(Static(), size=4, max_queue=3)
    fill(core, 3)
    with pytest.raises(RejectedError, match="max_queue is 3") as full:
        core.submit(Item(None, 0.0), 0.0)
    assert full.value.reason == "queue_full"
    assert core.next(0.0).call is not None


def test_the_budget_counts_cost_and_an_item_above_it_goes_alone() -> None:
    core = core_of(Dynamic(), budget=10, wait_ms=0)
    for cost in (4, 5, 3, 50, 1):
        core.submit(Item(None, 0.0, cost), 0.0)
    sizes = []
    while (call := core.next(0.0).call) is not None:
        sizes.append(([item.cost for item in call.items], call.limited_by))
        core.done(call, 0.0)
    budget, demand = LimitedBy.BUDGET, LimitedBy.DEMAND
    assert sizes == [([4, 5], budget), ([3], budget), ([50], budget), ([1], demand)]


def test_knobs_are_read_at_every_call() -> None:
    core = core_of(Dynamic(), size=4, wait_ms=0)
    fill(core, 10)
    first = core.next(0.0).call
    assert core.settings.set_knobs(knobs(2, 0)) == 1
    assert core.settings.set_knobs(knobs(2, 0)) == 1  # nothing changed
    core.done(first, 1.0)  # type: ignore[arg-type]
    second = core.next(1.0).call
    assert first is not None and second is not None
    assert (len(first.items), first.epoch, len(second.items), second.epoch) == (4, 0, 2, 1)


def test_whatever_a_strategy_decides_the_knobs_hold() -> None:
    class Greedy(Plain):
        name = "greedy"

        def decide(self, state: State) -> Decision:
            return Decision(state.queue.first(100))

    core = core_of(Greedy(), size=5, budget=8)
    for _ in range(12):
        core.submit(Item(None, 0.0, 2), 0.0)
    call = core.next(0.0).call
    assert call is not None and (len(call.items), call.cost) == (4, 8)
    assert (core.state.waiting, core.state.waiting_cost) == (8, 16)


def test_out_of_memory_lowers_the_limits_and_the_knobs_with_them() -> None:
    core = core_of(Dynamic(), size=32)
    core.settings.limit(replace(core.settings.limits, max_batch_size=10, token_budget=50))
    assert (core.settings.effective_limits.max_batch_size, core.settings.effective_limits.token_budget) == (10, 50)
    assert (core.knobs.max_batch_size, core.knobs.token_budget, core.epoch) == (10, 50, 1)
    core.settings.set_knobs(knobs(32))
    assert core.knobs.max_batch_size == 10
    core.settings.limit(core.settings.limits)
    assert core.knobs.max_batch_size == 32 and core.epoch == 2  # what was set last comes back with them
    with pytest.raises(ValueError, match="max_batch_size is 5000"):
        core.settings.set_knobs(Knobs(max_batch_size=5000))


def gap_after(gaps: Iterable[float]) -> float:
    """What the core takes for the time between two arrivals."""
    core, now = core_of(Static(), size=4096), 0.0
    for gap in (0.0, *gaps):
        now += gap
        core.submit(Item(None, now), now)
    return core.state.gap_s


def test_a_pause_does_not_pass_for_a_low_rate() -> None:
    steady = [0.05] * 100
    for pause in (60.0, 3600.0, 1e9):
        assert 0.05 < gap_after([*steady, pause]) < 0.06
    assert gap_after([*steady, *[5.0] * 60]) == pytest.approx(5.0, rel=0.2)  # a rate that falls for good is found
    assert gap_after([*[5.0] * 10, *steady]) == pytest.approx(0.05, rel=1.0)
    fast = [*[5.0] * 10, *[2e-6] * 1000]
    assert gap_after([*fast, 5.0]) < 1e-3 and gap_after([*fast, *[5.0] * 15]) > 2.5  # a crowd is forgotten as before
    crowds = [5.0, *[0.0] * 99] * 4  # a hundred at once are no reason to take the next five seconds for a pause
    assert gap_after([*crowds, 5.0]) == pytest.approx(0.25, rel=0.1)


def test_a_withdrawn_item_never_runs() -> None:
    core = core_of(Dynamic(), size=4, wait_ms=0)
    items = fill(core, 3)
    assert core.forget(items[1]) and not core.forget(items[1])
    call = core.next(0.0).call
    assert call is not None and [*call.items] == [items[0], items[2]]
    assert not core.forget(items[0])  # it runs


def test_timeouts_end_what_waits_and_what_runs() -> None:
    core = core_of(Dynamic(), size=2, wait_ms=0)
    items = fill(core, 4, expires=5.0)
    call = core.next(0.0).call
    assert core.expiries.next == 5.0
    ended = core.expire(5.0)
    assert {(e.item, e.reason) for e in ended} == {(item, FinishReason.TIMEOUT) for item in items}
    assert core.state.waiting == 0 and core.expiries.next == inf
    core.done(call, 6.0)  # type: ignore[arg-type]
    assert core.next(6.0).call is None


def test_the_items_of_a_dead_worker_run_once_more_together_and_then_fail() -> None:
    core = core_of(Dynamic(), size=4, wait_ms=0, workers=2)
    items = fill(core, 6)
    first = core.next(0.0).call
    assert first is not None
    assert core.lost(first, 1.0) == []
    again = core.next(1.0).call
    assert again is not None and [*again.items] == items[:4] and items[0].tries == 2
    assert core.lost(again, 2.0) == items[:4]
    rest = core.next(2.0).call
    assert rest is not None and [*rest.items] == items[4:]


def test_a_retry_that_has_timed_out_does_not_hold_up_the_next_one() -> None:
    core = core_of(Dynamic(), size=3, wait_ms=0)
    items = [Item(None, 0.0, id=i, expires=1.5 if i == 1 else inf) for i in range(3)]
    for item in items:
        core.submit(item, 0.0)
    call = core.next(0.0).call
    assert call is not None and core.lost(call, 1.0, apart=True) == []
    again = core.next(1.0).call
    assert again is not None and [*again.items] == items[:1]
    assert [e.item for e in core.expire(1.5)] == items[1:2]
    core.done(again, 2.0)
    last = core.next(2.0).call
    assert last is not None and [*last.items] == items[2:], "it would be called for by nobody else"


def test_a_retry_keeps_to_knobs_lowered_meanwhile() -> None:
    core = core_of(Dynamic(), size=4, wait_ms=0)
    items = fill(core, 4)
    core.lost(core.next(0.0).call, 1.0)  # type: ignore[arg-type]
    core.settings.set_knobs(knobs(3, 0))
    call = core.next(1.0).call
    assert call is not None and [*call.items] == items[:3]
    core.done(call, 2.0)
    last = core.next(2.0).call
    assert last is not None and [*last.items] == items[3:]


def test_the_least_loaded_worker_is_next() -> None:
    core = core_of(Dynamic(), size=1, wait_ms=0, workers=2, concurrency=2)
    fill(core, 5)
    calls = [core.next(0.0).call for _ in range(4)]
    assert [call.worker for call in calls if call] == [0, 1, 0, 1]
    assert core.next(0.0).call is None
    core.done(calls[1], 1.0)  # type: ignore[arg-type]
    assert core.next(1.0).call.worker == 1  # type: ignore[union-attr]


def test_a_call_knows_how_many_ran_beside_it_on_average() -> None:
    core = core_of(Dynamic(), size=1, wait_ms=0, workers=3)
    fill(core, 3)
    a, b = core.next(0.0).call, core.next(2.0).call
    assert a is not None and b is not None and (a.others, b.others) == (0, 1)
    core.done(a, 4.0)
    assert a.others == 0.5  # alone for two of four seconds
    core.done(b, 10.0)
    assert b.others == 0.25


def test_classes_have_slos_of_their_own() -> None:
    slos = {"default": SLO.parse("e2e=1s"), "fast": SLO.parse("ttft=100ms,e2e=300ms")}
    core = BatchCore(Adaptive(), slo=slos, limits=LIMITS)
    items = [Item(None, 2.0, request_class=name) for name in ("default", "fast", "unheard-of")]
    items.append(Item(None, 2.0, deadline=7.0))
    for item in items:
        core.submit(item, 2.0)
    assert [item.deadline for item in items] == [3.0, 2.1, 3.0, 7.0]
    assert core.state.slo_s == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"concurrency": 1.5}, "concurrency is 1.5"),
        ({"retries": True}, "retries is True"),
        ({"grouping": "alphabetical"}, "grouping is 'alphabetical'; it must be one of arrival,"),
    ],
)
def test_wrong_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchCore(Static(), **options)  # type: ignore[arg-type]


def test_a_view_speaks_of_items_as_prompts() -> None:
    core = core_of(Dynamic(), slo=SLO.parse("e2e=1s"), size=2, wait_ms=0)
    fill(core, 3, now=5.0, cost=7)
    core.next(5.0)
    view = core.view(5.5)
    assert (view.running, view.waiting, view.waiting_tokens, view.prefilling_tokens) == (2, 1, 7, 14)
    assert (view.oldest_arrival, view.least_slack, view.epoch) == (5.0, 0.5, 0)
