"""Watches for missing step records: without them a controller goes by what it knew before.

An engine with nothing to do sends no records and is healthy. So time counts from the first step that is known to have begun (the
engine asked for its budget, or sent a record that cannot be used) and ends with the next usable record.
"""

from __future__ import annotations

import math

from autotune.control.controllers.protocol import Proposal
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.tunable import SchedulerView, Tunable

_STEPS = 8  # steps without a record, and
_SECONDS = 2.0  # seconds, after which the records count as missing


class Watchdog:
    """Seconds are on the clock of ``engine``. ``raised``: whether the controller has fallen back since records are missing;
    ``latest``: when a step was last known to begin."""

    def __init__(self, engine: Tunable) -> None:
        self.raised = False
        self.latest = engine.view().now
        self._engine = engine
        self._since: float | None = None
        self._begun = 0  # steps begun since the last usable record
        self._unusable = 0  # records since then
        self._served = 0  # requests there were at the last step, and have not ended

    def begins(self, view: SchedulerView) -> bool:
        """A step begins. True if records are missing."""
        self._begun += 1
        self._served = view.running + view.waiting
        return self._lasts(view.now)

    def ends(self, record: RequestRecord) -> None:
        """A request has ended. After the last one that was there when the step began, no record is due."""
        if record.arrival > self.latest or record.finished < self.latest:  # such as one that was rejected as it came
            return
        self._served -= 1
        if self._served == 0:
            self._since, self._begun, self._unusable = None, 0, 0

    def check(self, record: StepRecord) -> bool:
        """Whether ``record`` is usable; if not, call :meth:`unusable` next."""
        if not (math.isfinite(record.start) and math.isfinite(record.end)):
            return False
        self._since, self._begun, self._unusable, self.raised = None, 0, 0, False
        return True

    def unusable(self) -> bool:
        """A record was not usable. True if usable ones are missing. Call it on the engine's thread."""
        self._unusable += 1
        return self._lasts(self._engine.view().now)

    @property
    def seconds(self) -> float | None:
        """Seconds for which a step's record has been due; None while none is. Does not wait for the engine."""
        if self._since is None:
            return None
        return max(0.0, self._engine.clock.now() - self._since)

    def proposal(self, start: Knobs) -> Proposal:
        """The starting knobs, and what is missing."""
        seconds, steps = self.seconds or 0.0, max(self._begun, self._unusable)
        what = "usable step record" if self._unusable else "step record"
        why = ", whose times are not numbers" if self._unusable else ""
        cause = f"no {what} for {seconds:.1f} s ({steps} steps{why}): holding the starting knobs"
        return Proposal(
            start, "fallback", cause, {"overdue_s": round(seconds, 3), "steps": steps, "unusable": self._unusable}
        )

    def _lasts(self, now: float) -> bool:
        if self._since is None:
            self._since = now
        if math.isfinite(now):
            self.latest = now
        if self._begun < _STEPS and self._unusable < _STEPS:
            return False
        return not now - self._since < _SECONDS  # written so that a time that is no number counts as long
