"""What steps cost on a machine, and how fast it is while it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from autotune.bench import fixed
from autotune.cost.model import CostModel, fit_cost_model
from autotune.measure.evaluate import recorded
from autotune.profiling.steps import measure_steps, serving_samples
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from benchmarks.live.serving import turn
from runtime.knobs import Knobs
from runtime.records import StepRecord
from runtime.step_model import StepFeatures

_MIDDLING = Knobs(32, 0, 512, 512)
"""The setting under which loads are served to see how fast they are: that by which their rates are said as well."""
_SEED = 9000  # of these loads


def calibrate(machine: Machine, seconds: float, seed: int, stop: Callable[[], bool]) -> CostModel:
    """What steps cost on this machine. Raises :class:`autotune.measure.evaluate.Interrupted` on ``stop``."""
    points = measure_steps(machine.engine, machine.facts, budget_s=seconds, seed=seed, stop=stop).points
    return fit_cost_model(points)


def served(
    machine: Machine, cost: CostModel, cases: Iterable[Case], seconds: float, stop: Callable[[], bool]
) -> CostModel:
    """``cost`` at the speed at which the machine serves: a process gets faster in its first minutes, and a calibration may have
    met a slow moment. ``seconds`` of each of ``cases``, and nobody sees how they fare. Raises as :func:`calibrate`."""
    with recorded(machine.engine) as log:
        for number, case in enumerate(cases):
            turn(machine, case, fixed(_MIDDLING), 0, _SEED + number, _SEED + number, seconds, stop)
    speed = speed_in(log.steps, cost)
    return cost.scaled(compute=speed, bandwidth=speed, overhead=speed)


def speed_in(steps: Sequence[StepRecord], cost: CostModel) -> float:
    """How many times as fast ``steps`` were as ``cost`` says: seconds predicted over seconds taken. NaN without steps."""
    spans = serving_samples(steps)
    took = sum(span for _, span in spans)
    return sum(cost.predict(StepFeatures.of(record)) for record, _ in spans) / took if took else math.nan
