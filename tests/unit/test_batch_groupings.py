"""Which items go together: each grouping's order, and what all of them keep."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from runtime.batching.groupings import (
    GROUPINGS,
    FairShare,
    Grouping,
    LengthBuckets,
    PriorityOrder,
    SortedWindows,
    grouping_of,
)
from runtime.batching.groupings.arrival import Line
from runtime.batching.item import ENDED, RUNNING, WAITING, Item
from runtime.batching.strategies import Adaptive, Dynamic
from runtime.ordering import FairShare as FairShareOrdering
from tests.tiers import slow_but_for
from tests.unit.batching_world import SLO_400, core_of, poisson, run


def put(grouping: Grouping, *items: Item) -> None:
    for item in items:
        item.state = WAITING
        grouping.add(item)


def take(grouping: Grouping, most: int) -> list[Item]:
    found = grouping.first(most)
    for item in found:
        item.state = RUNNING
    if found:
        grouping.took(found)
    return found


def costs(*values: int) -> list[Item]:
    return [Item(None, float(i), cost) for i, cost in enumerate(values)]


@pytest.mark.parametrize("name", GROUPINGS)
def test_each_item_comes_out_once_unless_it_has_left(name: str) -> None:
    rng = random.Random(3)
    grouping = grouping_of(name)
    waiting: set[Item] = set()
    for turn in range(3000):
        action = rng.random()
        if action < 0.55:
            item = Item(None, float(turn), rng.choice([1, 7, 30, 200]), rng.randrange(3), rng.choice("ab"))
            put(grouping, item)
            waiting.add(item)
        elif action < 0.75 and waiting:
            item = rng.choice(sorted(waiting, key=lambda item: item.arrival))
            item.state = ENDED
            grouping.removed(item)
            waiting.remove(item)
        else:
            found = grouping.first(4)
            assert bool(found) == bool(waiting) and len(found) <= 4 and grouping.first(4) == found
            chosen = rng.sample(found, rng.randint(1, len(found))) if found else []
            for item in chosen:
                item.state = RUNNING
                waiting.remove(item)
            if chosen:
                grouping.took(chosen)
        oldest = grouping.oldest()
        assert (oldest.arrival if oldest else None) == min((item.arrival for item in waiting), default=None)
    left = set()
    while found := take(grouping, 16):
        left |= set(found)
    assert left == waiting


def test_arrival_order() -> None:
    grouping = grouping_of("arrival")
    items = costs(5, 1, 9)
    put(grouping, *items)
    assert take(grouping, 2) == items[:2] and take(grouping, 2) == items[2:]


def test_earliest_deadline_first() -> None:
    grouping = grouping_of("deadline")
    items = [Item(None, 0.0, deadline=deadline) for deadline in (3.0, 1.0, float("inf"), 2.0)]
    put(grouping, *items)
    assert [item.deadline for item in take(grouping, 4)] == [1.0, 2.0, 3.0, float("inf")]


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    grouping = PriorityOrder(step_s=2.0)
    low, high, later = Item(None, 0.0), Item(None, 1.0, priority=1), Item(None, 2.5, priority=1)
    put(grouping, low, high, later)
    assert take(grouping, 3) == [high, low, later]


@pytest.mark.parametrize("workers", [1, 3])
def test_priority_never_starves(workers: int) -> None:
    """However much of high priority comes, one of low priority waits no longer than its step and what was before it."""
    core = core_of(Dynamic(), PriorityOrder(step_s=1.0), size=8, wait_ms=0, workers=workers)
    rate = 0.95 * 8 / 0.036 * workers
    items = poisson(rate, 30.0, seed=5)
    for i, item in enumerate(items):
        item.priority = 0 if i % 20 == 0 else 1
    served = run(core, items)
    waits = {priority: max(r.queue_time or 0 for r in served.records if r.priority == priority) for priority in (0, 1)}
    assert waits[0] <= 1.0 + waits[1] + 0.2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_greedy_tenants_share_within_five_percent(seed: int) -> None:
    """One asks four times as often and for ten times the cost of the other; both want more than half."""
    rng = random.Random(seed)
    core = core_of(Dynamic(), "fair", size=16, wait_ms=0)
    many = poisson(400, 60, seed, lambda r: r.choice([1, 10, 30]))
    for item in many:
        item.tenant = "a" if rng.random() < 0.8 else "b"
        item.cost = item.cost if item.tenant == "a" else 10 * item.cost
    served = run(core, many, lambda call: 0.010 + 0.001 * call.cost)
    during = [call for call in served.calls if 5 < call.end < 55]
    got = {tenant: sum(i.cost for c in during for i in c.items if i.tenant == tenant) for tenant in "ab"}
    assert got["a"] == pytest.approx(got["b"], rel=0.05)


@pytest.mark.parametrize(
    ("seed", "offered"), slow_but_for(((1, (1.0, 1.0)),), ((1, (1.0, 1.0)), (2, (2.0, 0.75)), (3, (3.0, 0.6))))
)
@pytest.mark.parametrize("strategy", [Adaptive, Dynamic])
def test_two_greedy_tenants_share_within_five_percent_whatever_is_dropped(
    strategy: type[Adaptive | Dynamic], seed: int, offered: tuple[float, float]
) -> None:
    """Each offers more than half of what can be served, in items of its own cost; what is late is dropped or times out."""
    rng = random.Random(seed)
    core = core_of(strategy(), "fair", slo=SLO_400, size=32, wait_ms=0)
    capacity = 0.8 / 0.0005  # cost a second
    mine = poisson(offered[0] * capacity / 2, 40, seed, lambda r: r.randint(1, 3))
    yours = poisson(offered[1] * capacity / 11, 40, seed + 10, lambda r: r.randint(2, 20))
    for item in mine:
        item.tenant = "a"
    for item in yours:
        item.tenant = "b"
    items = sorted([*mine, *yours], key=lambda item: item.arrival)
    for item in items:
        item.expires = item.arrival + 0.4 if strategy is Dynamic or rng.random() < 0.1 else item.expires
    served = run(core, items, lambda call: 0.005 + 0.0005 * call.cost)
    during = [call for call in served.calls if 3 < call.end < 40]
    got = {tenant: sum(i.cost for c in during for i in c.items if i.tenant == tenant) for tenant in "ab"}
    assert got["a"] == pytest.approx(got["b"], rel=0.05)


def by_start(grouping: FairShare, most: int) -> list[Item]:
    """What ``grouping.first`` is to give: of all heads the one that starts first, then that of the tenant that joined first."""
    lines = [list(line) for line in grouping._lines.values()]
    starts = {place: grouping._start(line[0].tenant) for place, line in enumerate(lines)}
    found: list[Item] = []
    while starts and len(found) < most:
        place = min(starts, key=lambda place: (starts[place], place))
        item = lines[place].pop(0)
        found.append(item)
        starts[place] += grouping._shares.lasts(item)
        if not lines[place]:
            del starts[place]
    return found


@pytest.mark.parametrize("never", [0, 4, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_turns_go_by_start_and_then_by_who_joined_first(seed: int, never: int) -> None:
    """Also those of tenants that are passed over until they are owed all they can be, and once a dearer call makes that more."""
    rng = random.Random(seed)
    grouping = FairShare({"t9": 3.0})
    waiting: list[Item] = []
    owed: list[int] = []
    for turn in range(3000):
        action, tenant = rng.random(), rng.randrange(12)
        passed_over = {f"t{i}" for i in range(never)} if turn < 2600 else set[str]()
        if action < 0.5 and (tenant >= never or sum(item.tenant == f"t{tenant}" for item in waiting) < 3):
            dear = rng.choice([1, 1, 2]) * (20 if turn > 2200 else 1)
            waiting.append(Item(None, float(turn), dear, tenant=f"t{tenant}"))
            put(grouping, waiting[-1])
        elif action < 0.55 and waiting:
            item = waiting.pop(rng.randrange(len(waiting)))
            item.state = ENDED
            grouping.removed(item)
        else:
            most = rng.choice([1, 3, 64])
            assert grouping.first(most) == by_start(grouping, most)
            chosen = [item for item in grouping.first(64) if item.tenant not in passed_over][: rng.choice([1, 2, 3])]
            for item in chosen:
                item.state = RUNNING
                waiting.remove(item)
            if chosen:
                grouping.took(chosen)
        assert {tenant for _, _, tenant in grouping._turns} == grouping._lines.keys() == grouping._places.keys()
        owed.append(sum(start == -math.inf for start, _, _ in grouping._turns))
    assert not never or (max(owed[1000:2200]) > 0 == min(owed[2200:2600]))


def test_a_call_looks_at_no_more_tenants_than_it_has_items(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    begin = Line.__iter__

    def counted(line: Line) -> Iterator[Item]:
        nonlocal looked
        looked += 1
        return begin(line)

    grouping = FairShare()
    put(grouping, *[Item(None, float(i), tenant=f"t{i}") for i in range(1000)])
    monkeypatch.setattr(Line, "__iter__", counted)
    assert [item.tenant for item in take(grouping, 4)] == ["t0", "t1", "t2", "t3"]
    assert looked == 4


def test_what_a_tenant_is_owed_is_bounded() -> None:
    """One whose items could never be served does not shut the other out once they can."""
    grouping = FairShare()
    put(grouping, Item(None, 0.0, tenant="a"))
    for i in range(1000):
        put(grouping, Item(None, float(i), 1, tenant="b"))
        (found,) = (item for item in grouping.first(2) if item.tenant == "b")
        found.state = RUNNING
        grouping.took([found])
    put(grouping, *[Item(None, 1000.0, 1, tenant="ab"[i % 2]) for i in range(200)])
    assert 35 < sum(item.tenant == "b" for item in take(grouping, 100)) <= 50


def test_weights_share_in_proportion_and_idle_time_is_not_saved_up() -> None:
    grouping = FairShare({"a": 3.0})
    put(grouping, *[Item(None, float(i), 1, tenant="ab"[i % 2]) for i in range(80)])
    first = take(grouping, 40)
    assert sum(item.tenant == "a" for item in first) == pytest.approx(30, abs=1)
    newcomer = Item(None, 99.0, 1, tenant="c")
    put(grouping, newcomer)
    assert newcomer in take(grouping, 4)  # at once, but
    put(grouping, *[Item(None, 100.0, 1, tenant="c") for _ in range(30)])
    assert sum(item.tenant == "c" for item in take(grouping, 12)) <= 6  # not with what it did not use before


def test_who_was_served_once_does_not_wait_for_ever_new_tenants() -> None:
    grouping = FairShare()
    put(grouping, Item(None, 0.0, 10, tenant="a"))
    take(grouping, 1)
    again = Item(None, 0.0, 10, tenant="a")
    put(grouping, again)
    for served in range(3000):
        put(grouping, Item(None, 1.0, 10, tenant=f"newcomer {served}"))
        if take(grouping, 1) == [again]:
            break
    assert served <= 4
    for number in range(3000):
        put(grouping, Item(None, 1.0, 10, tenant=f"newcomer {number}"))
        take(grouping, 1)
    assert len(grouping._shares.starts) <= 1025


def test_by_the_fair_ordering_what_ends_while_it_waits_is_not_charged() -> None:
    grouping = grouping_of(FairShareOrdering())
    gone = [Item(None, 0.0, 10, tenant="a") for _ in range(10)]
    put(grouping, *gone)
    for item in gone:
        item.state = ENDED
        grouping.removed(item)
    first, other = Item(None, 1.0, 10, tenant="a"), Item(None, 2.0, 10, tenant="b")
    put(grouping, first, other)
    assert take(grouping, 1) == [first]


def test_buckets_keep_similar_lengths_together_and_the_oldest_goes_first() -> None:
    grouping = LengthBuckets(growth=2.0, first=16)
    items = costs(100, 12, 120, 3, 90, 16)
    put(grouping, *items)
    assert [item.cost for item in take(grouping, 8)] == [100, 120, 90]
    assert [item.cost for item in take(grouping, 8)] == [12, 3, 16]
    for cost in (1, 16, 17, 32, 33, 1000):
        top = 16 * 2 ** grouping.bucket(cost)
        assert cost <= top and (top == 16 or cost > top / 2)


def test_sorted_windows_serve_neighbours_and_finish_a_window_before_the_next() -> None:
    grouping = SortedWindows(window=4)
    put(grouping, *costs(3, 50, 4, 60, 1, 2))
    calls = [[item.cost for item in take(grouping, 2)] for _ in range(3)]
    assert calls == [[60, 50], [4, 3], [2, 1]]


def test_a_call_larger_than_the_window_is_filled_up_with_what_came_next() -> None:
    grouping = SortedWindows(window=4)
    put(grouping, *costs(*range(1, 13)))
    assert [item.cost for item in take(grouping, 10)] == [4, 3, 2, 1, 5, 6, 7, 8, 9, 10]
    assert [item.cost for item in take(grouping, 10)] == [12, 11] and not take(grouping, 1)


def test_padded_groups_bound_the_rectangle() -> None:
    core = core_of(Dynamic(), "padded", budget=100, wait_ms=0)
    for cost in (10, 20, 20, 30, 5, 5, 5):
        core.submit(Item(None, 0.0, cost), 0.0)
    calls = []
    while (call := core.next(0.0).call) is not None:
        calls.append((len(call.items), call.cost))
        core.done(call, 0.0)
    assert calls == [(3, 60), (3, 90), (1, 5)]


@pytest.mark.parametrize("name", GROUPINGS)
def test_every_grouping_serves_under_the_adaptive_strategy(name: str) -> None:
    items = poisson(150, 10, 7, lambda r: r.choice([1, 4, 40, 100]))
    for i, item in enumerate(items):
        item.priority, item.tenant = i % 3, "ab"[i % 2]
    served = run(core_of(Adaptive(), name, size=16), items, lambda call: 0.005 + 0.0002 * call.cost)
    assert {record.reason for record in served.records} == {"stop"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthBuckets(growth=1.0), "growth is 1.0"),
        (lambda: LengthBuckets(first=0), "first is 0"),
        (lambda: SortedWindows(0), "window is 0"),
        (lambda: PriorityOrder(0.0), r"step_s is 0.0"),
        (lambda: FairShare({"a": -1.0}), "weight of tenant 'a' is -1.0"),
        (lambda: grouping_of(7), "grouping is 7"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
