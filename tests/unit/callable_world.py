"""A callable whose calls take time on a clock of its own, and what profiling it needs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from optuna.storages import InMemoryStorage

from autotune.profiling.callable_calibration import CallCost, calibrate
from autotune.profiling.callable_subject import Subject
from autotune.profiling.study import SweepStudy


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
    return calibrate(of, new_study(), clock=ticking.clock, **(given | options))


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
