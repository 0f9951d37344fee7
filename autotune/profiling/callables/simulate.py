"""A setting in virtual time: the batcher's own core and strategies, with the calibrated time of a call."""

from __future__ import annotations

import random

from autotune.profiling.callables.calibrate import Calibration
from autotune.profiling.callables.load import Load
from autotune.profiling.callables.outcome import Outcome
from autotune.profiling.callables.settings import Setting
from runtime.batching.core import BatchCore
from runtime.batching.groupings import Grouping
from runtime.batching.item import Call
from runtime.batching.strategies import strategy_of
from runtime.batching.virtual import serve
from runtime.slo import SLO


def simulate(
    setting: Setting,
    calibration: Calibration,
    costs: list[int],
    load: Load,
    slo: SLO,
    grouping: str | Grouping = "arrival",
) -> Outcome:
    """What ``setting`` does under ``load``. Calls scatter around the model as they did when it was calibrated."""
    workers = calibration.workers
    core = BatchCore(strategy_of(setting.strategy), grouping, slo=slo, knobs=setting.knobs, workers=workers)
    scatter = random.Random(load.seed)

    def service(call: Call) -> float:
        return calibration.price.of(len(call.items), call.cost) * scatter.choice(calibration.ratios)

    served = serve(core, load.items(costs), service, slowdown=calibration.slowdown if workers > 1 else None)
    outcome = Outcome(setting, simulated=True)
    outcome.add([r for r in served.records if r.arrival >= load.warmup_s], slo, load.window_s, load.seed)
    inside = [c for c in served.calls if load.warmup_s <= c.start < load.warmup_s + load.window_s]
    outcome.calls, outcome.called = len(inside), float(sum(len(c.items) for c in inside))
    return outcome
