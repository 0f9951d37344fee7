"""A callable whose calls take time on a clock of its own, and what profiling it needs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from optuna.storages import InMemoryStorage

from autotune.profiling.batcher_space import BatcherSpace
from autotune.profiling.callable import ITEMS, CallableFindings, CallableQuestion, CallableSetup, CallSimulator
from autotune.profiling.calls import CallCost, measure_calls
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import Run
from autotune.profiling.study import SweepStudy
from autotune.profiling.subject import Subject
from autotune.profiling.target import OfferedLoad
from runtime import SLO


class Ticking:
    """A call of n items of cost c takes ``a + b·n + d·c`` seconds of :meth:`clock`."""

    def __init__(self, a: float, b: float, d: float = 0.0) -> None:
        self.price = a, b, d
        self.now = 0.0
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        a, b, d = self.price
        self.sizes.append(len(items))
        self.now += a + b * len(items) + d * sum(map(len, items))
        return list(items)


def subject(function: Any, lengths: Sequence[int] = (1,), *, by_length: bool = False) -> Subject:
    inputs = ["x" * n for n in lengths]
    costs = list(lengths) if by_length else [1] * len(inputs)
    return Subject(
        "m:f", function, inputs, "inputs.jsonl", costs, "len" if by_length else None, len if by_length else None
    )


def new_study() -> SweepStudy:
    """One in memory, of no question."""
    return SweepStudy(InMemoryStorage(), "autotune", "memory", {})


def calibrated(ticking: Ticking, of: Subject, **options: Any) -> CallCost:
    given: dict[str, Any] = {"seed": 0, "budget_s": 1e6, "most": 32}
    return measure_calls(of, new_study(), clock=ticking.clock, **(given | options))


def question(slo: SLO | None, rate: float | None, budget_s: float, *, most: int | None = None) -> CallableQuestion:
    space = BatcherSpace(most=most)
    return Question(workload=ITEMS, slo=slo, rate=rate, seed=0, trials=None, budget_s=budget_s, space=space)


def simulated(setting: Any, cost: CallCost, costs: Sequence[int], load: OfferedLoad, slo: SLO) -> Run:
    """A run in virtual time."""
    return Run.of(setting, "simulation", str(setting), CallSimulator(cost, costs, slo).served(setting, load))


def findings(cost: CallCost, slo: SLO, rate: float, runs: Sequence[Run], **options: Any) -> CallableFindings:
    """Of a run that was stopped before it measured, at a rate that was asked for."""
    given: dict[str, Any] = {"rate_from": "user", "slo_from": "given", "window_s": 0.0, "warmup_s": 0.0}
    setup = CallableSetup(rate=rate, slo=slo, **(given | options))
    return Findings(space=BatcherSpace(), setup=setup, cost=cost, simulated=list(runs))


def interrupt_when_measured(module: Any) -> None:
    """The first call of ``module.embed`` that a batcher's worker makes, so while it is being measured, is met by Ctrl-C."""
    embed, main = module.embed, threading.current_thread()
    stopped: list[int] = []

    def interrupting(texts: list[str]) -> list[int]:
        if threading.current_thread() is not main and not stopped:
            stopped.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return embed(texts)  # type: ignore[no-any-return]  # of a module written by the test

    module.embed = interrupting
