"""A setting of a callable's batcher under a load of the real inputs, measured or simulated: a score either way.

The load is Poisson arrivals, each with one of the inputs; the same arrivals and inputs when simulated and when measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from autotune.engines.callable import CallableSource
from autotune.measure.evaluate import evaluate
from autotune.measure.score import Score, score
from autotune.profile.callable import BatcherSetting
from autotune.profiling.callable_calibration import CallCost
from autotune.profiling.callable_subject import Subject
from autotune.profiling.target import Load
from autotune.workload import Workload, parse_workload, prompt_ids
from autotune.workload.replay import ReplayReport
from runtime.batching.accounts import call_record
from runtime.batching.core import BatchCore
from runtime.batching.groupings import Grouping
from runtime.batching.item import Call, Item
from runtime.batching.strategies import strategy_of
from runtime.batching.virtual import serve
from runtime.slo import SLO


def measure(
    setting: BatcherSetting,
    subject: Subject,
    load: Load,
    slo: SLO,
    stop: Callable[[], bool],
    *,
    workers: int = 1,
) -> Score:
    """One run of ``setting`` with so many workers. Raises EvaluationError, or Interrupted when ``stop`` says so."""
    options = {
        "slo": slo,
        "cost": subject.cost,
        "grouping": subject.new_grouping(),
        "collate": subject.collate,
        "strategy": setting.strategy,
        "replicas": workers,
    }
    engine = CallableSource(subject.function, subject.inputs, options).start(setting.knobs)
    try:
        return evaluate(
            engine,
            None,
            _workload(load),
            slo,
            vocab_size=len(subject.inputs),
            seed=load.seed,
            duration=load.window_s,
            warmup=load.warmup_s,
            stop=stop,
        )
    finally:
        engine.close(drain=False)


def simulate(
    setting: BatcherSetting,
    cost: CallCost,
    costs: Sequence[int],
    load: Load,
    slo: SLO,
    grouping: str | Grouping = "arrival",
) -> Score:
    """One run in virtual time, of inputs of ``costs``: the batcher's own core and strategies. Calls scatter around what ``cost``
    says as they did when it was measured."""
    core = BatchCore(strategy_of(setting.strategy), grouping, slo=slo, knobs=setting.knobs, workers=cost.workers)
    scatter = random.Random(load.seed)

    def service(call: Call) -> float:
        return cost.price.of(len(call.items), call.cost) * scatter.choice(cost.ratios)

    served = serve(core, items(load, costs), service, slowdown=cost.slowdown if cost.workers > 1 else None)
    end = load.warmup_s + load.window_s
    return score(
        [r for r in served.records if r.arrival >= load.warmup_s],
        slo,
        setting=setting.knobs,
        epoch=core.epoch,
        seed=load.seed,
        rate=load.rate,
        start=load.warmup_s,
        duration=load.window_s,
        tokens=0,
        steps=[call_record(c, len(c.items)) for c in served.calls if load.warmup_s <= c.start < end],
        report=ReplayReport(len(served.records), 0.0, end, 0.0, 0.0, 0.0, 0.0, False),
        wall_s=end,
    )


def items(load: Load, costs: Sequence[int]) -> list[Item]:
    """What :func:`measure` sends of inputs of ``costs``."""
    arrivals = _workload(load).arrivals(load.seed, duration=load.warmup_s + load.window_s)
    return [Item(None, a.time, costs[prompt_ids(a, len(costs), load.seed)[0]]) for a in arrivals]


def _workload(load: Load) -> Workload:
    return parse_workload(f"poisson:rate={load.rate!r},prompt=1,output=1")
