"""A callable whose calls take time on a clock of its own, and what profiling it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.callables.calibrate import Calibration, calibrate
from autotune.callables.subject import Subject


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


def calibrated(ticking: Ticking, of: Subject, **options: Any) -> Calibration:
    given: dict[str, Any] = {"seed": 0, "budget_s": 1e6, "most": 32}
    return calibrate(of, clock=ticking.clock, **(given | options))
