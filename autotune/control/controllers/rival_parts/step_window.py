"""What the steps since the last decision were like: the sample that feedback controllers go by."""

from __future__ import annotations

import math

from runtime.records import LimitedBy, StepRecord, StepTimes

_LONGEST_S = 3600.0  # a step that claims more counts as that


class StepWindow:
    """Means over the steps that held decodes: only those can miss a target for token times.

    A step whose time is no positive number, or that failed, is left out. ``bound`` is the share of all steps that something
    other than demand kept from holding more.
    """

    __slots__ = ("_bound", "_decodes", "_seconds", "_steps", "_times", "_tokens", "most_running", "seen")

    def __init__(self) -> None:
        self._times = StepTimes()
        self.clear()

    def clear(self) -> None:
        self.seen = 0
        """Steps of any kind."""
        self.most_running = 0
        self._steps = self._decodes = self._tokens = self._bound = 0
        self._seconds = 0.0

    def add(self, record: StepRecord) -> None:
        seconds = self._times.of(record)
        if record.failed or not (math.isfinite(seconds) and seconds > 0):
            return
        n = record.steps
        self.seen += n
        self._bound += n * (record.limited_by is not LimitedBy.DEMAND)
        self.most_running = max(self.most_running, record.running)
        if record.decodes:
            self._steps += n
            self._seconds += n * min(seconds, _LONGEST_S)
            self._decodes += n * record.decodes
            self._tokens += n * record.tokens

    def __len__(self) -> int:
        """Steps with decodes."""
        return self._steps

    @property
    def seconds(self) -> float:
        """Mean time of a step, s; 0 of none."""
        return self._seconds / self._steps if self._steps else 0.0

    @property
    def decodes(self) -> float:
        return self._decodes / self._steps if self._steps else 0.0

    @property
    def tokens(self) -> float:
        return self._tokens / self._steps if self._steps else 0.0

    @property
    def bound(self) -> float:
        return self._bound / self.seen if self.seen else 0.0

    def evidence(self) -> dict[str, float]:
        """For a decision's log."""
        return {
            "steps": self.seen,
            "step_ms": round(1e3 * self.seconds, 3),
            "decodes": round(self.decodes, 1),
            "tokens": round(self.tokens, 1),
            "bound": round(self.bound, 3),
        }
