from __future__ import annotations

import random
from math import inf
from typing import ClassVar

import pytest

from runtime.batching.batcher import Batcher
from runtime.batching.groupings import grouping_of
from runtime.batching.item import WAITING, Item
from runtime.knobs import Knobs
from runtime.llm import waiting as waiting_module
from runtime.llm.waiting import WaitingQueue, precedes, put_behind, rank
from runtime.ordering import ORDERINGS, PRIORITY_STEP_S, SHORTEST_STEP_S, FairShare, Queued, ordering_of
from runtime.ordering.fair_share import Shares
from runtime.request import Request, SamplingParams, Sequence


def make(id: str, arrival: float = 0.0, prompt: int = 4, **fields: object) -> Sequence:
    return Sequence(Request(id, (1,) * prompt, SamplingParams(), 4, arrival, **fields))  # type: ignore[arg-type]


def order(name: str, *sequences: Sequence) -> list[str]:
    queue = WaitingQueue(ordering_of(name))
    for sequence in sequences:
        queue.push(sequence)
    out = []
    while queue.peek() is not None:
        sequence = queue.pop()
        sequence.state = "prefill"
        out.append(sequence.request.id)
        queue.check_integrity()
    return out


def test_first_come_first_served() -> None:
    assert order("fcfs", make("a", 1), make("b", 0, priority=9), make("c", 2)) == ["b", "a", "c"]


def test_priority_is_worth_a_bounded_time() -> None:
    late, too_late = 0.9 * PRIORITY_STEP_S, 1.1 * PRIORITY_STEP_S
    assert order("priority", make("old", 0), make("vip", late, priority=1)) == ["vip", "old"]
    assert order("priority", make("old", 0), make("vip", too_late, priority=1)) == ["old", "vip"]
    assert order("priority", make("a", 0), make("b", 0)) == ["a", "b"]


def test_shortest_is_worth_a_bounded_time() -> None:
    assert order("shortest", make("long", 0, 100), make("short", 0.5)) == ["short", "long"]
    assert order("shortest", make("long", 0, 100), make("short", 96 * SHORTEST_STEP_S + 0.1)) == ["long", "short"]


def test_earliest_deadline_first_and_none_is_late() -> None:
    assert order("deadline", make("none"), make("b", deadline=9.0), make("a", deadline=3.0)) == ["a", "b", "none"]


def test_fair_share_alternates_and_charges_by_tokens() -> None:
    big = [make(f"big{i}", prompt=20, tenant="big") for i in range(3)]
    small = [make(f"small{i}", prompt=4, tenant="small") for i in range(3)]
    assert order("fair", *big, *small) == ["big0", "small0", "small1", "small2", "big1", "big2"]


def test_a_tenant_saves_up_nothing_while_away() -> None:
    queue = WaitingQueue(ordering_of("fair"))
    for i in range(4):
        queue.push(make(f"busy{i}", tenant="busy"))
    for _ in range(3):
        queue.pop().state = "prefill"
    for i in range(3):
        queue.push(make(f"new{i}", tenant="new"))
    taken = []
    for _ in range(4):
        sequence = queue.pop()
        sequence.state = "prefill"
        taken.append(sequence.request.id)
    assert taken == ["new0", "busy3", "new1", "new2"] or taken == ["busy3", "new0", "new1", "new2"]


def test_who_was_served_once_waits_for_so_much_work_of_newcomers_and_no_more() -> None:
    """Two newcomers wait at any time, each with as much work as the request that waits: it is the third of three."""
    queue = WaitingQueue(ordering_of("fair"))
    queue.push(make("first", tenant="a"))
    queue.pop().state = "prefill"
    queue.push(make("second", tenant="a"))
    for number in range(2):
        queue.push(make(f"{number}", tenant=f"newcomer {number}"))
    for served in range(100):
        taken = queue.pop()
        taken.state = "prefill"
        if taken.request.id == "second":
            break
        queue.push(make(f"{served + 2}", tenant=f"newcomer {served + 2}"))
    assert 2 <= served <= 6


def test_tenants_that_always_wait_share_by_weight_though_newcomers_come() -> None:
    dice, got, count = random.Random(1), dict.fromkeys("abc", 0), 0
    queue = WaitingQueue(FairShare({"a": 2.0}))

    def push(tenant: str) -> None:
        queue.push(make("", prompt=dice.randrange(1, 400 if tenant == "a" else 20), tenant=tenant))

    for tenant in "abc" * 10:
        push(tenant)
    for _ in range(6000):
        if dice.random() < 0.3:
            count += 1
            push(f"newcomer {count}")
        taken = queue.pop()
        taken.state = "prefill"
        tenant = taken.request.tenant
        if tenant in got:
            got[tenant] += taken.request.work
            push(tenant)
    assert got["a"] / 2 == pytest.approx(got["b"], rel=0.03) and got["b"] == pytest.approx(got["c"], rel=0.03)


@pytest.mark.parametrize(
    ("waiting", "works"), [((4, 20), (10, 400)), ((4, 20, 20), (10, 400, 400)), ((16, 8), (50, 800))]
)
def test_who_always_has_something_queued_loses_nothing_to_long_requests(
    waiting: tuple[int, ...], works: tuple[int, ...]
) -> None:
    """One long request carries virtual time past the starts of many short ones, of which the next is queued meanwhile."""
    queue, got = WaitingQueue(FairShare()), [0] * len(works)
    for tenant, (count, work) in enumerate(zip(waiting, works, strict=True)):
        for _ in range(count):
            queue.push(make("", prompt=work, tenant=str(tenant)))
    while max(got) < 200 * max(works):
        taken = queue.pop()
        taken.state = "prefill"
        tenant = int(taken.request.tenant)
        got[tenant] += taken.request.work
        queue.push(make("", prompt=works[tenant], tenant=str(tenant)))
    assert min(got) == pytest.approx(max(got), rel=0.05)


def test_many_weights_do_not_make_it_dear() -> None:
    shares = Shares({str(n): 2.0 for n in range(5)})
    for tenant in ("0", "0", "other"):
        shares.join(tenant)
    assert shares._sharing == 3.0
    for tenant, left in (("0", 3.0), ("other", 2.0), ("0", 0.0), ("0", 0.0)):
        shares.leave(tenant)
        assert shares._sharing == left


def test_weights_count_in_how_fast_newcomers_carry_virtual_time_on() -> None:
    found = {}
    for weight in (1.0, 6.0):
        fair = FairShare({"a": weight})
        for name in ("a", "b"):
            fair.key(make("", tenant=name).request)
        fair.took(make("", tenant="b").request, 0.0)
        fair.took(make("", tenant="a").request, 0.0)
        found[weight] = fair.key(make("", tenant="c").request)
    assert found == {1.0: 8 / 2, 6.0: 8 / 7}


def test_tenants_that_owe_nothing_are_forgotten_and_seldom_looked_for() -> None:
    fair = FairShare()
    shares, looked = fair._shares, 0
    for number in range(100_000):
        request = make("", tenant=f"user {number}").request
        before = shares.starts
        fair.took(request, fair.key(request))
        looked += shares.starts is not before
        assert len(shares.starts) <= 1025 and not shares._queued
    assert looked <= 100
    keys = [(request, fair.key(request)) for request in (make("", tenant=f"{n}").request for n in range(20_000))]
    looked = 0
    for request, key in keys:  # all of them are remembered until the last one goes
        before = shares.starts
        fair.took(request, key)
        looked += shares.starts is not before
    assert looked <= 2


def test_what_ends_before_it_runs_is_not_charged() -> None:
    queue = WaitingQueue(ordering_of("fair"))
    gone = [make(f"gone{i}", tenant="a") for i in range(10)]
    for sequence in gone:
        queue.push(sequence)
    for sequence in gone:
        sequence.state = "finished"
        queue.removed(sequence)
    again = make("again", tenant="a")
    queue.push(again)
    assert again.key == 0.0


def test_what_virtual_time_has_passed_stays_charged() -> None:
    """Work that the tenant could have had is not saved up."""
    fair = FairShare()
    queued = make("queued", tenant="a").request
    fair.key(queued)
    other = make("other", tenant="b", prompt=8).request
    fair.took(other, fair.key(other))  # by its 12 virtual time will grow 6
    fair.took(other, fair.key(other))
    assert fair._shares.now == 12.0
    fair.key(make("next", tenant="a").request)
    fair.left(queued, 0.0)
    assert fair.key(make("third", tenant="a").request) == 8.0 + 8


class Told:
    """First come, first served; keeps what it is told."""

    def __init__(self, key: float = 0.0) -> None:
        self.first, self.heard = key, list[tuple[str, str, float]]()

    def key(self, queued: Queued) -> float:
        return self.first + queued.arrival

    def took(self, queued: Queued, key: float) -> None:
        self.heard.append(("took", queued.tenant, key))

    def left(self, queued: Queued, key: float) -> None:
        self.heard.append(("left", queued.tenant, key))


def test_an_ordering_is_told_once_of_each_that_leaves_the_queue() -> None:
    told = Told()
    queue = WaitingQueue(told)
    a, b, c, d = (make(name, at, tenant=name) for at, name in enumerate("abcd"))
    for sequence in (a, b, c, d):
        queue.push(sequence)
    queue.pop().state = "prefill"
    queue.take(c)  # though it was not the first
    c.state = "prefill"
    queue.relegate(b)
    b.state = "finished"
    queue.removed(b)
    a.preemptions = c.preemptions = 1
    for sequence in (a, c):
        sequence.state = "waiting"
        queue.push(sequence)
    queue.take(a)
    a.state = c.state = "finished"
    queue.removed(c)
    assert told.heard == [("took", "a", 0.0), ("took", "c", 2.0), ("left", "b", 1.0)]
    queue.check_integrity()


def test_the_own_ordering_hears_of_those_that_leave_while_another_holds() -> None:
    own, other = Told(), Told(100.0)
    queue = WaitingQueue(own)
    a, b, c, d = (make(name, at, tenant=name) for at, name in enumerate("abcd"))
    queue.push(a)
    queue.push(b)
    queue.reorder(other)
    queue.push(c)
    queue.push(d)
    for sequence in (a, c):
        queue.take(sequence)
        sequence.state = "prefill"
    b.state = "finished"
    queue.removed(b)
    assert own.heard == [("took", "a", 0.0), ("left", "b", 1.0)]
    assert other.heard == [("took", "a", 100.0), ("took", "c", 102.0), ("left", "b", 101.0)]
    queue.reorder(own)
    queue.key_anew([a, c], other)
    assert own.heard[2:] == [("took", "c", 2.0)], "it has begun, and is given a key only now"
    queue.pop()
    assert own.heard[3:] == [("took", "d", 3.0)]


def test_an_ordering_that_raises_when_a_request_leaves_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Told):
        def left(self, queued: Queued, key: float) -> None:
            raise LookupError("never heard of it")

    queue, sequence = WaitingQueue(Raises()), make("a")
    queue.push(sequence)
    sequence.state = "finished"
    queue.removed(sequence)
    assert "the ordering raised when request a left" in caplog.text and not queue.count


def test_the_preempted_go_first() -> None:
    again = make("again", 5)
    again.preemptions = 1
    assert order("fcfs", make("new", 0), again) == ["again", "new"]


def test_leaving_early_is_remembered() -> None:
    queue = WaitingQueue(ordering_of("fcfs"))
    sequences = [make(f"s{i}", i) for i in range(500)]
    for sequence in sequences:
        sequence.pending = 4
        queue.push(sequence)
    for sequence in sequences[:499]:
        sequence.state = "finished"
        queue.removed(sequence)
        queue.check_integrity()
    assert len(queue) == 1 and queue.tokens == 4 and queue.peek() is sequences[499] is queue.oldest()
    assert len(queue._heap) < 200, "those that left are still held"


def test_looking_for_the_oldest_from_elsewhere_takes_nothing_out() -> None:
    queue = WaitingQueue(ordering_of("fcfs"))
    gone, there = make("gone", 0), make("there", 1)
    for sequence in (gone, there):
        queue.push(sequence)
    gone.state = "finished"
    queue.removed(gone)
    assert queue.look_for_oldest() is there and [*queue._arrived] == [gone, there]
    assert queue.oldest() is there and [*queue._arrived] == [there]


def relegating(ordering: str, *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(ordering_of(ordering))
    for sequence in sequences:
        sequence.pending = 4
        queue.push(sequence)
    return queue


def test_relegated_ones_go_last_by_arrival_and_preempted_ones_first() -> None:
    a, b, c, d = (make(name, at, deadline=10 + at) for at, name in enumerate("abcd"))
    d.preemptions = 1
    queue = relegating("deadline", a, b, c, d)
    queue.relegate(b)
    queue.relegate(a)
    queue.check_integrity()
    assert [s.request.id for s in queue.in_order()] == ["d", "c", "a", "b"] and len([*queue]) == 4
    assert queue.relegated_tokens == 8 and queue.tokens == 16 and queue.oldest() is c
    far = make("far", 9, deadline=1e9)
    queue.push(far)
    assert queue.work_before(far).tokens == 8, "none of those behind it"
    out = []
    while (head := queue.peek()) is not None:
        assert queue.pop() is head
        head.state = "prefill"
        out.append(head.request.id)
        queue.check_integrity()
    assert out == ["d", "c", "far", "a", "b"] and queue.relegated_tokens == 0


def test_one_that_is_relegated_goes_last_though_it_was_preempted() -> None:
    """Else it stands before all that can be met, and holds them up while there is no room for it."""
    bulk, urgent = make("bulk", 0.0), make("urgent", 5.0)
    put_behind(bulk)
    bulk.preemptions, bulk.pending = 1, 4
    queue = WaitingQueue(ordering_of("fcfs"))
    for sequence in (bulk, urgent):
        queue.push(sequence)
        queue.check_integrity()
    assert [s.request.id for s in queue.in_order()] == ["urgent", "bulk"]
    assert not precedes(bulk, urgent) and queue.relegated_tokens == 4
    queue.reorder(queue.ordering)
    queue.check_integrity()
    assert [s.request.id for s in queue.in_order()] == ["bulk", "urgent"], "relegated no longer"


def test_those_before_one_are_found_without_looking_at_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(4)
    queue = WaitingQueue(ordering_of("fcfs"))
    waiting = [make(str(n), dice.uniform(0, 100)) for n in range(400)]
    for sequence in waiting:
        queue.push(sequence)
    for sequence in dice.sample(waiting, 60):
        queue.relegate(sequence)
    for sequence in dice.sample(waiting, 60):
        sequence.state = "finished"
        queue.removed(sequence)
    looked: list[object] = []
    stands = waiting_module._stands
    monkeypatch.setattr(waiting_module, "_stands", lambda entry: [looked.append(entry), stands(entry)][1])
    in_order = [s for s in waiting if s.state == "waiting"]
    in_order.sort(key=rank)
    for count, sequence in enumerate(in_order, 1):
        looked.clear()
        assert sorted(queue.up_to(sequence), key=rank) == in_order[:count]
        assert len(looked) <= count + 120, "these, and entries that stand no longer"


def test_an_ordering_that_comes_back_finds_the_keys_that_it_gave() -> None:
    """Fair share would else charge those that wait once more at each change."""
    fair, deadline = ordering_of("fair"), ordering_of("deadline")
    queue = WaitingQueue(fair)
    tenants = {name: make(name, at, tenant=name[0]) for at, name in enumerate(["a1", "a2", "a3"])}
    for sequence in tenants.values():
        queue.push(sequence)
    keys = [s.key for s in queue.in_order()]
    queue.reorder(deadline)
    queue.push(make("c", 3.0, tenant="c"))
    queue.reorder(ordering_of("deadline"))
    queue.reorder(fair)
    queue.push(make("b", 4.0, tenant="b"))
    assert [s.key for s in queue.in_order() if s.request.id in tenants] == keys
    assert [s.request.id for s in queue.in_order()] == ["a1", "c", "b", "a2", "a3"]
    queue.check_integrity()


def test_who_gets_its_place_back_counts_for_the_wait_window_again() -> None:
    early, late = make("a", 0.0), make("b", 4.9)
    queue = relegating("fcfs", early)
    queue.relegate(early)
    assert queue.oldest() is None
    queue.push(late)
    queue.reorder(queue.ordering)
    assert queue.oldest() is early
    queue.check_integrity()


def test_one_that_is_relegated_at_its_turn_has_another() -> None:
    a, b, c = (make(name, at) for at, name in enumerate("abc"))
    queue, seen = relegating("fcfs", a, b, c), []
    for sequence in queue.in_order():
        seen.append(sequence.request.id)
        if sequence is a and a.relegated is None:
            queue.relegate(a)
    assert seen == ["a", "b", "c", "a"]


def test_an_ordering_hears_the_key_that_it_gave() -> None:
    """Fair share goes by it: one relegated request would else carry its clock far into the future."""
    a, b = make("a", 5.0, tenant="x"), make("b", 6.0, tenant="y")
    queue = relegating("fair", a, b)
    queue.relegate(a)
    for expected in (b, a):
        assert queue.peek() is queue.pop() is expected
        expected.state = "prefill"
    late = make("late", 7.0, tenant="z")
    queue.push(late)
    assert late.key == 4.0, "a half of what was taken first, when both waited"


def test_many_relegated_leave_no_more_than_twice_as_many_entries() -> None:
    sequences = [make(f"s{i}", i) for i in range(500)]
    queue = relegating("fcfs", *sequences)
    for sequence in reversed(sequences):
        queue.relegate(sequence)
        assert len(queue._heap) <= 2 * len(queue) + 64
    assert [*queue.in_order()] == sequences


def test_the_wait_window_counts_from_who_came_first_whoever_was_queued_first() -> None:
    """A long text is tokenised aside, and is queued behind a short one that came later."""
    queue = WaitingQueue(ordering_of("fcfs"))
    for name, arrival in (("short", 0.1), ("long", 0.0), ("last", 0.2)):
        queue.push(make(name, arrival))
    assert queue.oldest() is queue.look_for_oldest() is queue.peek()
    assert [s.request.id for s in queue._arrived] == ["long", "short", "last"]


def test_the_wait_window_does_not_hold_relegated_ones() -> None:
    a, b = make("a", 0.0), make("b", 5.0)
    queue, knobs = relegating("fcfs", a, b), Knobs(8, 1000, 64, 64)
    assert queue.held_until(knobs, 64, 8) == 1.0
    queue.relegate(a)
    assert queue.held_until(knobs, 64, 8) == -inf
    queue.take(a)
    a.state = "prefill"
    assert queue.held_until(knobs, 64, 8) == 6.0


@pytest.mark.parametrize("name", ["deadline", "priority", "shortest"])
def test_items_go_in_the_order_of_requests(name: str) -> None:
    """The batcher's grouping of that name is the same ordering, with the same constants."""
    rng = random.Random(7)
    drawn = [
        (
            f"{i}",
            rng.uniform(0, 30),
            rng.randrange(1, 4000),
            rng.randrange(-1, 2),
            rng.choice([None, rng.uniform(0, 90)]),
        )
        for i in range(200)
    ]
    requests = [make(id, arrival, size, priority=p, deadline=due) for id, arrival, size, p, due in drawn]
    grouping = grouping_of(name)
    for id, arrival, size, priority, due in drawn:
        item = Item(None, arrival, size, priority, deadline=inf if due is None else due, id=id)
        item.state = WAITING
        grouping.add(item)
    assert [item.id for item in grouping.first(200)] == order(name, *requests)


def test_items_go_by_an_ordering_of_ones_own() -> None:
    class Backwards:
        taken: ClassVar[list[float]] = []

        def key(self, queued: Queued) -> float:
            return -queued.arrival

        def took(self, queued: Queued, key: float) -> None:
            self.taken.append(key)

    with Batcher(
        lambda items: items, grouping=Backwards(), strategy="static", max_batch_size=3, max_queue=3
    ) as batcher:
        assert list(batcher.map([1, 2, 3])) == [1, 2, 3]
    assert Backwards.taken == sorted(Backwards.taken)


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=f"ordering is 'lifo'; it must be one of {', '.join(ORDERINGS)}"):
        ordering_of("lifo")
