"""What the benchmark has to know of a machine before it can say what is a fitting load: what steps cost, with and without a
second process."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable

from autotune.bench import fixed
from autotune.cost.model import CostModel, fit_cost_model
from autotune.measure.evaluate import Recorder
from autotune.profiling.steps import measure_steps, serving_samples
from benchmarks.controller_live.cases import cases
from benchmarks.controller_live.machine import Machine, taking
from benchmarks.controller_live.serving import turn
from runtime.knobs import Knobs
from runtime.llm.engine import Engine
from runtime.slo import SLO
from runtime.step_model import StepFeatures

_MIDDLING = Knobs(32, 0, 512, 512)
"""The setting under which loads are served to see how fast they are: that by which their rates are said as well."""
_PATIENT = SLO(ttft_ms=600_000)
_SEED = 9000  # of these loads


def calibrate(machine: Machine, seconds: float, seed: int, stop: Callable[[], bool]) -> CostModel:
    """What steps cost on this machine. Raises :class:`autotune.measure.evaluate.Interrupted` on ``stop``."""
    points = measure_steps(machine.engine, machine.facts, budget_s=seconds, seed=seed, stop=stop).points
    return fit_cost_model(points)


def served(machine: Machine, cost: CostModel, seconds: float, stop: Callable[[], bool]) -> CostModel:
    """``cost`` at the pace at which the machine serves: a process gets faster in its first minutes, and a calibration may have
    met a slow moment. ``seconds`` of each of the steady loads, and nobody sees how they fare. Raises as :func:`calibrate`."""
    took = predicted = 0.0
    for number, case in enumerate(cases(machine, cost, 1.0, seconds)):
        if case.shifts:
            continue
        log = Recorder()
        unsubscribe = machine.engine.subscribe(log)
        try:
            turn(machine, case, fixed(_MIDDLING), 0, _SEED + number, _SEED + number, seconds, stop)
        finally:
            unsubscribe()
        for record, span in serving_samples(log.steps):
            took += span
            predicted += cost.predict(StepFeatures.of(record))
    speed = predicted / took
    return cost.scaled(compute=speed, bandwidth=speed, overhead=speed)


def slowdown(machine: Machine, *, repeats: int = 3) -> float:
    """How many times as long the same requests take while a second process takes a core: medians of alternating runs."""
    assert isinstance(machine.engine, Engine)
    rng = random.Random(77)
    took: dict[bool, list[float]] = {False: [], True: []}
    machine.engine.set_knobs(Knobs(8, 0, 256, 256))
    machine.engine.set_slo(_PATIENT)  # nobody leaves the queue
    for taken in [False, True] * repeats:
        prompts = [[rng.randrange(machine.facts.vocab_size) for _ in range(128)] for _ in range(8)]
        with taking(machine.core) if taken else contextlib.nullcontext():
            begun = machine.clock.now()
            machine.engine.generate(prompts, max_tokens=32, ignore_eos=True)
            took[taken].append(machine.clock.now() - begun)
    return statistics.median(took[True]) / statistics.median(took[False])
