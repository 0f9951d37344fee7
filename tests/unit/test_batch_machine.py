"""Properties of the batcher under random timing, failures, cancels, deaths and closes.

Thousands of interleavings on the core alone, where every one can be drawn and repeated; and fewer with the real threads,
where the operating system draws them.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import wait
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import Batcher, FinishReason, RequestRecord, StepRecord
from runtime.batching.core import BatchCore
from runtime.batching.groupings import GROUPINGS
from runtime.batching.item import ENDED, Call, Item
from runtime.batching.strategies import STRATEGIES, strategy_of
from runtime.errors import AutotuneError, RejectedError
from runtime.slo import SLO
from tests.examples import examples
from tests.unit.batching_world import LIMITS, knobs, serve


class World:
    """A core, and its own account of what every item came to."""

    def __init__(self, strategy: str, grouping: str, slo: SLO | None, workers: int, max_queue: int, seed: int) -> None:
        self.core = BatchCore(
            strategy_of(strategy), grouping, slo=slo, knobs=knobs(4, 20, 40), limits=LIMITS, workers=workers,
            max_queue=max_queue,
        )  # fmt: skip
        self.rng = random.Random(seed)
        self.now = 0.0
        self.submitted: list[Item] = []
        self.outcomes: dict[Item, str] = {}
        self.running: list[Call] = []
        self.entered: dict[Item, int] = {}

    def end(self, item: Item, how: str) -> None:
        assert item not in self.outcomes, f"{item} ended twice: {self.outcomes[item]} and {how}"
        assert item.state is ENDED
        self.outcomes[item] = how

    def submit(self) -> None:
        rng = self.rng
        item = Item(
            None, self.now, rng.choice([1, 3, 10, 60]), rng.randrange(3), rng.choice("ab"),
            expires=self.now + rng.choice([0.05, 0.5, inf, inf]), id=len(self.submitted),
        )  # fmt: skip
        self.submitted.append(item)
        try:
            self.core.submit(item, self.now)
        except RejectedError as error:
            item.state = ENDED
            self.end(item, error.reason)

    def cancel(self) -> None:
        if self.submitted:
            item = self.rng.choice(self.submitted)
            if self.core.forget(item):
                assert item not in self.entered
                self.end(item, "cancelled")

    def turn(self) -> None:
        self.core.settings.set_knobs(knobs(self.rng.randint(1, 6), self.rng.choice([0, 30]), self.rng.randint(5, 80)))

    def next(self) -> None:
        step = self.core.next(self.now)
        for ended in step.ended:
            self.end(ended.item, str(ended.reason))
        if step.call is None:
            return
        call, limits = step.call, self.core.knobs
        assert 0 < len(call.items) <= limits.max_batch_size
        assert call.cost <= limits.token_budget or len(call.items) == 1
        assert len(self.running) < self.core.state.slots
        for item in call.items:
            assert item not in self.outcomes, "an item that has ended reached the function"
            self.entered[item] = self.entered.get(item, 0) + 1
            assert self.entered[item] <= 2
        assert len(set(call.items)) == len(call.items)
        self.running.append(call)

    def finish(self, died: bool) -> None:
        if not self.running:
            return
        call = self.running.pop(self.rng.randrange(len(self.running)))
        live = [item for item in call.items if item.state is not ENDED]
        if died:
            for item in self.core.lost(call, self.now, apart=self.rng.random() < 0.5):
                self.end(item, "died")
            return
        self.core.done(call, self.now)
        for item in live:
            self.end(item, "done")

    def expire(self) -> None:
        for ended in self.core.expire(self.now):
            self.end(ended.item, str(ended.reason))

    def check(self) -> None:
        state = self.core.state
        waiting = [item for item in self.submitted if item.state.name == "WAITING"]
        assert state.waiting == len(waiting) and state.waiting_cost == sum(item.cost for item in waiting)
        assert state.idle == state.slots - len(self.running) >= 0
        assert bool(state.queue.first(1)) == bool(waiting)

    def close(self, drain: bool) -> None:
        self.core.state.closing = True
        if not drain:
            for ended in self.core.drop_waiting("closed", FinishReason.ERROR):
                self.end(ended.item, str(ended.reason))
        for _ in range(10_000):
            if not self.core.has_work:
                break
            self.now += 0.01
            self.next()
            self.finish(died=self.rng.random() < 0.1)
        assert not self.core.has_work, "closing does not come to an end"
        assert set(self.outcomes) == set(self.submitted)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 6 + ["next"] * 4 + ["done"] * 3 + ["died", "cancel", "expire", "turn"]),
        st.floats(0, 0.05),
    ),
    max_size=120,
)


@settings(max_examples=examples(6))
@given(
    actions=ACTIONS,
    strategy=st.sampled_from(sorted(STRATEGIES)),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    slo=st.sampled_from([None, SLO(e2e_ms=100), SLO(e2e_ms=1000)]),
    workers=st.integers(1, 3),
    max_queue=st.sampled_from([3, 1000]),
    drain=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_item_has_exactly_one_outcome_and_no_call_breaks_a_knob(
    actions: list[tuple[str, float]],
    strategy: str,
    grouping: str,
    slo: SLO | None,
    workers: int,
    max_queue: int,
    drain: bool,
    seed: int,
) -> None:
    world = World(strategy, grouping, slo, workers, max_queue, seed)
    for action, passing in actions:
        world.now += passing
        if action in ("done", "died"):
            world.finish(died=action == "died")
        else:
            getattr(world, action)()
        world.check()
    world.close(drain)


@given(
    gaps=st.lists(st.floats(0, 0.02), min_size=1, max_size=60),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    grouping=st.sampled_from(["arrival", "padded"]),
    costs=st.integers(1, 50),
)
def test_arrival_order_is_kept(gaps: list[float], strategy: str, grouping: str, costs: int) -> None:
    items = [Item(None, sum(gaps[: i + 1]), 1 + i * 7 % costs) for i in range(len(gaps))]
    core = BatchCore(strategy_of(strategy), grouping, knobs=knobs(5, 10, 60), limits=LIMITS)
    served = serve(core, items, lambda call: 0.01 + 0.001 * call.cost)
    assert [item for call in served.calls for item in call.items] == items


class Counting:
    def __init__(self) -> None:
        self.reasons: dict[str, list[str]] = {}
        self.sizes: list[int] = []

    def on_step(self, record: StepRecord) -> None:
        self.sizes.append(record.chunks)

    def on_request(self, record: RequestRecord) -> None:
        self.reasons.setdefault(record.id, []).append(record.reason)


@pytest.mark.parametrize("grouping", sorted(GROUPINGS))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_with_threads(seed: int, grouping: str) -> None:
    """Clients submit, cancel and set timeouts; the function is slow, fails and kills its worker; then all is closed."""
    rng = random.Random(seed)
    lock = threading.Lock()
    reached: dict[int, int] = {}

    def work(items: list[int]) -> list[Any]:
        with lock:
            for item in items:
                reached[item] = reached.get(item, 0) + 1
            luck = rng.random()
        time.sleep(0.002 * luck)
        if luck < 0.05:
            raise SystemExit("killed")
        if luck < 0.1:
            raise ArithmeticError("failed")
        return [KeyError(item) if item % 50 == 0 else -item for item in items]

    heard = Counting()
    b = Batcher(
        work, replicas=2, concurrency=2, max_batch_size=5, grouping=grouping, slo="e2e=5s", max_queue=40, name="storm"
    )
    b.subscribe(heard)
    futures: dict[int, Any] = {}

    def client(number: int) -> None:
        own = random.Random(100 * seed + number)
        for i in range(120):
            item = 1000 * number + i + 1
            try:
                future = b.submit(
                    item, tenant="ab"[number % 2], priority=i % 3, timeout_s=own.choice([None, None, 0.001, 5]),
                    request_id=str(item),
                )  # fmt: skip
            except RejectedError:
                continue
            with lock:
                futures[item] = future
            if own.random() < 0.15:
                future.cancel()

    clients = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients[:2]:
        thread.join(60)
    b.close(drain=seed == 1)
    for thread in clients:
        thread.join(60)
    assert wait(futures.values(), timeout=30).not_done == set()
    for item, future in futures.items():
        if future.cancelled():
            assert item not in reached
        elif future.exception() is None:
            assert future.result() == -item
        else:
            assert isinstance(future.exception(), KeyError | ArithmeticError | AutotuneError)
        assert len(heard.reasons[str(item)]) == 1
    assert max(reached.values()) <= 2 and max(heard.sizes) <= 5
