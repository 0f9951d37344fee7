"""Running out of memory: what is to blame, what it teaches, the way back, and room for the retries."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest

from runtime import Batcher
from runtime.batching.core import BatchCore
from runtime.batching.invoke import Function, run_call
from runtime.batching.item import Call, Item
from runtime.batching.strategies import Dynamic
from tests.unit.batching_world import core_of


class Device:
    """A core whose calls run on a device with so much memory, by what a list of costs takes."""

    def __init__(self, fits: Callable[[list[int]], bool], size: int = 32) -> None:
        self.core: BatchCore = core_of(Dynamic(), size=size, wait_ms=0)
        self.fits = fits
        self.failures = 0

    def call(self, *costs: int) -> None:
        for cost in costs:
            self.core.submit(Item(cost, 0.0, cost), 0.0)
        while (call := self.core.next(0.0).call) is not None:
            self._run(call)

    def _run(self, call: Call) -> None:
        def work(costs: list[int]) -> list[int]:
            if not self.fits(costs):
                self.failures += 1
                raise MemoryError
            return costs

        ran = run_call(Function(work), [item.payload for item in call.items], lambda _: None, isolate=False)
        self.core.done(call, 0.0)
        self.core.learn_memory(call, ran.oom, ran.fitted)

    @property
    def ceilings(self) -> tuple[int, int]:
        limits = self.core.settings.effective_limits
        return limits.max_batch_size, limits.token_budget

    @property
    def knobs(self) -> tuple[int, int]:
        return self.core.knobs.max_batch_size, self.core.knobs.token_budget


START = (4096, 1048576)


def test_an_item_that_never_fits_says_nothing_of_the_others() -> None:
    device = Device(lambda costs: 7 not in costs)
    device.call(*[1] * 20, 7, *[1] * 11)
    assert device.failures == 6 and device.ceilings == START
    device.call(7, 1)
    device.call(7)
    assert device.ceilings == START and device.knobs == (32, START[1])


def test_two_that_never_fit_cost_no_more_than_a_halving() -> None:
    device = Device(lambda costs: 7 not in costs)
    device.call(7, 7, *[1] * 30)
    assert device.ceilings == START
    device.call(*[7] * 32)
    assert device.ceilings[0] == 16


def test_of_uneven_costs_cost_is_to_blame() -> None:
    device = Device(lambda costs: sum(costs) <= 1000)
    device.call(*[1] * 31, 1000)
    assert device.ceilings == (START[0], 1000)
    before = device.failures
    device.call(*[20] * 32)  # still all at once
    assert device.failures == before


def test_of_items_alike_in_cost_their_number_is_to_blame_as_much() -> None:
    device = Device(lambda costs: len(costs) <= 10)
    device.call(*[3] * 32)
    assert device.ceilings == (8, 24) == device.knobs


def test_where_costs_say_nothing_their_number_is_to_blame() -> None:
    device = Device(lambda costs: len(costs) <= 10)
    device.call(*[1] * 8, *[50] * 8, *[1] * 8, *[50] * 8)
    assert device.ceilings[0] == 8 and device.ceilings[1] >= 400


def test_a_shortage_that_has_passed_is_forgotten() -> None:
    short = True
    device = Device(lambda costs: not short or len(costs) <= 5)
    device.call(*[1] * 32)
    assert device.knobs == (4, 4)
    short = False
    for _ in range(63):
        device.call(*[1] * 4)
    assert device.knobs == (4, 4)
    for _ in range(600):
        device.call(*[1] * 32)
    assert device.knobs[0] == 32 and device.failures == 7


@pytest.mark.slow
def test_a_limit_that_stays_is_run_into_ever_more_rarely() -> None:
    device = Device(lambda costs: len(costs) <= 10)
    device.call(*[1] * 32)
    assert device.knobs == (8, 8)
    first = device.failures
    seen = []
    for calls in range(2, 8_000):
        device.call(*[1] * 8)
        device.call(*[1] * device.knobs[0])
        if device.failures > first + len(seen):
            seen.append(calls)
            assert device.knobs[0] <= 10
    assert device.knobs == (10, 10)  # nearer than a half, and found without ever falling below it
    assert 3 <= len(seen) <= 10
    gaps = [b - a for a, b in pairwise(seen)]
    assert gaps == sorted(gaps)


def test_small_calls_prove_nothing() -> None:
    device = Device(lambda costs: len(costs) <= 10)
    device.call(*[1] * 32)
    for _ in range(1000):
        device.call(1)
    assert device.knobs == (8, 8)


def test_what_a_failed_call_held_is_free_before_it_is_tried_again() -> None:
    class Activations:
        pass

    held: list[weakref.ref[Activations]] = []
    alive: list[int] = []

    def hungry(items: list[int]) -> list[int]:
        alive.append(sum(ref() is not None for ref in held))
        activations = Activations()
        held.append(weakref.ref(activations))
        if len(items) > 2 or 3 in items:
            raise MemoryError
        return items

    gc.disable()  # references alone must do
    try:
        ran = run_call(Function(hungry), list(range(8)), lambda _: None, isolate=False)
    finally:
        gc.enable()
    assert len(alive) == ran.runs == 9 and set(alive) == {0}
    assert isinstance(ran.outcomes[3], MemoryError) and held[-1]() is None
    assert [ran.outcomes[i] for i in (0, 1, 2, 4, 5, 6, 7)] == [0, 1, 2, 4, 5, 6, 7]


def test_one_poisonous_item_leaves_a_batcher_as_it_was() -> None:
    gate = threading.Event()

    def hungry(items: list[int]) -> list[int]:
        assert gate.wait(30)
        if 7 in items:
            raise MemoryError
        return items

    with Batcher(hungry, max_batch_size=32) as b:
        futures = [b.submit(i) for i in range(200)]
        gate.set()
        assert [f.result(30) for i, f in enumerate(futures) if i != 7] == [i for i in range(200) if i != 7]
        assert isinstance(futures[7].exception(30), MemoryError)
        assert b.effective_limits == b.limits and b.knobs.max_batch_size == 32


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
def test_a_process_that_really_runs_out_of_memory() -> None:
    """Each item takes 64 MiB, and there is room for some 20 of them."""
    program = textwrap.dedent(
        """
        import json, resource, threading
        import numpy
        from runtime import Batcher

        sizes = []
        gate = threading.Event()

        def work(items):
            gate.wait(30)
            held = []
            try:
                for item in items:
                    held.append(numpy.empty(64 << 20, numpy.uint8))
            finally:
                sizes.append((len(items), len(held)))
            return items

        with Batcher(work, strategy="static", max_batch_size=64) as b:
            first = [b.submit(i) for i in range(64)]
            used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) << 10
            resource.setrlimit(resource.RLIMIT_AS, (used + (20 * 64 << 20), resource.RLIM_INFINITY))
            gate.set()
            found = [f.result(30) for f in first]
            learned = b.effective_limits.max_batch_size
            seen = len(sizes)
            found += list(b.map(range(64, 256)))
        print(json.dumps({"right": found == list(range(256)), "learned": learned, "sizes": sizes, "seen": seen}))
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(run.stdout)
    assert told["right"]
    assert told["learned"] == 16
    assert told["sizes"][0][1] < 64  # it did run out
    assert max(size for size, _ in told["sizes"][told["seen"] :]) <= 16
