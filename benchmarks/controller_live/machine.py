"""What the contenders run on: the live engine on a clock without the machine's drift, or a simulation of it.

A machine has an engine, and a core that a second process takes when it is told to. Live, that is a process of ours
(:mod:`.thief`); simulated, all steps take as many times as long as they were seen to take beside it.

The live engine is on the clock of :mod:`benchmarks.clocks.drift_corrected`: between its steps a reference step runs now and then,
and the clock follows its time. So a shared machine that is slower for seconds at a time counts as one that is not. While a
reference step runs, the process that takes a core rests: what it costs belongs to the measurement, what others cost does not.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from autotune.cli.target import model_facts
from autotune.profile import ModelFacts
from autotune.simulate import SimulatedEngine
from benchmarks.clocks.drift_corrected import (
    BLOCK,
    REFERENCE_BLOCKS,
    DriftCorrectedClock,
    DriftCorrectingExecutor,
    ReferenceStep,
)
from benchmarks.clocks.undisturbed import UndisturbedClock
from benchmarks.controller.hardware import Weather
from benchmarks.controller_live.thief import Thief
from benchmarks.live.machine import NOISE, Core, Machine
from runtime.clock import Clock, MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.engine import Engine as LiveEngine
from runtime.llm.plan import Executor
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepModel
from runtime.tunable import tile_on

KV_TOKENS = 131_072
PATIENCE = AdmissionPolicy(late=None, queue_timeout="ttft", order=None)
"""For every contender alike: who has not been begun when its TTFT target has passed leaves the queue. Without that, first come
first served past capacity makes every request late, and a ratio to it says nothing."""
_PATIENT = SLO(ttft_ms=600_000)  # of a request that never leaves the queue


class _Slower:
    """All simulated steps take ``factor`` times as long while it is started."""

    def __init__(self, weather: Weather, factor: float) -> None:
        self._weather, self._factor = weather, factor

    def start(self) -> None:
        self._weather.slow = self._factor

    def stop(self) -> None:
        self._weather.slow = 1.0


def simulated(
    cost: StepModel,
    facts: ModelFacts,
    slowdown: float,
    seed: int = 0,
    *,
    classes: Sequence[RequestClass] = (),
    admission: AdmissionPolicy | bool = PATIENCE,
) -> Machine:
    """The machine of which ``cost`` knows the step times, in virtual time; ``classes`` and ``admission`` as of :func:`live`."""
    weather = Weather(cost)
    engine = SimulatedEngine(
        weather,
        kv_tokens=KV_TOKENS,
        limits=KnobLimits(),
        prefix_cache=False,
        noise=NOISE,
        seed=seed,
        classes=classes,
        admission=admission,
        tile=tile_on("cpu"),
    )
    return Machine(engine, facts, engine.clock, _Slower(weather, slowdown))


class _LoneReferenceStep(ReferenceStep):
    """A reference step beside which ``thief`` rests."""

    def __init__(self, executor: Executor, vocab_size: int, thief: Thief) -> None:
        super().__init__(executor, vocab_size)
        self._thief = thief

    def step(self, clock: Clock) -> float:
        self._thief.rest()
        try:
            return super().step(clock)
        finally:
            self._thief.go_on()


class SharedCore:
    """The core that ``thread`` computes on, while ``thief`` wants it too: pinned to one, they get half of it each.

    Where the system pins no threads the thief runs wherever there is room. A ``clock`` that leaves waits out counts these.
    """

    def __init__(self, thread: threading.Thread, thief: Thief, clock: Clock) -> None:
        assert thread.native_id is not None
        self._thread, self._thief = thread.native_id, thief
        self._clock = clock if isinstance(clock, UndisturbedClock) else None
        self._usual: set[int] = set()

    def start(self) -> None:
        if hasattr(os, "sched_setaffinity"):
            self._usual = self._usual or os.sched_getaffinity(self._thread)
            for task in (self._thread, self._thief.pid):
                os.sched_setaffinity(task, {max(self._usual)})
        if self._clock is not None:
            self._clock.count_waits()
        self._thief.start()

    def stop(self) -> None:
        self._thief.stop()
        if self._clock is not None:
            self._clock.leave_waits_out()
        if self._usual:
            os.sched_setaffinity(self._thread, self._usual)
            self._usual = set()


@contextmanager
def live(
    *,
    wall_clock: bool = False,
    undisturbed: bool = False,
    classes: Sequence[RequestClass] = (),
    admission: AdmissionPolicy | bool = PATIENCE,
) -> Iterator[Machine]:
    """``tiny`` on one CPU thread, in the dtype that is fast on it: who sends the requests needs a core too.

    ``classes`` and ``admission`` are the engine's own.

    ``wall_clock``: leave the machine's drift in. ``undisturbed``: leave out the time for which the kernel kept the engine's
    thread waiting, for machines that do much other work.
    """
    import torch

    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.loading import load_model

    torch.set_num_threads(1)
    other = load_model("tiny", device="cpu")
    loaded = load_model("tiny", device="cpu")
    facts = model_facts(loaded.info, seed=0)
    with Thief() as thief:
        base = UndisturbedClock() if undisturbed else MonotonicClock()
        clock: Clock = base if wall_clock else DriftCorrectedClock(base)
        executor: Executor = TorchExecutor(loaded, kv_blocks=KV_TOKENS // BLOCK, clock=clock)
        slowdowns: list[float] = []
        if isinstance(clock, DriftCorrectedClock):
            reference_step = _LoneReferenceStep(
                TorchExecutor(other, kv_blocks=REFERENCE_BLOCKS), other.vocab_size, thief
            )
            executor = DriftCorrectingExecutor(executor, reference_step, clock, reference_step.fastest())
            slowdowns = executor.slowdowns

        def drift() -> float:
            found = statistics.fmean(slowdowns) if slowdowns else 1.0
            slowdowns.clear()
            return found

        known = set(threading.enumerate())
        engine = LiveEngine(
            loaded, limits=KnobLimits(), kv_tokens=KV_TOKENS, executor=executor, clock=clock, classes=classes,
            admission=admission,
        )  # fmt: skip
        try:
            thread = next(t for t in threading.enumerate() if t not in known and t.name.startswith("engine "))
            if isinstance(base, UndisturbedClock):
                base.follow(thread)
            yield Machine(engine, facts, clock, SharedCore(thread, thief, base), drift)
        finally:
            engine.close(drain=False)


@contextmanager
def taking(core: Core) -> Iterator[None]:
    """Without ``core``, for as long."""
    core.start()
    try:
        yield
    finally:
        core.stop()


def slowdown(machine: Machine, *, repeats: int = 3) -> float:
    """How many times as long the same requests take while a second process takes a core: medians of alternating runs."""
    assert isinstance(machine.engine, LiveEngine) and machine.core is not None
    rng = random.Random(77)
    took: dict[bool, list[float]] = {False: [], True: []}
    machine.engine.set_knobs(Knobs(8, 0, 256, 256))
    machine.engine.set_slo(_PATIENT)  # nobody leaves the queue
    for taken in [False, True] * repeats:
        prompts = [[rng.randrange(machine.facts.vocab_size) for _ in range(128)] for _ in range(8)]
        with taking(machine.core) if taken else nullcontext():
            begun = machine.clock.now()
            machine.engine.generate(prompts, max_tokens=32, ignore_eos=True)
            took[taken].append(machine.clock.now() - begun)
    return statistics.median(took[True]) / statistics.median(took[False])
