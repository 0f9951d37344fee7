"""Compares step times with those that the profile predicts, and says when the profile is wrong.

The controller corrects itself; this is for the operator, who should know that the profile does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from runtime.records import StepRecord, StepTimes, percentile
from runtime.step_model import StepFeatures, StepModel

_STEPS = 24  # that are judged together
_RARELY = 8  # of which only each so many-th is looked at after the first, so that it costs nothing
_OFF = 1.5  # factor by which the middle step may differ
_APART = 3.0  # factor between the 10% and the 90% step from which on the profile's shape is wrong
_NEWS = 1.5  # factor by which what was said last must have changed


class Finding(NamedTuple):
    """One sentence, and the figures behind it."""

    cause: str
    evidence: Mapping[str, float]


class ProfileDrift:
    """``model`` is the profile's. :meth:`observe` returns a finding when there is something new to say. It stops once the
    profile is wrong in a way that no speed of the machine explains."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._times = StepTimes()
        self._ratios: list[float] = []
        self._seen = 0
        self._reported = 1.0  # times the predicted time, as last reported
        self._apart = 0  # judgements in a row that no one speed explains
        self._over = False  # no speed makes the profile right, and that has been reported

    def observe(self, record: StepRecord) -> Finding | None:
        self._seen += 1
        seconds = self._times.of(record)
        if self._over or (self._seen > _STEPS and self._seen % _RARELY):
            return None
        step = StepFeatures.of(record)
        predicted = self._model.predict(step)
        if record.failed or not (0 < seconds < math.inf and 0 < predicted < math.inf):
            return None
        self._ratios.append(seconds / predicted)
        if len(self._ratios) < _STEPS:
            return None
        low, middle, high = (percentile(self._ratios, q) or 1.0 for q in (10, 50, 90))
        self._ratios.clear()
        return self._finding(low, middle, high)

    def _finding(self, low: float, middle: float, high: float) -> Finding | None:
        speed = middle if not 1 / _OFF < middle < _OFF else 1.0
        self._apart = self._apart + 1 if high / low > _APART else 0
        self._over = self._apart > 1  # one may have begun before a change of speed and ended after it
        if self._over:
            cause = (
                f"steps take {_times(low)} to {_times(high)} times as long as the profile predicts, by what they hold"
            )
        elif self._apart or 1 / _NEWS < speed / self._reported < _NEWS:
            return None
        elif speed == 1:
            cause = "steps take about as long as the profile predicts"
        else:
            cause = f"steps take {_times(middle)} times as long as the profile predicts"
        self._reported = speed
        ratios = {"ratio_p10": low, "ratio_p50": middle, "ratio_p90": high}
        return Finding(cause, {"steps": self._seen, **{name: round(ratio, 3) for name, ratio in ratios.items()}})


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"
