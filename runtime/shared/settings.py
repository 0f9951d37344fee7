"""The knobs in force, their ceilings, and what each step may make of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from runtime.knobs import KnobLimits, Knobs
from runtime.shared.panics import ends_program
from runtime.tunable import LeaseHolder, SchedulerView, StepPolicy

log = logging.getLogger(__name__)


class Settings:
    """(epoch, knobs) as one reference, swapped whole. May be changed from any thread.

    ``knobs`` None: the defaults, below ``limits``. Raises ``ValueError`` for knobs above ``limits``.
    """

    def __init__(self, knobs: Knobs | None, limits: KnobLimits) -> None:
        self.limits = limits
        """Start-up ceilings."""
        self.effective_limits = limits
        """Ceilings in force."""
        self._wanted = limits.check(knobs) if knobs is not None else limits.clamp(Knobs())
        self.current = (0, self._wanted)
        """(epoch, knobs) in force."""
        self.policy: StepPolicy | None = None
        """Gives each step its own budget, below the knob. Set by :meth:`set_policy`."""
        self.lease = LeaseHolder()
        """The right to turn the knobs: one, however many faces they are turned through."""
        # so that no two settings get one epoch; a signal handler may set within a setting
        self._turning = threading.RLock()

    @property
    def knobs(self) -> Knobs:
        return self.current[1]

    @property
    def wanted(self) -> Knobs:
        """Those last set, which ``effective_limits`` may have lowered."""
        return self._wanted

    @property
    def epoch(self) -> int:
        return self.current[0]

    def set_knobs(self, knobs: Knobs) -> int:
        """Put ``knobs`` in force from the next step on; returns the epoch, which grows only if something changed.

        Raises ``ValueError`` above ``limits``. Between ``effective_limits`` and ``limits`` they are lowered to the former.
        """
        with self._turning:
            self._wanted = self.limits.check(knobs)
            return self._turn()

    def change_knobs(self, changes: Mapping[str, float]) -> int:
        """The same for the knobs named, the others staying as they were last set. Raises ``ValueError`` for an unknown name."""
        with self._turning:
            self._wanted = self.limits.check(self._wanted.with_(**changes))
            return self._turn()

    def limit(self, ceilings: KnobLimits) -> None:
        """Keep the knobs below ``ceilings``; when these rise again, so do the knobs, up to what was last set."""
        with self._turning:
            self.effective_limits = ceilings
            self._turn()

    def _turn(self) -> int:
        knobs = self.effective_limits.clamp(self._wanted)
        epoch, current = self.current
        if knobs != current:
            self.current = (epoch + 1, knobs)
        return self.current[0]

    def set_policy(self, policy: StepPolicy | None) -> None:
        with self._turning:
            self.policy = policy

    def budget(self, view: Callable[[], SchedulerView]) -> int | None:
        """What the step policy gives this step; None without one, or if it raises: then it is taken off."""
        policy = self.policy
        if policy is None:
            return None
        try:
            return max(0, int(policy.budget(view())))
        except BaseException as error:  # it is not the engine that the policy may end
            if ends_program(error):
                raise
            log.exception("the step policy failed and has been taken off; the knobs alone hold now")
        with self._turning:
            if self.policy is policy:  # another may have been set meanwhile
                self.policy = None
        return None
