"""Whether the engine still says how long its steps take: without that, what a controller knows only grows older.

An engine with nothing to do is silent and sound. So silence counts from the first step that is known to have been begun, by the
budget asked for it or by a record that cannot be used, and ends with the next record that can.
"""

from __future__ import annotations

import math

from autotune.control.controllers.protocol import Proposal
from runtime.knobs import Knobs
from runtime.records import StepRecord
from runtime.tunable import SchedulerView, Tunable

_STEPS = 8  # steps in a row, and
_SECONDS = 2.0  # seconds, that are silence


class Silence:
    """Of ``engine``; seconds are on its clock. ``told``: whether somebody has been told of this silence;
    ``latest``: when a step was last known to begin in it."""

    def __init__(self, engine: Tunable) -> None:
        self.told = False
        self.latest = engine.view().now
        self._engine = engine
        self._since: float | None = None
        self._begun = 0  # steps begun since the last usable record
        self._unusable = 0  # records since then
        self._served = 0  # requests there were at the last step, and have not ended

    def begins(self, view: SchedulerView) -> bool:
        """A step begins. True if those before it have been silent for long."""
        self._begun += 1
        self._served = view.running + view.waiting
        return self._lasts(view.now)

    def ends(self) -> None:
        """A request has ended. After the last one no step is due any more."""
        self._served -= 1
        if self._served == 0:
            self._since, self._begun, self._unusable = None, 0, 0

    def hear(self, record: StepRecord) -> bool:
        """False for a record that cannot be used, and that :meth:`cannot_use` is to be told of."""
        if not (math.isfinite(record.start) and math.isfinite(record.end)):
            return False
        self._since, self._begun, self._unusable, self.told = None, 0, 0, False
        return True

    def cannot_use(self) -> bool:
        """A record has come that cannot be used, and this is the engine's thread. True if there have been no others for long."""
        self._unusable += 1
        return self._lasts(self._engine.view().now)

    @property
    def seconds(self) -> float | None:
        """How long a step's record has been due; None while none is. Does not wait for the engine."""
        if self._since is None:
            return None
        return max(0.0, self._engine.clock.now() - self._since)

    def proposal(self, start: Knobs) -> Proposal:
        """The knobs to hold meanwhile."""
        seconds, steps = self.seconds or 0.0, max(self._begun, self._unusable)
        what = f"{self._unusable} records had times that are no numbers" if self._unusable else "no record came"
        cause = f"{steps} steps in {seconds:.1f} s were not heard of: {what}; starting knobs hold"
        return Proposal(
            start, "fallback", cause, {"silent_s": round(seconds, 3), "steps": steps, "unusable": self._unusable}
        )

    def _lasts(self, now: float) -> bool:
        if self._since is None:
            self._since = now
        self.latest = now if math.isfinite(now) else self.latest
        # written so that a time that is no number counts as long
        return max(self._begun, self._unusable) >= _STEPS and not now - self._since < _SECONDS
