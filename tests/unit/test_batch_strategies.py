"""The adaptive strategy in virtual time: what it learns, when it goes, what it drops, when it waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest

from runtime.batching.core import BatchCore
from runtime.batching.item import Call, Item
from runtime.batching.service_model import Price, ServiceModel
from runtime.batching.strategies import Adaptive, Dynamic, lookahead
from runtime.batching.strategies.lookahead import Bounds, choose
from runtime.errors import RejectedError
from runtime.slo import SLO
from tests.tiers import slow_but_for
from tests.unit.batching_world import CAPACITY, SLO_400, Served, core_of, latency, linear, poisson, run, share


def call_of(n: int, cost: int, seconds: float, others: float = 0.0) -> Call:
    call = Call([Item(None, 0.0)] * n, cost, 0, 0.0, 0, 0)
    call.end, call.others = seconds, others
    return call


@pytest.mark.parametrize("shared", [False, True])
def test_the_time_of_a_call_is_learned(shared: bool) -> None:
    rng = random.Random(1)
    model = ServiceModel(shared=shared)
    for _ in range(200):
        n = rng.randint(1, 40)
        cost, others = n * rng.randint(5, 50), rng.choice([0.0, 1.0, 1.7]) * shared
        model.observe(call_of(n, cost, (0.02 + 0.001 * n + 1e-4 * cost) * (1 + 0.6 * others), others))
    assert model.predict(10, 300) == pytest.approx(0.06, rel=0.02)
    assert model.margin < 1.05
    if shared:
        assert model.predict(10, 300, 2) == pytest.approx(0.06 * 2.2, rel=0.03)


@pytest.mark.parametrize("first", [5e-5, 1e-3, 0.02])
@pytest.mark.parametrize("shared", [False, True])
def test_a_first_call_far_too_short_is_forgotten(first: float, shared: bool) -> None:
    rng = random.Random(1)
    model = ServiceModel(shared=shared)
    for seconds in (0.02, first):
        model.observe(call_of(1, 1, seconds))
    for number in range(100):
        n = 1 if number < 2 else rng.randint(1, 32)
        model.observe(call_of(n, n, (0.02 + 0.001 * n) * rng.gauss(1, 0.03)))
        if number in (30, 99):
            assert model.predict(16, 16) == pytest.approx(0.036, rel=0.05)
    assert model.margin < 1.15
    assert model.alone == model.samples == 100 + (first == 0.02), "of what was forgotten nothing is counted"


@pytest.mark.parametrize("before", [2, 5, 12])
def test_one_call_far_too_long_makes_nothing_forgotten(before: int) -> None:
    model = ServiceModel()
    for number in range(1 + before):  # the first of all is passed over
        model.observe(call_of(1 + number % 4, 1 + number % 4, 0.02 + 0.001 * (1 + number % 4)))
    model.observe(call_of(1, 1, 1.0))
    assert model.samples == before + 1


def test_calls_that_say_nothing_of_the_time_teach_nothing() -> None:
    model = ServiceModel()
    failed, stretched, endless = call_of(1, 1, 1.0), call_of(1, 1, 1.0), call_of(1, 1, inf)
    failed.failed, stretched.stretched = 1, True
    for call in [failed, stretched, endless, call_of(1, 1, 0.0)] * 10:
        model.observe(call)
    assert not model.ready and model.samples == 0
    for _ in range(40):
        some = call_of(8, 8, 1.0)
        some.failed = 3  # exceptions of single items: the call took its time
        model.observe(some)
    assert model.samples > 30


def test_the_margin_follows_how_much_calls_scatter() -> None:
    rng = random.Random(2)
    steady, wild = ServiceModel(), ServiceModel()
    for _ in range(300):
        n = rng.randint(1, 32)
        steady.observe(call_of(n, n, 0.02 + 0.002 * n))
        wild.observe(call_of(n, n, (0.02 + 0.002 * n) * rng.choice([0.9, 1.0, 1.4])))
    assert steady.margin < 1.05 < 1.2 < wild.margin <= 2.0


@pytest.mark.parametrize(("load", "least"), [(0.05, 0.995), (0.3, 0.995), (0.7, 0.995), (0.9, 0.995)])
def test_up_to_nine_tenths_of_capacity_all_are_on_time(load: float, least: float) -> None:
    served = run(core_of(Adaptive(), slo=SLO_400), poisson(load * CAPACITY, 20, 11))
    assert share(served, SLO_400) >= least


@pytest.mark.parametrize("load", [1.05, 1.3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_beyond_capacity_as_many_are_on_time_as_can_be(load: float, noise: float) -> None:
    rng = random.Random(4)
    slower = 1.0 + noise * 0.8  # the mean of what the noise adds
    items = poisson(load * CAPACITY / slower, 20, 12)
    served = run(
        core_of(Adaptive(), slo=SLO_400), items, lambda call: linear(call) * (1 + noise * abs(rng.gauss(0, 1)))
    )
    assert share(served, SLO_400) >= 0.97 / load


def test_an_idle_worker_takes_what_comes_at_once() -> None:
    served = run(core_of(Adaptive(), slo=SLO_400), poisson(0.05 * CAPACITY, 20, 13))
    alone = [call for call in served.calls if len(call.items) == 1]
    assert len(alone) > 0.6 * len(served.calls)
    assert latency(served.records, 50) <= 1.1 * 0.022
    waits = [call.start - call.items[0].arrival for call in alone]
    assert min(waits) == 0.0 and sorted(waits)[len(waits) // 2] == 0.0


def test_nothing_is_left_of_a_burst_two_seconds_after_it() -> None:
    low = 0.05 * CAPACITY
    items = [*poisson(low, 10, 14), *poisson(1.3 * CAPACITY, 10, 15, start=10.0), *poisson(low, 10, 16, start=20.0)]
    records = run(core_of(Adaptive(), slo=SLO_400), items).records
    before = [r for r in records if r.arrival < 10]
    after = [r for r in records if r.arrival >= 22]
    assert latency(after, 50) <= 1.1 * latency(before, 50)


@pytest.mark.parametrize("rate", [80, 120, 200, 300])
def test_an_slo_of_two_and_a_half_times_the_bare_time(rate: float) -> None:
    """Against dispatch when free that drops what has already missed: never worse by more than a hair, mostly far better."""
    slo = SLO(e2e_ms=2.5 * 22)
    ours = share(run(core_of(Adaptive(), slo=slo), poisson(rate, 20, 17)), slo)
    plain = share(run(core_of(Dynamic(), slo=slo, wait_ms=0), poisson(rate, 20, 17)), slo)
    assert ours >= plain - 0.01
    assert rate < 200 or ours > 1.2 * plain


def test_costs_that_vary_a_hundredfold() -> None:
    slo = SLO(e2e_ms=200)
    items = poisson(110, 20, 18, lambda r: round(10 ** r.uniform(0, 2)))
    served = run(core_of(Adaptive(), slo=slo), items, lambda call: 0.010 + 0.0004 * call.cost)
    assert share(served, slo) > 0.95


def test_short_slos_are_rescued_while_long_ones_can_wait() -> None:
    price = Price(0.02, 0.002, 0.0)
    bounds = Bounds(most=32, budget=10**6, price=price)
    tight = [Item(None, 0.0, deadline=0.05) for _ in range(5)]
    loose = [Item(None, 0.0, deadline=0.4) for _ in range(20)]
    rescued = choose([*loose, *tight], 0.0, bounds, reorder=True)
    assert set(tight) < set(rescued) and price.of(len(rescued), 0) <= 0.05
    many = [Item(None, 0.0, deadline=0.4) for _ in range(200)]
    assert set(choose([*tight, *many], 0.0, bounds, reorder=True)) <= set(many)  # then the call had better be full


@pytest.mark.parametrize("reorder", [True, False])
def test_what_is_nearly_late_is_passed_over_for_a_full_call(reorder: bool) -> None:
    bounds = Bounds(most=32, budget=10**6, price=Price(0.02, 0.002, 0.0))
    items = [Item(None, i / 1000, deadline=0.06 + i / 1000) for i in range(60)]
    chosen = choose(items, 0.059, bounds, reorder=reorder)
    seconds = bounds.price.of(len(chosen), len(chosen))
    assert min(item.deadline for item in chosen) >= 0.059 + seconds
    assert items[0] not in chosen and len(chosen) >= (13 if reorder else 10)  # 13 is the most that can be


def test_of_unequal_costs_the_most_items_make_it() -> None:
    bounds = Bounds(most=32, budget=10**6, price=Price(0.01, 0.0, 0.001))
    items = [Item(None, 0.0, cost, deadline=0.06) for cost in (40, 5, 30, 5, 10, 20, 10)]
    chosen = choose(items, 0.0, bounds, reorder=True)
    assert sorted(item.cost for item in chosen) == [5, 5, 10, 10, 20]


def test_where_calls_pad_what_is_chosen_is_on_time_with_its_padding() -> None:
    bounds = Bounds(most=32, budget=10**6, price=Price(0.01, 0.0, 0.001), padded=True)
    items = [Item(None, 0.0, cost, deadline=0.06) for cost in (10, 10, 10, 20, 30, 10)]
    chosen = choose(items, 0.0, bounds, reorder=True)
    assert [item.cost for item in chosen] == [10, 10, 10]  # 3 × 10 fit into the 50 ms, 4 × 20 do not
    assert len(choose(items, 0.0, bounds._replace(padded=False), reorder=True)) == 4


@pytest.mark.parametrize("grouping", ["buckets", "sorted", "padded"])
def test_what_a_call_that_pads_has_begun_is_on_time(grouping: str) -> None:
    """Past capacity: whoever is served is served in time, and not because next to nobody is."""
    slo = SLO(e2e_ms=300)
    items = poisson(150, 20, 27, lambda r: round(10 ** r.uniform(0, 2)))
    served = run(core_of(Adaptive(), grouping, slo=slo, size=16), items, lambda call: 0.010 + 0.0004 * call.cost)
    done = [record for record in served.records if record.completed]
    assert len(done) > 0.25 * len(items)
    assert sum(slo.met(record) for record in done) > 0.97 * len(done)


@pytest.mark.parametrize("slo_ms", [200, 800])
def test_the_wait_grows_only_where_it_pays_and_no_further_than_the_slo_allows(slo_ms: float) -> None:
    """How long calls are held with the worker idle: the window that nobody has to set."""

    def held(price: float, rate: float) -> float:
        slo = SLO(e2e_ms=slo_ms)
        served = run(core_of(Adaptive(call_price_s=price), slo=slo), poisson(rate, 30, 28))
        assert share(served, slo) >= 0.99
        free, waits = 0.0, []
        for call in served.calls:
            if call.start > 5:
                waits.append(max(0.0, call.start - max(free, min(item.arrival for item in call.items))))
            free = call.end
        return sum(waits) / len(waits)

    nothing, little, much, all_there_is = (held(price, 40) for price in (0.0, 0.05, 0.5, inf))
    assert nothing == 0.0 < little < much <= all_there_is <= slo_ms / 1e3 - 0.022
    assert held(0.05, 250) < held(0.05, 40)  # a busy worker makes calls full without any waiting


def test_an_slo_too_short_for_anything_is_served_late_rather_than_never() -> None:
    slo = SLO(e2e_ms=10)
    served = run(core_of(Adaptive(), slo=slo), poisson(50, 10, 19))
    assert share(served, slo) == 0.0
    assert sum(record.completed for record in served.records) > 0.9 * len(served.records)


def test_a_machine_that_gets_faster_again_is_not_written_off() -> None:
    """Ten times slower for five seconds, so that nothing can be on time; then as before."""
    items = poisson(50, 30, 20)
    speed = {"now": 1.0}
    events = [(10.0, lambda _: speed.update(now=20.0)), (15.0, lambda _: speed.update(now=1.0))]
    served = run(core_of(Adaptive(), slo=SLO_400), items, lambda call: linear(call) * speed["now"], events=events)
    late = [r for r in served.records if r.arrival > 18]
    assert sum(SLO_400.met(r) for r in late) >= 0.99 * len(late)


@pytest.mark.parametrize("load", slow_but_for((0.3,), (0.05, 0.3, 0.7)))
def test_with_a_price_for_each_call_waiting_pays(load: float) -> None:
    """Fewer calls than any static window that meets the SLO as well; and no fewer in time."""
    calls = {}
    for window in (0, 25, 50, 100, 150, 200, 250, 300, 350):
        core = core_of(Dynamic(), slo=SLO_400, wait_ms=window)
        served = run(core, poisson(load * CAPACITY, 30, 21))
        if share(served, SLO_400) >= 0.99:
            calls[window] = late_calls(served)
    ours = run(core_of(Adaptive(call_price_s=inf), slo=SLO_400), poisson(load * CAPACITY, 30, 21))
    assert share(ours, SLO_400) >= 0.99
    assert late_calls(ours) <= 1.05 * min(calls.values())
    assert late_calls(ours) < 0.7 * calls[0]


def late_calls(served: Served) -> int:
    """Calls once service times have been learned."""
    return sum(call.start > 3 for call in served.calls)


def test_a_price_is_weighed_against_the_waiting() -> None:
    counts = []
    for price in (0.0, 0.1, 0.5, 2.0, inf):
        served = run(core_of(Adaptive(call_price_s=price), slo=SLO_400), poisson(60, 30, 22))
        counts.append((len(served.calls), latency(served.records, 50)))
    assert counts == sorted(counts, key=lambda pair: -pair[0])
    assert [pair[1] for pair in counts] == sorted(pair[1] for pair in counts)


def test_the_wait_window_is_a_ceiling_for_holding() -> None:
    served = run(core_of(Adaptive(call_price_s=inf), slo=SLO_400, wait_ms=30), poisson(10, 20, 23))
    waits = [call.start - min(item.arrival for item in call.items) for call in served.calls[8:]]
    assert max(waits) <= 0.030 + 0.1 and sorted(waits)[len(waits) // 2] == pytest.approx(0.030, abs=0.001)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_calls_that_slow_one_another_down_are_kept_apart(load: float) -> None:
    """Three workers on a device that does one thing at a time: one call after the other is faster for everybody."""
    items = poisson(load * CAPACITY, 20, 24)
    shared = {"workers": 3}
    ours = run(core_of(Adaptive(), slo=SLO_400, **shared), items, slowdown=float)
    items = poisson(load * CAPACITY, 20, 24)
    plain = run(core_of(Dynamic(), slo=SLO_400, wait_ms=0, **shared), items, slowdown=float)
    assert latency(ours.records, 50) < 0.7 * latency(plain.records, 50)
    assert share(ours, SLO_400) >= share(plain, SLO_400)


@pytest.mark.slow
def test_workers_that_do_not_disturb_one_another_are_all_used() -> None:
    served = run(core_of(Adaptive(), slo=SLO_400, workers=3), poisson(2.4 * CAPACITY, 20, 25))
    assert share(served, SLO_400) >= 0.995
    assert {call.worker for call in served.calls} == {0, 1, 2}


def shared_device() -> BatchCore:
    """Of two workers, of which each slows the other down to less than half, so that one call at a time is better."""
    model = ServiceModel(shared=True)
    for k in range(200):
        cost, others = 1 + 13 * k % 100, k % 2
        model.observe(call_of(1, cost, (0.020 + 0.001 * cost) * (1 + 1.2 * others), float(others)))
    core = core_of(Adaptive(model=model), slo=SLO_400, workers=2)
    core.strategy.observe(call_of(8, 80, 0.100), core.state)
    return core


def test_a_short_slo_is_not_held_back_behind_a_long_call() -> None:
    core = shared_device()
    core.submit(Item(None, 0.0, 1000, deadline=inf), 0.0)
    assert core.next(0.0).call is not None  # for a second
    core.submit(Item(None, 0.0, 5), 0.0)
    assert core.next(0.0).call is not None


def test_a_call_that_is_late_anyway_holds_nobody_back() -> None:
    core = shared_device()
    core.submit(Item(None, 0.0, 1000, deadline=1.1), 0.0)
    assert core.next(0.0).call is not None
    (running,) = core.state.running
    running.items[0].deadline = 0.5
    core.submit(Item(None, 0.0, 5), 0.0)
    assert core.next(0.0).call is not None


def test_calls_are_kept_apart_as_long_as_they_are_on_time() -> None:
    core = shared_device()
    core.submit(Item(None, 0.0, 100, deadline=inf), 0.0)
    assert core.next(0.0).call is not None  # for 120 ms
    core.submit(Item(None, 0.0, 10, deadline=inf), 0.0)
    assert core.next(0.0).call is None and core.hold_items == 2  # the next one may be due sooner
    core.submit(Item(None, 0.0, 10), 0.0)
    assert core.next(0.0).call is None
    assert core.hold_until == pytest.approx(
        0.400 - 1.125 * 2.2 * 0.040, abs=0.01
    )  # should that call take longer than it ought to
    assert core.next(0.2).call is None
    assert core.next(core.hold_until).call is not None


def test_sizes_nobody_gave_are_felt_out() -> None:
    served = run(
        core_of(Adaptive(), slo=SLO(e2e_ms=2000), size=4096), poisson(1000, 10, 26), lambda c: 0.1 + 1e-4 * len(c.items)
    )
    largest = 16
    for call in served.calls:
        assert len(call.items) <= max(16, 2 * largest)
        largest = max(largest, len(call.items))
    assert largest > 60


@pytest.mark.parametrize(("target_s", "waits_s"), [(inf, 60.0), (20.0, 10.0)])
def test_what_is_in_no_hurry_is_not_passed_over_for_ever(target_s: float, waits_s: float) -> None:
    """Beside items that come all the time, and of which none is on time in a call as long as that."""
    slo = SLO(e2e_ms=100)
    items = [Item(None, i / 100, 1 + i * 7 % 5) for i in range(9000)]
    items += [Item(None, at, 80, deadline=at + target_s, request_class="dear") for at in (5.0, 15.0)]
    items.sort(key=lambda item: item.arrival)
    served = run(core_of(Adaptive(), slo=slo), items, lambda call: 0.020 + 0.001 * call.cost)
    live, dear = ([r for r in served.records if r.request_class == name] for name in ("default", "dear"))
    assert max(inf if r.scheduled is None else r.scheduled - r.arrival for r in dear) < waits_s + 1
    assert sum(slo.met(r) for r in live) > 0.99 * len(live)


def test_what_was_passed_over_gets_a_tenth_of_the_time() -> None:
    model = ServiceModel()
    for k in range(200):
        model.observe(call_of(1 + k % 8, 1 + 13 * k % 100, 0.020 + 0.001 * (1 + 13 * k % 100)))
    core = core_of(Adaptive(model=model), slo=SLO(e2e_ms=100))
    core.strategy.observe(call_of(8, 80, 0.100), core.state)
    first, second = (Item(None, 0.0, 80, deadline=20.0) for _ in range(2))
    core.submit(first, 0.0)

    def goes_at(now: float) -> Sequence[Item]:
        """Beside five items that could not wait for it."""
        for _ in range(5):
            core.submit(Item(None, now, 3), now)
        call = core.next(now).call
        assert call is not None
        core.done(call, now + 0.020 + 0.001 * call.cost)
        return call.items

    assert first not in goes_at(9.9)
    assert goes_at(10.1) == [first]
    core.submit(Item(None, 0.0, 300, deadline=inf), 10.2)  # older, and with all the time there is
    core.submit(second, 10.2)
    assert second not in goes_at(10.2) and second not in goes_at(11.0)
    assert goes_at(11.2)[0] is second


def test_of_items_that_cost_the_same_the_same_ones_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a faster way for them."""
    rng = random.Random(30)
    for _ in range(200):
        arrivals = [rng.uniform(-0.1, 0.0) for _ in range(rng.randint(1, 50))]
        items = [Item(None, at, 3, deadline=at + rng.choice([0.15, 0.2, 1.0, inf])) for at in arrivals]
        price = Price(0.01, 0.003 * rng.random(), 0.001 * rng.random())
        bounds = Bounds(rng.randint(1, 40), rng.choice([1, 30, 10**6]), price, rng.choice([inf, 0.03]))
        with monkeypatch.context() as patch:
            patch.setattr(lookahead, "_one_cost", lambda items: False)
            expected = choose(items, 0.0, bounds, reorder=True)
        assert choose(items, 0.0, bounds, reorder=True) == expected


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="call_price_s is -1"):
        Adaptive(call_price_s=-1)


def knowing(**options: float) -> Adaptive:
    """It has learned that calls take what :func:`linear` says, exactly."""
    model = ServiceModel()
    for k in range(200):
        n = 1 + 7 * k % 32
        model.observe(call_of(n, n, 0.020 + 0.002 * n))
    assert model.predict(10, 10) == pytest.approx(0.040, rel=1e-3) and model.margin < 1.01
    return Adaptive(model=model, **options)


def test_a_call_is_held_no_longer_than_a_guard_time_before_it_would_be_late() -> None:
    """With one more of its kind it still takes 24 ms, and 2% of the target time are kept for what nobody foresaw."""
    core = core_of(knowing(call_price_s=inf), slo=SLO_400)
    core.submit(Item(None, 10.0), 10.0)
    assert core.next(10.0).call is None
    assert core.hold_until == pytest.approx(10.4 - 0.02 * 0.4 - 0.024, abs=3e-4)
    assert core.next(core.hold_until - 1e-3).call is None
    assert core.next(core.hold_until).call is not None


def test_admission_counts_what_is_left_of_the_call_that_runs() -> None:
    """Four wait, which is a full call, and the fifth needs a second one: 49 ms, once the call that runs is over."""

    def full_at(now: float) -> BatchCore:
        core = core_of(knowing(), size=4)
        for _ in range(4):
            core.submit(Item(None, 0.0), 0.0)
        call = core.next(0.0).call
        assert call is not None and call.predicted == pytest.approx(0.028, rel=1e-3)
        for _ in range(4):
            core.submit(Item(None, now), now)
        return core

    for now, left in ((0.0, 0.028), (0.020, 0.008), (0.5, 0.0)):  # in the last, it takes longer than it should
        with pytest.raises(RejectedError) as late:
            full_at(now).submit(Item(None, now, deadline=now + left + 0.046), now)
        assert late.value.reason == "slo" and late.value.retry_after_s == pytest.approx(0.003, abs=1.5e-3)
        full_at(now).submit(Item(None, now, deadline=now + left + 0.052), now)
