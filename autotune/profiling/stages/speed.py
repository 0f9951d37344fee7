"""How fast the hardware is while it serves, told by the latencies of a measurement and of simulations of the same requests."""

from __future__ import annotations

import math

from autotune.measure.score import Score
from autotune.profiling.points import Run
from autotune.profiling.setup import Setup
from autotune.profiling.stages.context import Context

OFF_BY, OFF_BY_AT_RATE = 0.02, 0.05
"""Shares by which the speed that one setting tells may differ from what the simulation took it for before everything is put
right; the latter at a rate that was given. A cost model that is a few percent wrong for that setting looks the same: a rate
that follows makes up for such a mistake, a fixed one does not."""

_SPEEDS, _BISECTIONS = (0.3, 3.0), 8
_EDGE = 1.02  # nearer than that to an end of the range, the speed may be anything beyond


def speed_of(context: Context, setup: Setup, run: Run) -> float:
    """How fast the hardware was in ``run``, in units of the cost model's machine.

    By bisection: the speed at which the simulation of the same requests has the same typical latencies. Those tell a
    few percent where shares of a short window tell nothing, because all promises are kept in both.
    """
    low, high = _SPEEDS
    with context.meter.simulating():
        for _ in range(_BISECTIONS):
            context.check()
            middle = math.sqrt(low * high)
            twin = context.simulator(setup.model_copy(update={"speed": middle})).twin(run)
            slow = _latency(twin.score) > _latency(run.score)
            low, high = (middle, high) if slow else (low, middle)
    return math.sqrt(low * high)


def told_speed(speed: float) -> str:
    """In words, with what the estimate cannot tell."""
    low, high = _SPEEDS
    if not low * _EDGE <= speed <= high / _EDGE:
        bound = f"less than {low:.0%}" if speed < 1 else f"more than {high:.0%}"
        return (
            f"the hardware serves at {bound} of its calibrated speed, further off than can be made up for: what is simulated "
            "tells little, calibrate again on an idle machine"
        )
    return f"the hardware serves as at {speed:.0%} of its calibrated speed"


def _latency(score: Score) -> float:
    """Typical latency of a request, on a scale of logarithms."""
    values = (score.tpot_ms.p50, score.e2e_ms.p50)
    return sum(math.log(v) for v in values if v)
