"""The simulation of everything that was measured, at the speed the profile will have: how far to trust it, seen by anyone."""

from __future__ import annotations

import contextlib

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.stages.context import Context
from autotune.profiling.timing import TWINS


def simulate_twins(context: Context) -> None:
    """Into ``context.found.twins``, one for each run on the hardware as far as there is time; first those of the comparison."""
    found = context.found
    if found.setup is None or found.cost is None:
        return
    simulator, rate = context.simulator(found.setup), found.setup.rate
    found.twins, late = [], context.within(TWINS)
    with context.meter.simulating():
        for run in sorted(found.runs, key=lambda run: run.stage == "validation" and run.score.rate != rate):
            if late():
                return
            with contextlib.suppress(EvaluationError):
                found.twins.append(simulator.twin(run))
