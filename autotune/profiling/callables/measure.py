"""A setting on the real callable, under an open-loop load of the real inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.engines.callable import CallableSource
from autotune.measure.evaluate import evaluate
from autotune.profiling.callables.load import Load
from autotune.profiling.callables.outcome import Outcome
from autotune.profiling.callables.settings import Setting
from autotune.profiling.callables.subject import Subject
from runtime.records import RequestRecord
from runtime.slo import SLO


def measure(
    setting: Setting, subject: Subject, load: Load, slo: SLO, stop: Callable[[], bool], *, replicas: int = 1
) -> Outcome:
    """One run of ``setting`` with so many workers. Raises EvaluationError, or Interrupted when ``stop`` says so."""
    kept: list[RequestRecord] = []

    def keep(records: Sequence[RequestRecord]) -> None:
        kept.extend(records)

    options = {
        "slo": slo,
        "cost": subject.cost,
        "grouping": subject.new_grouping(),
        "collate": subject.collate,
        "strategy": setting.strategy,
        "replicas": replicas,
    }
    engine = CallableSource(subject.function, subject.inputs, options).start(setting.knobs)
    try:
        score = evaluate(
            engine,
            None,
            load.workload,
            slo,
            vocab_size=len(subject.inputs),
            seed=load.seed,
            duration=load.window_s,
            warmup=load.warmup_s,
            stop=stop,
            keep=keep,
        )
    finally:
        engine.close(drain=False)
    outcome = Outcome(setting, simulated=False, lateness_p99_ms=score.lateness_p99_ms)
    outcome.add(kept, slo, load.window_s, load.seed)
    outcome.calls = score.steps.steps
    outcome.called = score.steps.steps * score.steps.mean_running
    return outcome
